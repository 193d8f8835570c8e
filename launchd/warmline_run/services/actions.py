"""Installing, removing and restarting a pair of services, step by step, under either manager."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from warmline_common.settings.resolve import ConfigurationError, ResolvedConfig, resolve
from warmline_common.settings.table import SETTINGS
from warmline_common.storage.regular_file import open_regular
from warmline_run import ports, probe
from warmline_run.address import make_address
from warmline_run.services.logs import read_last_lines
from warmline_run.services.manager import InstalledService, ServiceManager, ServiceState
from warmline_run.services.service import ROLES, ServiceId, ServiceProcess, make_processes, output_file, parse_arguments
from warmline_run.startup_report import read_report

POLL_S = 0.25
FAILED_POLLS_MIN = 2  # in a row, of a service without a process: one may lie between two processes
LAST_LINES = 10
CANNOT_EXECUTE_EXIT = "exit code 78"
EXIT_NOT_READY = 1  # or not installed
EXIT_MANAGER_FAILED = 3


@dataclass(frozen=True)
class ServicePair:
    """Services of one name, and their manager.  `print_line` prints a line for people."""

    manager: ServiceManager
    name: str
    print_line: Callable[[str], None]

    @property
    def service_ids(self) -> list[ServiceId]:
        return [ServiceId(role, self.name) for role in ROLES]

    @property
    def installed_ids(self) -> list[ServiceId]:
        return [each for each in self.service_ids if self.manager.is_installed(each)]

    @property
    def present_ids(self) -> list[ServiceId]:
        """Installed services, and loaded ones without a file."""
        return [each for each in self.service_ids if self.manager.is_installed(each) or self.manager.is_managed(each)]

    def format_command(self, verb: str) -> str:
        """Command for this pair."""
        return f"warmline {self.manager.group} {verb}" + (f" --name {self.name}" if self.name else "")

    def report_missing(self) -> bool:
        """True where nothing is installed, which is printed."""
        if is_missing := not self.installed_ids:
            install_command = self.format_command("install")
            self.print_line(f"no {self.manager.display_name} are installed; `{install_command}` does that")
        return is_missing


def install(pair: ServicePair, config: ResolvedConfig, environment: Mapping[str, str], wait_s: float) -> int:
    """Install and start the pair; services that run are replaced.  Returns an exit code.

    Raises ConfigurationError before anything is changed, or where a service's file can't be written: then none runs.
    Raises ServiceManagerError.
    """
    processes = make_processes(config, environment, pair.name)
    _check_available(pair, config)
    pair.manager.reload()
    _prepare_folders(processes)
    for service_id in pair.present_ids:
        pair.manager.stop(service_id)
    for process in reversed(processes):
        path = pair.manager.service_file(process.service_id)
        pair.manager.write_file(process, path)
        pair.print_line(f"wrote {path}")
    for process in reversed(processes):
        pair.manager.start(process.service_id)
        pair.print_line(f"started {pair.manager.label(process.service_id)}")
    return wait(pair, config, wait_s)


def _check_available(pair: ServicePair, config: ResolvedConfig) -> None:
    """Check ports and home, except for those that the pair itself holds and will release."""
    states = [pair.manager.read_state(service_id) for service_id in pair.present_ids]
    pids = [state.pid for state in states if state.pid]
    old_config = read_config(pair) if pids else None
    own_ports = [int(old_config[name]) for name in ports.PORT_SETTINGS] if old_config else []
    home = Path(str(config["home"]))
    if problem := ports.describe_home_holder(home, pids) or ports.describe_occupied_port(config, own_ports):
        raise ConfigurationError(problem)


def _prepare_folders(processes: Sequence[ServiceProcess]) -> None:
    """Make the folders and files that a manager needs; its own files could be read by others."""
    try:
        for process in processes:
            for folder in (process.home, process.output.parent):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(open_regular(process.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    except OSError as error:
        raise ConfigurationError(f"the home can't be written: {error}; use another --home") from None


def wait(pair: ServicePair, config: ResolvedConfig, wait_s: float) -> int:
    """Wait until requests are served, and print the report of the start or the problem; 0 seconds: no waiting."""
    if not wait_s:
        return 0
    if problem := wait_until_ready(pair, config, wait_s):
        pair.print_line(problem)
        pair.print_line(f"`{pair.format_command('logs')}` shows more")
        return EXIT_NOT_READY
    print(f"ready {make_address(config).url}\n{read_report(config)}", end="", flush=True)
    return 0


def wait_until_ready(pair: ServicePair, config: ResolvedConfig, timeout_s: float) -> str:
    """Problem in a line or more; "" where requests are served.  Blocks, and prints what is waited for."""
    address, home = make_address(config), Path(str(config["home"]))
    until = time.monotonic() + timeout_s
    last_reason, failed_polls = "", 0
    while True:
        states = {service_id.role: pair.manager.read_state(service_id) for service_id in pair.service_ids}
        failed = next((role for role, state in states.items() if state.has_failed), "")
        failed_polls = failed_polls + 1 if failed else 0
        if failed_polls >= FAILED_POLLS_MIN:
            return _describe_failure(failed, states[failed], output_file(home, failed))
        readiness = probe.read_readiness(address)
        if readiness.is_ready and not failed:
            return ""
        if time.monotonic() >= until:
            return f"not ready after {timeout_s:g} s: {readiness.reason}; it is still starting"
        if readiness.reason != last_reason:
            pair.print_line(f"waiting: {readiness.reason}")
            last_reason = readiness.reason
        time.sleep(POLL_S)


def _describe_failure(role: str, state: ServiceState, output: Path) -> str:
    is_python_missing = state.last_exit.startswith(CANNOT_EXECUTE_EXIT)
    hint = "; this Python is gone or can't be executed: install again" if is_python_missing else ""
    lines = "".join(f"\n  {line}" for line in read_last_lines(output, LAST_LINES)) or f" ({output} has no more)"
    return f"the {role} does not run, {state.last_exit}{hint}:{lines}"


def uninstall(pair: ServicePair) -> None:
    """Remove the services; stored data stays."""
    service_ids = pair.present_ids
    for service_id in service_ids:
        path, was_installed = pair.manager.service_file(service_id), pair.manager.is_installed(service_id)
        pair.manager.stop(service_id)
        path.unlink(missing_ok=True)
        pair.print_line(f"removed {path}" if was_installed else f"stopped {pair.manager.label(service_id)}")
    if service_ids:
        pair.manager.reload()
    else:
        pair.print_line(f"no {pair.manager.display_name} are installed")


def restart(pair: ServicePair, roles: Sequence[str], wait_s: float) -> int:
    """Restart the backend first: a proxy that starts meanwhile waits for it.  Raises ConfigurationError."""
    if pair.report_missing():
        return EXIT_NOT_READY
    config = read_config(pair)
    for service_id in reversed(pair.service_ids):
        if service_id.role in roles:
            pair.manager.restart(service_id)
            pair.print_line(f"restarted {pair.manager.label(service_id)}")
    return wait(pair, config, wait_s) if config else 0


def read_config(pair: ServicePair) -> ResolvedConfig | None:
    """Configuration of the installed services at their next start; None where none can be read.

    Raises ConfigurationError where they could not start.
    """
    installed = _read_first_installed(pair)
    return resolve(parse_arguments(installed.arguments), installed.environment) if installed else None


def find_home(pair: ServicePair) -> Path | None:
    installed = _read_first_installed(pair)
    home = parse_arguments(installed.arguments).get("home") if installed else None
    return Path(str(SETTINGS["home"].parse(home))) if home else None


def _read_first_installed(pair: ServicePair) -> InstalledService | None:
    return next(filter(None, map(pair.manager.read_installed, pair.service_ids)), None)
