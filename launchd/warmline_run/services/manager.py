"""What keeps agents: launchd or systemd, each behind the same few verbs."""

import os
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from warmline_run.exit import VARIABLE
from warmline_run.services.service import Agent, Which

COMMAND_TIMEOUT_S = 60.0
POLL_S = 0.1
EXIT_TIMEOUT_S = 60  # of an agent whose file can't be read


class ManagerFailed(Exception):
    """launchctl or systemctl did not do what it was asked, or is not there; one line for people."""


@dataclass(frozen=True)
class Installed:
    """What an agent's file says."""

    arguments: list[str]
    environment: dict[str, str]
    exit_timeout_s: int


@dataclass(frozen=True)
class State:
    """`pid` is None while nothing runs; `ended` says how the last run ended, "" where none has or that isn't known."""

    loaded: bool
    pid: int | None = None
    ended: str = ""

    @property
    def has_failed(self) -> bool:
        """It has run and doesn't now."""
        return self.pid is None and bool(self.ended)


@dataclass(frozen=True)
class Done:
    """How a command of the manager's ended."""

    code: int
    said: str


class ServiceManager(ABC):
    """All methods block; those that ask the manager raise ManagerFailed."""

    word: ClassVar[str]  # of the command line, and in WARMLINE_AGENT
    tool: ClassVar[str]
    elsewhere: ClassVar[str]  # what to say where the tool is missing
    kept_as: ClassVar[str]  # what people call its agents

    @abstractmethod
    def label(self, which: Which) -> str: ...

    @abstractmethod
    def file(self, which: Which) -> Path: ...

    @abstractmethod
    def content(self, agent: Agent) -> bytes: ...

    @abstractmethod
    def parse(self, data: bytes) -> Installed:
        """Raises ValueError."""

    @abstractmethod
    def state(self, which: Which) -> State: ...

    @abstractmethod
    def start(self, which: Which) -> None:
        """From its file as it is now.  Not loaded before."""

    @abstractmethod
    def stop(self, which: Which) -> None:
        """And unload it, so that it stays away.  Returns when the process has ended."""

    @abstractmethod
    def restart(self, which: Which) -> None:
        """The process alone, with its file as it was loaded; one that is not loaded is started."""

    @abstractmethod
    def forget(self) -> None:
        """Files were removed."""

    @abstractmethod
    def check_answers(self) -> None:
        """Before anything is written: raises ManagerFailed where it is clear that it would keep nothing."""

    def check_there(self) -> None:
        if shutil.which(self.tool) is None:
            raise ManagerFailed(f"{self.tool} was not found: {self.elsewhere}")

    def marked(self, agent: Agent) -> Agent:
        """An agent whose process knows who keeps it."""
        return replace(agent, environment={**agent.environment, VARIABLE: self.word})

    def write(self, agent: Agent, path: Path) -> None:
        """Whole or not at all; readable by its owner alone.  Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.tmp")
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.content(self.marked(agent)))
        draft.replace(path)

    def is_installed(self, which: Which) -> bool:
        return self.file(which).is_file()

    def is_kept(self, which: Which) -> bool:
        """Whatever became of its file.  Not where the manager can't be asked."""
        try:
            state = self.state(which)
        except ManagerFailed:
            return False
        return state.loaded or state.pid is not None

    def installed(self, which: Which) -> Installed | None:
        """None where it is not installed, or its file is not as we write it."""
        with suppress(OSError, ValueError):
            return self.parse(self.file(which).read_bytes())
        return None

    def exit_timeout_s(self, which: Which) -> int:
        installed = self.installed(which)
        return installed.exit_timeout_s if installed else EXIT_TIMEOUT_S

    def ask(self, *words: str, timeout_s: float = COMMAND_TIMEOUT_S) -> Done:
        command = [self.tool, *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except FileNotFoundError:
            self.check_there()
            raise
        except subprocess.TimeoutExpired:
            raise ManagerFailed(f"{' '.join(command)}: no answer in {timeout_s:g} s") from None
        return Done(done.returncode, (done.stdout + done.stderr).strip())

    def tell(self, *words: str, hint: str = "", timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Raises ManagerFailed where it is not done."""
        done = self.ask(*words, timeout_s=timeout_s)
        if done.code:
            raise self.failure(words, done, hint)

    def failure(self, words: tuple[str, ...], done: Done, hint: str = "") -> ManagerFailed:
        said = " ".join(done.said.split()) or f"exit code {done.code}"
        return ManagerFailed(f"{self.tool} {' '.join(words)}: {said}" + (f"; {hint}" if hint else ""))


def wait_until(happened: Callable[[], bool], timeout_s: float) -> bool:
    """Whether it did.  The managers tell no one, so they are asked."""
    until = time.monotonic() + timeout_s
    while not happened():
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_S)
    return True
