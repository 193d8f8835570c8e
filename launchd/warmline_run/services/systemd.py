"""systemd's user manager, through systemctl --user."""

import os
from pathlib import Path
from typing import ClassVar

from warmline_run.services import systemd_units as units
from warmline_run.services.manager import COMMAND_TIMEOUT_S, Installed, ServiceManager, State
from warmline_run.services.service import Agent, Which
from warmline_run.settings.resolve import ConfigurationError

PROPERTIES = "LoadState,ActiveState,SubState,MainPID,ExecMainCode,ExecMainStatus,ExecMainExitTimestampMonotonic"
EXITED = "1"  # ExecMainCode is waitid's si_code
NO_SESSION = (
    "is there a session of yours?  `sudo loginctl enable-linger $USER` makes one that lasts;"
    " where there is no systemd, as in most containers, use `warmline serve`"
)


class Systemd(ServiceManager):
    word: ClassVar[str] = "systemd"
    tool: ClassVar[str] = "systemctl"
    elsewhere: ClassVar[str] = "user services are systemd's; on a Mac use `warmline launchd`"
    kept_as: ClassVar[str] = "user services"

    def label(self, which: Which) -> str:
        return "-".join(filter(None, ("warmline", which.name, which.role))) + ".service"

    def file(self, which: Which) -> Path:
        configuration = os.environ.get("XDG_CONFIG_HOME", "")
        folder = Path(configuration) if configuration.startswith("/") else Path.home() / ".config"
        return folder / "systemd" / "user" / self.label(which)

    def content(self, agent: Agent) -> bytes:
        if not str(agent.home).isprintable():
            raise ConfigurationError(f"--home {str(agent.home)!r}: a unit can't name a folder with such characters")
        return units.content(agent)

    def parse(self, data: bytes) -> Installed:
        return units.read(data)

    def state(self, which: Which) -> State:
        words = ("--user", "show", f"--property={PROPERTIES}", self.label(which))
        done = self.ask(*words)
        if done.code:
            raise self.failure(words, done, NO_SESSION)
        return state_in(done.said)

    def check_answers(self) -> None:
        self._tell("daemon-reload")

    def start(self, which: Which) -> None:
        self._tell("daemon-reload")
        self._tell("enable", self.label(which))
        self._tell("restart", self.label(which), timeout_s=self._patience_s(which))

    def stop(self, which: Which) -> None:
        words = ("disable", "--now") if self.is_installed(which) else ("stop",)
        self._tell(*words, self.label(which), timeout_s=self._patience_s(which))

    def restart(self, which: Which) -> None:
        self._tell("restart", self.label(which), timeout_s=self._patience_s(which))

    def forget(self) -> None:
        self._tell("daemon-reload")

    def _tell(self, *words: str, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        self.tell("--user", *words, hint=NO_SESSION if words == ("daemon-reload",) else "", timeout_s=timeout_s)

    def _patience_s(self, which: Which) -> float:
        return self.exit_timeout_s(which) + COMMAND_TIMEOUT_S


def state_in(shown: str) -> State:
    """Of what `systemctl show` says of a unit."""
    values = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    pid = int(values.get("MainPID", "0") or 0)
    return State(values.get("LoadState") == "loaded", pid or None, "" if pid else _ending(values))


def _ending(values: dict[str, str]) -> str:
    if values.get("ExecMainExitTimestampMonotonic", "0") in ("", "0"):
        return ""
    status = values.get("ExecMainStatus", "")
    return f"exit code {status}" if values.get("ExecMainCode") == EXITED else f"killed by signal {status}"
