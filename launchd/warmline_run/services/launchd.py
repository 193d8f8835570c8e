"""launchd, through launchctl, in the domain of the user who is logged in (gui/UID)."""

import os
import plistlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from warmline_common.process.exit_codes import LAUNCHD
from warmline_run.services.manager import (
    CommandResult,
    InstalledService,
    ServiceManager,
    ServiceManagerError,
    ServiceState,
    wait_until,
)
from warmline_run.services.service import ServiceId, ServiceProcess

THROTTLE_S = 30  # launchd's shortest time between two starts: a model takes long to load in vain
DESCRIPTORS = 8192  # macOS gives 256
UMASK = 0o077


def render_plist(label: str, process: ServiceProcess) -> bytes:
    output = str(process.output)
    return plistlib.dumps(
        {
            "Label": label,
            "ProgramArguments": process.arguments,
            "EnvironmentVariables": process.environment,
            "WorkingDirectory": str(process.home),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},  # so that a stop, or a configuration error, is the end
            "ThrottleInterval": THROTTLE_S,
            "ExitTimeOut": process.exit_timeout_s,
            "ProcessType": "Interactive",  # or macOS slows processor and disk down
            "SoftResourceLimits": {"NumberOfFiles": DESCRIPTORS},
            "StandardOutPath": output,
            "StandardErrorPath": output,
            "Umask": UMASK,
        },
        sort_keys=False,
    )


def parse_plist(data: bytes) -> InstalledService:
    """Raises ValueError for what is no plist of an agent."""
    try:
        plist: Mapping[str, Any] = plistlib.loads(data)
        return InstalledService(
            arguments=[str(word) for word in plist["ProgramArguments"]],
            environment={str(name): str(value) for name, value in plist["EnvironmentVariables"].items()},
            exit_timeout_s=int(plist["ExitTimeOut"]),
        )
    except (plistlib.InvalidFileException, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"no plist of ours: {error!r}") from None
    except Exception as error:  # noqa: BLE001  expat's own, which plistlib lets through
        raise ValueError(f"no plist: {error}") from None


NOT_LOADED = (3, 113)  # bootout's and print's exit codes for what is not there
BUSY = (5, 36, 37)  # what bootstrap ends with while the predecessor is still being removed
BUSY_TIMEOUT_S = 10.0
NO_DOMAIN = 125
SCHEDULED = "spawn scheduled"  # the state of what launchd is about to start
REQUESTED_ENDINGS = ("exit code 0", "killed by signal Terminated: 15")  # how what is told to stop ends
LOGIN_HINT = (
    "agents run for a user who is logged in at the Mac's screen (or by screen sharing): log in there, and try again"
)


class LaunchdManager(ServiceManager):
    name: ClassVar[str] = LAUNCHD
    tool: ClassVar[str] = "launchctl"
    missing_hint: ClassVar[str] = "launchd is macOS's; on Linux use `warmline service`"
    display_name: ClassVar[str] = "launch agents"

    def __init__(self) -> None:
        self._domain = f"gui/{os.getuid()}"

    def label(self, service_id: ServiceId) -> str:
        return ".".join(filter(None, ("com.warmline", service_id.name, service_id.role)))

    def service_file(self, service_id: ServiceId) -> Path:
        return Path.home() / "Library" / "LaunchAgents" / f"{self.label(service_id)}.plist"

    def render_file(self, process: ServiceProcess) -> bytes:
        return render_plist(self.label(process.service_id), process)

    def parse_file(self, data: bytes) -> InstalledService:
        return parse_plist(data)

    def read_state(self, service_id: ServiceId) -> ServiceState:
        done = self.run_tool("print", self._service_target(service_id))
        if done.exit_code in NOT_LOADED:
            return ServiceState(loaded=False)
        if done.exit_code:
            raise self.make_error(
                ("print", self._service_target(service_id)), done, LOGIN_HINT if done.exit_code == NO_DOMAIN else ""
            )
        return parse_state(done.output)

    def check_available(self) -> None:
        """launchd says so at the first agent; until the next login that one is only written."""

    def start(self, service_id: ServiceId) -> None:
        self.run_checked(
            "enable", self._service_target(service_id)
        )  # a user may have switched it off; that outlives an installation
        words = ("bootstrap", self._domain, str(self.service_file(service_id)))
        tries: list[CommandResult] = []

        def is_decided() -> bool:
            tries.append(self.run_tool(*words))
            return tries[-1].exit_code not in BUSY

        wait_until(is_decided, BUSY_TIMEOUT_S)
        if (done := tries[-1]).exit_code:
            raise self.make_error(words, done, LOGIN_HINT if done.exit_code == NO_DOMAIN else "")

    def stop(self, service_id: ServiceId) -> None:
        """bootout returns before the process has ended."""
        done = self.run_tool("bootout", self._service_target(service_id), timeout_s=self._stop_timeout_s(service_id))
        if done.exit_code and done.exit_code not in (*NOT_LOADED, *BUSY):
            raise self.make_error(("bootout", self._service_target(service_id)), done)
        if not wait_until(lambda: not self.read_state(service_id).loaded, self._stop_timeout_s(service_id)):
            raise ServiceManagerError(
                f"{self.label(service_id)} does not end; `launchctl print {self._service_target(service_id)}` says more"
            )

    def restart(self, service_id: ServiceId) -> None:
        """SIGTERM first: what kickstart -k does to a process leaves it no time to save."""
        old = self.read_state(service_id)
        if not old.loaded:
            self.start(service_id)
            return
        has_ended = True
        if old.pid is not None:
            self.run_tool("kill", "SIGTERM", self._service_target(service_id))
            has_ended = wait_until(lambda: self.read_state(service_id).pid != old.pid, self._stop_timeout_s(service_id))
        self.run_checked("kickstart", *(() if has_ended else ("-k",)), self._service_target(service_id))

    def reload(self) -> None:
        """launchd reads the folder at the next login."""

    def _service_target(self, service_id: ServiceId) -> str:
        return f"{self._domain}/{self.label(service_id)}"

    def _stop_timeout_s(self, service_id: ServiceId) -> float:
        return self.exit_timeout_s(service_id) + BUSY_TIMEOUT_S


def parse_state(output: str) -> ServiceState:
    """Of what `launchctl print` says of a service: lines like "pid = 123".  Those indented deeper are about parts."""
    values = dict(re.findall(r"^\t([a-z ]+?) = (.+)$", output, flags=re.MULTILINE))
    pid = values.get("pid", "")
    ended = ""
    if "last terminating signal" in values:
        ended = f"killed by signal {values['last terminating signal']}"
    elif re.match(r"-?\d", code := values.get("last exit code", "")):
        ended = f"exit code {code}"
    if values.get("state") == SCHEDULED and ended in REQUESTED_ENDINGS:
        ended = ""  # so it is started because it was asked for, once ThrottleInterval is over, and has not failed
    return ServiceState(loaded=True, pid=int(pid) if pid.isdecimal() else None, last_exit=ended)
