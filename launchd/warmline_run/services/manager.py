"""Service managers: launchd or systemd, behind the same methods."""

import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from warmline_common.settings.resolve import ConfigurationError
from warmline_run.services.service import ServiceId, ServiceProcess

COMMAND_TIMEOUT_S = 60.0
POLL_S = 0.1
EXIT_TIMEOUT_S = 60  # of a service whose file can't be read
Result = subprocess.CompletedProcess[str]  # `stdout` has stderr, too


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
    """`pid` is None while no process runs; `last_exit` is "" where no run has ended, or where its end is not known."""

    loaded: bool
    pid: int | None = None
    last_exit: str = ""

    @property
    def has_failed(self) -> bool:
        """True where the process has run and doesn't now."""
        return self.pid is None and bool(self.last_exit)


class ServiceManager(ABC):
    """All methods block; those that run the tool raise ServiceManagerError."""

    name: ClassVar[str]  # in WARMLINE_AGENT
    group: ClassVar[str]  # of the command line
    command: ClassVar[tuple[str, ...]]  # the tool, and the arguments of all its calls
    missing_hint: ClassVar[str]  # for a machine without the tool
    display_name: ClassVar[str]  # of its services, for people
    stop_margin_s: ClassVar[float]  # beyond the exit timeout of a process

    @abstractmethod
    def label(self, service_id: ServiceId) -> str: ...

    @abstractmethod
    def service_file(self, service_id: ServiceId) -> Path: ...

    @abstractmethod
    def render_file(self, process: ServiceProcess) -> str:
        """Content of the service's file; its process is told the manager's name.  Raises ConfigurationError."""

    @abstractmethod
    def parse_file(self, data: bytes) -> InstalledService:
        """Raises ValueError for a file that `render_file` did not make."""

    @abstractmethod
    def read_state(self, service_id: ServiceId) -> ServiceState: ...

    @abstractmethod
    def reload(self) -> None:
        """Read added and removed files.  Raises ServiceManagerError where it is clear that no service would be kept."""

    @abstractmethod
    def start(self, service_id: ServiceId) -> None:
        """Start a service that is not loaded from its present file."""

    @abstractmethod
    def stop(self, service_id: ServiceId) -> None:
        """Stop and unload a service, so that it stays away.  Returns when the process has ended."""

    @abstractmethod
    def restart(self, service_id: ServiceId) -> None:
        """Restart the process alone, with its file as it was loaded; start a service that is not loaded."""

    @abstractmethod
    def make_error(self, arguments: tuple[str, ...], result: Result) -> ServiceManagerError:
        """Error of a failed call, with a hint where there is one."""

    def check_tool_installed(self) -> None:
        if shutil.which(self.command[0]) is None:
            raise ServiceManagerError(f"{self.command[0]} was not found: {self.missing_hint}")

    def write_file(self, process: ServiceProcess, path: Path) -> None:
        """Write the service's file, whole or not at all, readable by its owner alone.  Raises ConfigurationError."""
        from warmline_common.storage import disk  # here, since it imports hashlib, and `warmline --help` is to be quick

        content = self.render_file(process)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            disk.replace_file(path, content)
        except OSError as error:
            raise ConfigurationError(f"{path} can't be written: {error.strerror or error}") from None

    def is_installed(self, service_id: ServiceId) -> bool:
        return self.service_file(service_id).is_file()

    def is_managed(self, service_id: ServiceId) -> bool:
        """True for a loaded service, even without a file; False where the manager can't be asked."""
        with suppress(ServiceManagerError):
            state = self.read_state(service_id)
            return state.loaded or state.pid is not None
        return False

    def read_installed(self, service_id: ServiceId) -> InstalledService | None:
        """None for a service that is not installed, or a file that `render_file` did not make."""
        with suppress(OSError, ValueError):
            return self.parse_file(self.service_file(service_id).read_bytes())
        return None

    def stop_timeout_s(self, service_id: ServiceId) -> float:
        installed = self.read_installed(service_id)
        return (installed.exit_timeout_s if installed else EXIT_TIMEOUT_S) + self.stop_margin_s

    def run_tool(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> Result:
        command = [*self.command, *arguments]
        try:
            return subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False
            )
        except FileNotFoundError:
            self.check_tool_installed()
            raise
        except subprocess.TimeoutExpired:
            raise ServiceManagerError(f"{' '.join(command)}: no answer in {timeout_s:g} s") from None

    def run_checked(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Raises ServiceManagerError for an exit code other than 0."""
        result = self.run_tool(*arguments, timeout_s=timeout_s)
        if result.returncode:
            raise self.make_error(arguments, result)

    def format_error(self, arguments: tuple[str, ...], result: Result, hint: str) -> ServiceManagerError:
        output = " ".join(result.stdout.split()) or f"exit code {result.returncode}"
        return ServiceManagerError(f"{' '.join((*self.command, *arguments))}: {output}" + (f"; {hint}" if hint else ""))


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """True where the condition became true in time.  The managers send no events, so they are polled."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_S)
    return True
