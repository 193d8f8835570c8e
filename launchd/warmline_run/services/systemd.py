"""systemd's user manager, through systemctl --user."""

import os
from pathlib import Path
from typing import ClassVar

from warmline_common.settings.resolve import ConfigurationError
from warmline_run.services import systemd_units as units
from warmline_run.services.manager import COMMAND_TIMEOUT_S, InstalledService, ServiceManager, ServiceState
from warmline_run.services.service import ServiceId, ServiceProcess

PROPERTIES = "LoadState,ActiveState,SubState,MainPID,ExecMainCode,ExecMainStatus,ExecMainExitTimestampMonotonic"
EXITED = "1"  # ExecMainCode is waitid's si_code
SESSION_HINT = (
    "is there a session of yours?  `sudo loginctl enable-linger $USER` makes one that lasts;"
    " where there is no systemd, as in most containers, use `warmline serve`"
)


class SystemdManager(ServiceManager):
    name: ClassVar[str] = "systemd"
    tool: ClassVar[str] = "systemctl"
    missing_hint: ClassVar[str] = "user services are systemd's; on a Mac use `warmline launchd`"
    display_name: ClassVar[str] = "user services"

    def label(self, service_id: ServiceId) -> str:
        return "-".join(filter(None, ("warmline", service_id.name, service_id.role))) + ".service"

    def service_file(self, service_id: ServiceId) -> Path:
        configuration = os.environ.get("XDG_CONFIG_HOME", "")
        folder = Path(configuration) if configuration.startswith("/") else Path.home() / ".config"
        return folder / "systemd" / "user" / self.label(service_id)

    def render_file(self, process: ServiceProcess) -> bytes:
        if not str(process.home).isprintable():
            raise ConfigurationError(f"--home {str(process.home)!r}: a unit can't name a folder with such characters")
        return units.render_unit(process)

    def parse_file(self, data: bytes) -> InstalledService:
        return units.parse_unit(data)

    def read_state(self, service_id: ServiceId) -> ServiceState:
        words = ("--user", "show", f"--property={PROPERTIES}", self.label(service_id))
        done = self.run_tool(*words)
        if done.exit_code:
            raise self.make_error(words, done, SESSION_HINT)
        return parse_state(done.output)

    def check_available(self) -> None:
        self._run_systemctl("daemon-reload")

    def start(self, service_id: ServiceId) -> None:
        self._run_systemctl("daemon-reload")
        self._run_systemctl("enable", self.label(service_id))
        self._run_systemctl("restart", self.label(service_id), timeout_s=self._stop_timeout_s(service_id))

    def stop(self, service_id: ServiceId) -> None:
        words = ("disable", "--now") if self.is_installed(service_id) else ("stop",)
        self._run_systemctl(*words, self.label(service_id), timeout_s=self._stop_timeout_s(service_id))

    def restart(self, service_id: ServiceId) -> None:
        self._run_systemctl("restart", self.label(service_id), timeout_s=self._stop_timeout_s(service_id))

    def reload(self) -> None:
        self._run_systemctl("daemon-reload")

    def _run_systemctl(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        self.run_checked(
            "--user", *arguments, hint=SESSION_HINT if arguments == ("daemon-reload",) else "", timeout_s=timeout_s
        )

    def _stop_timeout_s(self, service_id: ServiceId) -> float:
        return self.exit_timeout_s(service_id) + COMMAND_TIMEOUT_S


def parse_state(output: str) -> ServiceState:
    """Of what `systemctl show` says of a unit."""
    values = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
    pid = int(values.get("MainPID", "0") or 0)
    return ServiceState(values.get("LoadState") == "loaded", pid or None, "" if pid else _describe_exit(values))


def _describe_exit(values: dict[str, str]) -> str:
    if values.get("ExecMainExitTimestampMonotonic", "0") in ("", "0"):
        return ""
    status = values.get("ExecMainStatus", "")
    return f"exit code {status}" if values.get("ExecMainCode") == EXITED else f"killed by signal {status}"
