"""launchd, through launchctl, in the domain of the user who is logged in (gui/UID)."""

import os
import re
from pathlib import Path
from typing import ClassVar

from warmline_run.exit import LAUNCHD
from warmline_run.services import launchd_plists as plists
from warmline_run.services.manager import Done, Installed, ManagerFailed, ServiceManager, State, wait_until
from warmline_run.services.service import Agent, Which

NOT_LOADED = (3, 113)  # bootout's and print's exit codes for what is not there
BUSY = (5, 36, 37)  # what bootstrap ends with while the predecessor is still being removed
SETTLE_S = 10.0
NO_DOMAIN = 125
SCHEDULED = "spawn scheduled"  # the state of what launchd is about to start
PEACEFUL = ("exit code 0", "killed by signal Terminated: 15")  # how what is told to stop ends
LOG_IN = (
    "agents run for a user who is logged in at the Mac's screen (or by screen sharing): log in there, and try again"
)


class Launchd(ServiceManager):
    word: ClassVar[str] = LAUNCHD
    tool: ClassVar[str] = "launchctl"
    elsewhere: ClassVar[str] = "launchd is macOS's; on Linux use `warmline service`"
    kept_as: ClassVar[str] = "launch agents"

    def __init__(self) -> None:
        self._domain = f"gui/{os.getuid()}"

    def label(self, which: Which) -> str:
        return ".".join(filter(None, ("com.warmline", which.name, which.role)))

    def file(self, which: Which) -> Path:
        return Path.home() / "Library" / "LaunchAgents" / f"{self.label(which)}.plist"

    def content(self, agent: Agent) -> bytes:
        return plists.content(self.label(agent.which), agent)

    def parse(self, data: bytes) -> Installed:
        return plists.read(data)

    def state(self, which: Which) -> State:
        done = self.ask("print", self._target(which))
        if done.code in NOT_LOADED:
            return State(loaded=False)
        if done.code:
            raise self.failure(("print", self._target(which)), done, LOG_IN if done.code == NO_DOMAIN else "")
        return state_in(done.said)

    def check_answers(self) -> None:
        """launchd says so at the first agent; until the next login that one is only written."""

    def start(self, which: Which) -> None:
        self.tell("enable", self._target(which))  # a user may have switched it off; that outlives an installation
        words = ("bootstrap", self._domain, str(self.file(which)))
        tries: list[Done] = []

        def is_decided() -> bool:
            tries.append(self.ask(*words))
            return tries[-1].code not in BUSY

        wait_until(is_decided, SETTLE_S)
        if (done := tries[-1]).code:
            raise self.failure(words, done, LOG_IN if done.code == NO_DOMAIN else "")

    def stop(self, which: Which) -> None:
        """bootout returns before the process has ended."""
        done = self.ask("bootout", self._target(which), timeout_s=self._patience_s(which))
        if done.code and done.code not in (*NOT_LOADED, *BUSY):
            raise self.failure(("bootout", self._target(which)), done)
        if not wait_until(lambda: not self.state(which).loaded, self._patience_s(which)):
            raise ManagerFailed(f"{self.label(which)} does not end; `launchctl print {self._target(which)}` says more")

    def restart(self, which: Which) -> None:
        """SIGTERM first: what kickstart -k does to a process leaves it no time to save."""
        old = self.state(which)
        if not old.loaded:
            self.start(which)
            return
        has_ended = True
        if old.pid is not None:
            self.ask("kill", "SIGTERM", self._target(which))
            has_ended = wait_until(lambda: self.state(which).pid != old.pid, self._patience_s(which))
        self.tell("kickstart", *(() if has_ended else ("-k",)), self._target(which))

    def forget(self) -> None:
        """launchd reads the folder at the next login."""

    def _target(self, which: Which) -> str:
        return f"{self._domain}/{self.label(which)}"

    def _patience_s(self, which: Which) -> float:
        return self.exit_timeout_s(which) + SETTLE_S


def state_in(printed: str) -> State:
    """Of what `launchctl print` says of a service: lines like "pid = 123".  Those indented deeper are about parts."""
    values = dict(re.findall(r"^\t([a-z ]+?) = (.+)$", printed, flags=re.MULTILINE))
    pid = values.get("pid", "")
    ended = ""
    if "last terminating signal" in values:
        ended = f"killed by signal {values['last terminating signal']}"
    elif re.match(r"-?\d", code := values.get("last exit code", "")):
        ended = f"exit code {code}"
    if values.get("state") == SCHEDULED and ended in PEACEFUL:
        ended = ""  # so it is started because it was asked for, once ThrottleInterval is over, and has not failed
    return State(loaded=True, pid=int(pid) if pid.isdecimal() else None, ended=ended)
