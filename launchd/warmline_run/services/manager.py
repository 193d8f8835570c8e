"""Service managers: launchd or systemd, behind the same methods."""

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

from warmline_common.process.exit_codes import AGENT_VARIABLE
from warmline_run.services.service import ServiceId, ServiceProcess

COMMAND_TIMEOUT_S = 60.0
POLL_S = 0.1
EXIT_TIMEOUT_S = 60  # of an agent whose file can't be read


class ServiceManagerError(Exception):
    """launchctl or systemctl did not do what it was asked, or is not there; one line for people."""


@dataclass(frozen=True)
class InstalledService:
    """Content of a service's file."""

    arguments: list[str]
    environment: dict[str, str]
    exit_timeout_s: int


@dataclass(frozen=True)
class ServiceState:
    """`pid` is None while nothing runs; `ended` says how the last run ended, "" where none has or that isn't known."""

    loaded: bool
    pid: int | None = None
    last_exit: str = ""

    @property
    def has_failed(self) -> bool:
        """It has run and doesn't now."""
        return self.pid is None and bool(self.last_exit)


@dataclass(frozen=True)
class CommandResult:
    """Result of a manager's command."""

    exit_code: int
    output: str


class ServiceManager(ABC):
    """All methods block; those that ask the manager raise ManagerFailed."""

    name: ClassVar[str]  # of the command line, and in WARMLINE_AGENT
    tool: ClassVar[str]
    missing_hint: ClassVar[str]  # what to say where the tool is missing
    display_name: ClassVar[str]  # what people call its agents

    @abstractmethod
    def label(self, service_id: ServiceId) -> str: ...

    @abstractmethod
    def service_file(self, service_id: ServiceId) -> Path: ...

    @abstractmethod
    def render_file(self, process: ServiceProcess) -> bytes: ...

    @abstractmethod
    def parse_file(self, data: bytes) -> InstalledService:
        """Raises ValueError."""

    @abstractmethod
    def read_state(self, service_id: ServiceId) -> ServiceState: ...

    @abstractmethod
    def start(self, service_id: ServiceId) -> None:
        """From its file as it is now.  Not loaded before."""

    @abstractmethod
    def stop(self, service_id: ServiceId) -> None:
        """And unload it, so that it stays away.  Returns when the process has ended."""

    @abstractmethod
    def restart(self, service_id: ServiceId) -> None:
        """The process alone, with its file as it was loaded; one that is not loaded is started."""

    @abstractmethod
    def reload(self) -> None:
        """Files were removed."""

    @abstractmethod
    def check_available(self) -> None:
        """Before anything is written: raises ManagerFailed where it is clear that it would keep nothing."""

    def check_tool_installed(self) -> None:
        if shutil.which(self.tool) is None:
            raise ServiceManagerError(f"{self.tool} was not found: {self.missing_hint}")

    def with_manager_variable(self, process: ServiceProcess) -> ServiceProcess:
        """An agent whose process knows who keeps it."""
        return replace(process, environment={**process.environment, AGENT_VARIABLE: self.name})

    def write_file(self, process: ServiceProcess, path: Path) -> None:
        """Whole or not at all; readable by its owner alone.  Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.tmp")
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.render_file(self.with_manager_variable(process)))
        draft.replace(path)

    def is_installed(self, service_id: ServiceId) -> bool:
        return self.service_file(service_id).is_file()

    def is_managed(self, service_id: ServiceId) -> bool:
        """Whatever became of its file.  Not where the manager can't be asked."""
        try:
            state = self.read_state(service_id)
        except ServiceManagerError:
            return False
        return state.loaded or state.pid is not None

    def read_installed(self, service_id: ServiceId) -> InstalledService | None:
        """None where it is not installed, or its file is not as we write it."""
        with suppress(OSError, ValueError):
            return self.parse_file(self.service_file(service_id).read_bytes())
        return None

    def exit_timeout_s(self, service_id: ServiceId) -> int:
        installed = self.read_installed(service_id)
        return installed.exit_timeout_s if installed else EXIT_TIMEOUT_S

    def run_tool(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> CommandResult:
        command = [self.tool, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except FileNotFoundError:
            self.check_tool_installed()
            raise
        except subprocess.TimeoutExpired:
            raise ServiceManagerError(f"{' '.join(command)}: no answer in {timeout_s:g} s") from None
        return CommandResult(done.returncode, (done.stdout + done.stderr).strip())

    def run_checked(self, *arguments: str, hint: str = "", timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Raises ManagerFailed where it is not done."""
        done = self.run_tool(*arguments, timeout_s=timeout_s)
        if done.exit_code:
            raise self.make_error(arguments, done, hint)

    def make_error(self, arguments: tuple[str, ...], result: CommandResult, hint: str = "") -> ServiceManagerError:
        said = " ".join(result.output.split()) or f"exit code {result.exit_code}"
        return ServiceManagerError(f"{self.tool} {' '.join(arguments)}: {said}" + (f"; {hint}" if hint else ""))


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """True where the condition became true in time.  The managers send no events, so they are polled."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_S)
    return True
