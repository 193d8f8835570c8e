"""How the agents stand: installed, running, ready."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warmline_run import probe as asking
from warmline_run.address import address_of
from warmline_run.probe import Readiness
from warmline_run.services import actions as verbs
from warmline_run.services import service as agents
from warmline_run.services.actions import Pair
from warmline_run.services.logs import last_lines
from warmline_run.services.service import Which
from warmline_run.settings.resolve import ConfigurationError

UNREADABLE = "the installed file is not as this version writes it: install again"


@dataclass(frozen=True)
class AgentStanding:
    """`ended`: how the last run ended; `said`: the last line that it had to say."""

    label: str
    file: str
    installed: bool
    loaded: bool
    pid: int | None
    ended: str
    said: str
    log: str
    output: str


@dataclass(frozen=True)
class Standing:
    """`reason`: why not ready."""

    installed: bool
    ready: bool
    reason: str
    url: str
    model: str
    home: str
    agents: Mapping[str, AgentStanding]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def standing(pair: Pair) -> Standing:
    """Raises ManagerFailed."""
    home = verbs.home_of(pair)
    found = {which.role: _of_agent(pair, which, home) for which in pair.whiches}
    installed = all(agent.installed for agent in found.values())
    url, readiness = _readiness(pair) if pair.installed else ("", Readiness(False, "not installed"))
    is_ours = found["proxy"].pid is not None
    if readiness.ready and not is_ours:
        readiness = Readiness(False, f"the agent does not run; another process serves {url}")
    return Standing(installed, readiness.ready, readiness.reason, url, readiness.model, str(home or ""), found)


def _readiness(pair: Pair) -> tuple[str, Readiness]:
    try:
        config = verbs.configuration(pair)
    except ConfigurationError as error:
        return "", Readiness(False, str(error))
    if config is None:
        return "", Readiness(False, UNREADABLE)
    address = address_of(config)
    return address.url, asking.readiness(address)


def _of_agent(pair: Pair, which: Which, home: Path | None) -> AgentStanding:
    is_installed = pair.manager.is_installed(which)
    state = pair.manager.state(which)
    output = agents.output_file(home, which.role) if home else None
    said = last_lines(output, 1) if output and state.pid is None else []
    return AgentStanding(
        label=pair.manager.label(which),
        file=str(pair.manager.file(which)),
        installed=is_installed,
        loaded=state.loaded,
        pid=state.pid,
        ended=state.ended,
        said=said[0] if said else "",
        log=str(agents.log_file(home, which.role)) if home else "",
        output=str(output or ""),
    )


def lines(found: Standing) -> list[str]:
    """For people."""
    shown = [line for role, agent in found.agents.items() for line in _agent_lines(role, agent)]
    if found.ready:
        shown.append(f"ready    {found.url}, {found.model}")
    else:
        shown.append(f"ready    no: {found.reason}")
    shown += [f"home     {found.home}"] if found.home else []
    shown += [f"logs     {os.path.commonpath([agent.log for agent in found.agents.values()])}"] if found.home else []
    return shown


def _agent_lines(role: str, agent: AgentStanding) -> list[str]:
    if not agent.installed:
        how = "not installed" + (f", but process {agent.pid} runs as it" if agent.pid else "")
    elif agent.pid:
        how = f"running, process {agent.pid}" + (f"; the one before: {agent.ended}" if agent.ended else "")
    elif not agent.loaded:
        how = "not loaded"
    else:
        how = f"not running, {agent.ended}" if agent.ended else "not running"
    return [f"{role:<8} {how} ({agent.label})", *([f"         {agent.said}"] if agent.said else [])]
