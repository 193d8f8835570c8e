"""install, uninstall, restart: what they do, step by step, whoever keeps the agents.  Exit codes: see `EXIT_...`."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from warmline_common.settings.resolve import ConfigurationError, ResolvedConfig, resolve
from warmline_common.settings.table import SETTINGS
from warmline_run import ports
from warmline_run import probe as asking
from warmline_run import startup_report as summary
from warmline_run.address import Address, make_address
from warmline_run.services import service as agents
from warmline_run.services.logs import read_last_lines
from warmline_run.services.manager import InstalledService, ServiceManager, ServiceState
from warmline_run.services.service import ROLES, ServiceId, ServiceProcess

POLL_S = 0.25
FAILED_POLLS_MIN = 2  # in a row, of an agent without a process: one may lie between two processes
LAST_LINES = 10
CANNOT_EXECUTE_EXIT = "exit code 78"


def wait_until_ready(
    manager: ServiceManager,
    name: str,
    address: Address,
    outputs: Mapping[str, Path],
    timeout_s: float,
    print_line: Callable[[str], None],
) -> str:
    """Problem in a line or more; "" where requests are served.  Blocks.

    `outputs`: files by role that receive an end's output; `print_line` receives what is waited for.
    """
    until = time.monotonic() + timeout_s
    told, sightings = "", 0
    while True:
        states = {role: manager.read_state(ServiceId(role, name)) for role in ROLES}
        failed = next((role for role, state in states.items() if state.has_failed), "")
        sightings = sightings + 1 if failed else 0
        if failed and sightings >= FAILED_POLLS_MIN:
            return describe_failure(failed, states[failed], outputs[failed])
        found = asking.read_readiness(address)
        if found.is_ready and not failed:
            return ""
        if time.monotonic() >= until:
            return f"not ready after {timeout_s:g} s: {found.reason}; it goes on starting"
        if found.reason != told:
            print_line(f"waiting: {found.reason}")
            told = found.reason
        time.sleep(POLL_S)


def describe_failure(role: str, state: ServiceState, output: Path) -> str:
    lines = read_last_lines(output, LAST_LINES)
    hint = (
        "; this Python is gone or can't be executed: install again"
        if state.last_exit.startswith(CANNOT_EXECUTE_EXIT)
        else ""
    )
    said = "".join(f"\n  {line}" for line in lines) if lines else f" ({output} has no more)"
    return f"the {role} does not run, {state.last_exit}{hint}:{said}"


EXIT_NOT_READY = 1  # or not installed
EXIT_MANAGER_FAILED = 3

PrintLine = Callable[[str], None]


@dataclass(frozen=True)
class ServicePair:
    """The agents of one name, and who keeps them.  `tell` gets lines for people."""

    manager: ServiceManager
    name: str
    print_line: PrintLine

    @property
    def service_ids(self) -> list[ServiceId]:
        return [ServiceId(role, self.name) for role in ROLES]

    @property
    def installed_ids(self) -> list[ServiceId]:
        return [which for which in self.service_ids if self.manager.is_installed(which)]

    @property
    def present_ids(self) -> list[ServiceId]:
        """Also those that are kept on though somebody has deleted their files."""
        return [
            which for which in self.service_ids if self.manager.is_installed(which) or self.manager.is_managed(which)
        ]

    @property
    def name_option(self) -> str:
        """Option that selects this pair in further commands."""
        return f" --name {self.name}" if self.name else ""

    def format_command(self, verb: str) -> str:
        group = "launchd" if self.manager.name == "launchd" else "service"
        return f"warmline {group} {verb}{self.name_option}"

    def report_missing(self) -> bool:
        """Says so where nothing is installed."""
        if missing := not self.installed_ids:
            self.print_line(
                f"no {self.manager.display_name} are installed; `{self.format_command('install')}` does that"
            )
        return missing


def write_files(
    manager: ServiceManager, config: ResolvedConfig, environment: Mapping[str, str], name: str, folder: Path
) -> list[Path]:
    """Both files into a folder, nothing else.  Raises ConfigurationError."""
    written = []
    for agent in agents.make_processes(config, environment, name):
        path = folder / manager.service_file(agent.service_id).name
        _write_file(manager, agent, path)
        written.append(path)
    return written


def install(pair: ServicePair, config: ResolvedConfig, environment: Mapping[str, str], wait_s: float) -> int:
    """Again as often as you like: what runs is replaced.

    Raises ConfigurationError before anything is changed, or where an agent's file can't be written: then none runs.
    Raises ManagerFailed.
    """
    made = agents.make_processes(config, environment, pair.name)
    _check_available(pair, config)
    pair.manager.check_available()
    _prepare_folders(made)
    for which in pair.present_ids:
        pair.manager.stop(which)
    for agent in reversed(made):
        _write_file(pair.manager, agent, path := pair.manager.service_file(agent.service_id))
        pair.print_line(f"wrote {path}")
    for agent in reversed(made):
        pair.manager.start(agent.service_id)
        pair.print_line(f"started {pair.manager.label(agent.service_id)}")
    return wait(pair, config, wait_s)


def _check_available(pair: ServicePair, config: ResolvedConfig) -> None:
    """Check ports and home, except for what the pair itself holds and will release."""
    own = [state.pid for which in pair.present_ids if (state := pair.manager.read_state(which)).pid]
    own_ports = []
    if own and (before := read_config(pair)):
        own_ports = [int(before[name]) for name in ports.PORT_SETTINGS]
    home = Path(str(config["home"]))
    if problem := ports.describe_home_holder(home, [pid for pid in own if pid]) or ports.describe_occupied_port(
        config, own_ports
    ):
        raise ConfigurationError(problem)


def _prepare_folders(made: Sequence[ServiceProcess]) -> None:
    """The folders and files that a keeper wants to find; it would make files that others can read."""
    try:
        for agent in made:
            for folder in (agent.home, agent.output.parent):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(agent.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    except OSError as error:
        raise ConfigurationError(f"the home can't be written: {error}; use another --home") from None


def _write_file(manager: ServiceManager, process: ServiceProcess, path: Path) -> None:
    try:
        manager.write_file(process, path)
    except OSError as error:
        raise ConfigurationError(f"{path} can't be written: {error.strerror or error}") from None


def wait(pair: ServicePair, config: ResolvedConfig, wait_s: float) -> int:
    """Until requests are served; says what is wrong where they aren't.  0 seconds: no waiting."""
    if not wait_s:
        return 0
    address, home = make_address(config), Path(str(config["home"]))
    outputs = {role: agents.output_file(home, role) for role in ROLES}
    if problem := wait_until_ready(pair.manager, pair.name, address, outputs, wait_s, pair.print_line):
        pair.print_line(problem)
        pair.print_line(f"`{pair.format_command('logs')}` shows more")
        return EXIT_NOT_READY
    print(f"ready {address.url}\n{summary.read_report(config)}", end="", flush=True)
    return 0


