"""install, uninstall, restart: what they do, step by step, whoever keeps the agents.  Exit codes: see `EXIT_...`."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from warmline_run import ports
from warmline_run import startup_report as summary
from warmline_run.address import address_of
from warmline_run.services import service as agents
from warmline_run.services import waiting
from warmline_run.services.manager import Installed, ServiceManager
from warmline_run.services.service import ROLES, Agent, Which
from warmline_run.settings.resolve import Config, ConfigurationError, resolve
from warmline_run.settings.schema import SETTINGS

EXIT_NOT_READY = 1  # or not installed
EXIT_MANAGER_FAILED = 3

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Pair:
    """The agents of one name, and who keeps them.  `tell` gets lines for people."""

    manager: ServiceManager
    name: str
    tell: Tell

    @property
    def whiches(self) -> list[Which]:
        return [Which(role, self.name) for role in ROLES]

    @property
    def installed(self) -> list[Which]:
        return [which for which in self.whiches if self.manager.is_installed(which)]

    @property
    def known(self) -> list[Which]:
        """Also those that are kept on though somebody has deleted their files."""
        return [which for which in self.whiches if self.manager.is_installed(which) or self.manager.is_kept(which)]

    @property
    def suffix(self) -> str:
        """What further commands need to mean this pair."""
        return f" --name {self.name}" if self.name else ""

    def command(self, verb: str) -> str:
        group = "launchd" if self.manager.word == "launchd" else "service"
        return f"warmline {group} {verb}{self.suffix}"

    def is_missing(self) -> bool:
        """Says so where nothing is installed."""
        if missing := not self.installed:
            self.tell(f"no {self.manager.kept_as} are installed; `{self.command('install')}` does that")
        return missing


def write_only(
    manager: ServiceManager, config: Config, environment: Mapping[str, str], name: str, to: Path
) -> list[Path]:
    """Both files into a folder, nothing else.  Raises ConfigurationError."""
    written = []
    for agent in agents.pair(config, environment, name):
        path = to / manager.file(agent.which).name
        _write(manager, agent, path)
        written.append(path)
    return written


def install(pair: Pair, config: Config, environment: Mapping[str, str], wait_s: float) -> int:
    """Again as often as you like: what runs is replaced.

    Raises ConfigurationError before anything is changed, or where an agent's file can't be written: then none runs.
    Raises ManagerFailed.
    """
    made = agents.pair(config, environment, pair.name)
    _check_free(pair, config)
    pair.manager.check_answers()
    _prepare(made)
    for which in pair.known:
        pair.manager.stop(which)
    for agent in reversed(made):
        _write(pair.manager, agent, path := pair.manager.file(agent.which))
        pair.tell(f"wrote {path}")
    for agent in reversed(made):
        pair.manager.start(agent.which)
        pair.tell(f"started {pair.manager.label(agent.which)}")
    return wait(pair, config, wait_s)


def _check_free(pair: Pair, config: Config) -> None:
    """What the pair itself has at this moment it will let go of."""
    own = [state.pid for which in pair.known if (state := pair.manager.state(which)).pid]
    own_ports = []
    if own and (before := configuration(pair)):
        own_ports = [int(before[name]) for name in ports.LISTENERS]
    home = Path(str(config["home"]))
    if problem := ports.held(home, [pid for pid in own if pid]) or ports.occupied(config, own_ports):
        raise ConfigurationError(problem)


def _prepare(made: Sequence[Agent]) -> None:
    """The folders and files that a keeper wants to find; it would make files that others can read."""
    try:
        for agent in made:
            for folder in (agent.home, agent.output.parent):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(agent.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    except OSError as error:
        raise ConfigurationError(f"the home can't be written: {error}; use another --home") from None


def _write(manager: ServiceManager, agent: Agent, path: Path) -> None:
    try:
        manager.write(agent, path)
    except OSError as error:
        raise ConfigurationError(f"{path} can't be written: {error.strerror or error}") from None


def wait(pair: Pair, config: Config, wait_s: float) -> int:
    """Until requests are served; says what is wrong where they aren't.  0 seconds: no waiting."""
    if not wait_s:
        return 0
    address, home = address_of(config), Path(str(config["home"]))
    outputs = {role: agents.output_file(home, role) for role in ROLES}
    if problem := waiting.until_ready(pair.manager, pair.name, address, outputs, wait_s, pair.tell):
        pair.tell(problem)
        pair.tell(f"`{pair.command('logs')}` shows more")
        return EXIT_NOT_READY
    print(f"ready {address.url}\n{summary.found(config)}", end="", flush=True)
    return 0


def uninstall(pair: Pair) -> int:
    """What is stored stays."""
    known = pair.known
    for which in known:
        was_there = pair.manager.is_installed(which)
        pair.manager.stop(which)
        pair.manager.file(which).unlink(missing_ok=True)
        pair.tell(f"removed {pair.manager.file(which)}" if was_there else f"stopped {pair.manager.label(which)}")
    if known:
        pair.manager.forget()
    else:
        pair.tell(f"no {pair.manager.kept_as} are installed")
    return 0


def restart(pair: Pair, roles: Sequence[str], wait_s: float) -> int:
    """The backend first: a proxy that starts meanwhile waits for it.  Raises ConfigurationError."""
    if pair.is_missing():
        return EXIT_NOT_READY
    config = configuration(pair)
    for which in reversed(pair.whiches):
        if which.role in roles:
            pair.manager.restart(which)
            pair.tell(f"restarted {pair.manager.label(which)}")
    return wait(pair, config, wait_s) if config else 0


def configuration(pair: Pair) -> Config | None:
    """What the installed agents are configured by at their next start; None where none can be read.

    Raises ConfigurationError where they could not start.
    """
    installed = _first_installed(pair)
    return resolve(agents.settings_of(installed.arguments), installed.environment) if installed else None


def home_of(pair: Pair) -> Path | None:
    installed = _first_installed(pair)
    home = agents.settings_of(installed.arguments).get("home") if installed else None
    return Path(str(SETTINGS["home"].parse(home))) if home else None


def _first_installed(pair: Pair) -> Installed | None:
    return next(filter(None, map(pair.manager.installed, pair.whiches)), None)
