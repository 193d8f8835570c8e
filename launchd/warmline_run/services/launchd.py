"""launchd, through launchctl, in the domain of the user who is logged in (gui/UID)."""

import os
import plistlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from warmline_common.process.exit_codes import AGENT_VARIABLE, LAUNCHD
from warmline_run.services.manager import (
    InstalledService,
    Result,
    ServiceManager,
    ServiceManagerError,
    ServiceState,
    wait_until,
)
from warmline_run.services.service import ServiceId, ServiceProcess

THROTTLE_S = 30  # launchd's shortest time between two starts: a model takes long to load in vain
DESCRIPTORS = 8192  # macOS gives 256
UMASK = 0o077
NOT_LOADED = (3, 113)  # exit codes of bootout and print for an unknown service
BUSY = (5, 36, 37)  # exit codes of bootstrap while the predecessor is still being removed
BUSY_TIMEOUT_S = 10.0
NO_DOMAIN = 125
SCHEDULED = "spawn scheduled"  # the state of a service that launchd is about to start
REQUESTED_ENDINGS = ("exit code 0", "killed by signal Terminated: 15")  # of a process that was told to stop
LOGIN_HINT = (
    "agents run for a user who is logged in at the Mac's screen (or by screen sharing): log in there, and try again"
)


class LaunchdManager(ServiceManager):
    name: ClassVar[str] = LAUNCHD
    group: ClassVar[str] = "launchd"
    command: ClassVar[tuple[str, ...]] = ("launchctl",)
    missing_hint: ClassVar[str] = "launchd is macOS's; on Linux use `warmline service`"
    display_name: ClassVar[str] = "launch agents"
    stop_margin_s: ClassVar[float] = BUSY_TIMEOUT_S

    def __init__(self) -> None:
        self._domain = f"gui/{os.getuid()}"

    def label(self, service_id: ServiceId) -> str:
        return ".".join(filter(None, ("com.warmline", service_id.name, service_id.role)))

    def service_file(self, service_id: ServiceId) -> Path:
        return Path.home() / "Library" / "LaunchAgents" / f"{self.label(service_id)}.plist"

    def render_file(self, process: ServiceProcess) -> str:
        plist = {
            "Label": self.label(process.service_id),
            "ProgramArguments": process.arguments,
            "EnvironmentVariables": {**process.environment, AGENT_VARIABLE: self.name},
            "WorkingDirectory": str(process.home),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},  # so that a stop, or a configuration error, is the end
            "ThrottleInterval": THROTTLE_S,
            "ExitTimeOut": process.exit_timeout_s,
            "ProcessType": "Interactive",  # or macOS slows processor and disk down
            "SoftResourceLimits": {"NumberOfFiles": DESCRIPTORS},
            "StandardOutPath": str(process.output),
            "StandardErrorPath": str(process.output),
            "Umask": UMASK,
        }
        return plistlib.dumps(plist, sort_keys=False).decode()

    def parse_file(self, data: bytes) -> InstalledService:
        try:
            plist: Mapping[str, Any] = plistlib.loads(data)
            return InstalledService(
                arguments=[str(word) for word in plist["ProgramArguments"]],
                environment={str(name): str(value) for name, value in plist["EnvironmentVariables"].items()},
                exit_timeout_s=int(plist["ExitTimeOut"]),
            )
        except (plistlib.InvalidFileException, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a plist of Warmline: {error!r}") from None
        except Exception as error:  # noqa: BLE001  expat's own, which plistlib lets through
            raise ValueError(f"no plist: {error}") from None

    def read_state(self, service_id: ServiceId) -> ServiceState:
        arguments = ("print", self._service_target(service_id))
        result = self.run_tool(*arguments)
        if result.returncode in NOT_LOADED:
            return ServiceState(loaded=False)
        if result.returncode:
            raise self.make_error(arguments, result)
        return parse_state(result.stdout)

    def reload(self) -> None:
        """launchd reads the folder at the next login; whether it can keep a service it says when one is started."""

    def start(self, service_id: ServiceId) -> None:
        # A user may have disabled the service; that outlives an installation.
        self.run_checked("enable", self._service_target(service_id))
        arguments = ("bootstrap", self._domain, str(self.service_file(service_id)))
        results: list[Result] = []

        def is_decided() -> bool:
            results.append(self.run_tool(*arguments))
            return results[-1].returncode not in BUSY

        wait_until(is_decided, BUSY_TIMEOUT_S)
        if results[-1].returncode:
            raise self.make_error(arguments, results[-1])

    def stop(self, service_id: ServiceId) -> None:
        """bootout returns before the process has ended."""
        target, timeout_s = self._service_target(service_id), self.stop_timeout_s(service_id)
        result = self.run_tool("bootout", target, timeout_s=timeout_s)
        if result.returncode not in (0, *NOT_LOADED, *BUSY):
            raise self.make_error(("bootout", target), result)
        if not wait_until(lambda: not self.read_state(service_id).loaded, timeout_s):
            raise ServiceManagerError(f"{self.label(service_id)} does not end; `launchctl print {target}` says more")

    def restart(self, service_id: ServiceId) -> None:
        """SIGTERM first: kickstart -k leaves a process no time to save."""
        target, old = self._service_target(service_id), self.read_state(service_id)
        if not old.loaded:
            self.start(service_id)
            return
        has_ended = True
        if old.pid is not None:
            self.run_tool("kill", "SIGTERM", target)
            has_ended = wait_until(lambda: self.read_state(service_id).pid != old.pid, self.stop_timeout_s(service_id))
        self.run_checked("kickstart", *(() if has_ended else ("-k",)), target)

    def make_error(self, arguments: tuple[str, ...], result: Result) -> ServiceManagerError:
        return self.format_error(arguments, result, LOGIN_HINT if result.returncode == NO_DOMAIN else "")

    def _service_target(self, service_id: ServiceId) -> str:
        return f"{self._domain}/{self.label(service_id)}"


def parse_state(output: str) -> ServiceState:
    """State in the output of `launchctl print`: lines like "pid = 123".  Those indented deeper are about parts."""
    values = dict(re.findall(r"^\t([a-z ]+?) = (.+)$", output, flags=re.MULTILINE))
    pid = values.get("pid", "")
    last_exit = ""
    if "last terminating signal" in values:
        last_exit = f"killed by signal {values['last terminating signal']}"
    elif re.match(r"-?\d", code := values.get("last exit code", "")):
        last_exit = f"exit code {code}"
    if values.get("state") == SCHEDULED and last_exit in REQUESTED_ENDINGS:
        last_exit = ""  # a requested start waits for the end of ThrottleInterval: no failure
    return ServiceState(loaded=True, pid=int(pid) if pid.isdecimal() else None, last_exit=last_exit)