def uninstall(pair: ServicePair) -> int:
    """Remove the services; stored data stays."""
    known = pair.present_ids
    for which in known:
        was_there = pair.manager.is_installed(which)
        pair.manager.stop(which)
        pair.manager.service_file(which).unlink(missing_ok=True)
        pair.print_line(
            f"removed {pair.manager.service_file(which)}" if was_there else f"stopped {pair.manager.label(which)}"
        )
    if known:
        pair.manager.reload()
    else:
        pair.print_line(f"no {pair.manager.display_name} are installed")
    return 0


def restart(pair: ServicePair, roles: Sequence[str], wait_s: float) -> int:
    """The backend first: a proxy that starts meanwhile waits for it.  Raises ConfigurationError."""
    if pair.report_missing():
        return EXIT_NOT_READY
    config = read_config(pair)
    for which in reversed(pair.service_ids):
        if which.role in roles:
            pair.manager.restart(which)
            pair.print_line(f"restarted {pair.manager.label(which)}")
    return wait(pair, config, wait_s) if config else 0


def read_config(pair: ServicePair) -> ResolvedConfig | None:
    """Configuration of the installed services at their next start; None where none can be read.

    Raises ConfigurationError where they could not start.
    """
    installed = _read_first_installed(pair)
    return resolve(agents.parse_arguments(installed.arguments), installed.environment) if installed else None


def find_home(pair: ServicePair) -> Path | None:
    installed = _read_first_installed(pair)
    home = agents.parse_arguments(installed.arguments).get("home") if installed else None
    return Path(str(SETTINGS["home"].parse(home))) if home else None


def _read_first_installed(pair: ServicePair) -> InstalledService | None:
    return next(filter(None, map(pair.manager.read_installed, pair.service_ids)), None)
