"""Status of services: installed, running, ready."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warmline_common.settings.resolve import ConfigurationError
from warmline_run import probe as asking
from warmline_run.address import make_address
from warmline_run.probe import ProxyReadiness
from warmline_run.services import actions as verbs
from warmline_run.services import service as agents
from warmline_run.services.actions import ServicePair
from warmline_run.services.logs import read_last_lines
from warmline_run.services.service import ServiceId

UNREADABLE = "the installed file is not as this version writes it: install again"


@dataclass(frozen=True)
class ProcessStatus:
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
class ServiceStatus:
    """`reason`: why not ready."""

    installed: bool
    ready: bool
    reason: str
    url: str
    model: str
    home: str
    agents: Mapping[str, ProcessStatus]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_status(pair: ServicePair) -> ServiceStatus:
    """Raises ManagerFailed."""
    home = verbs.find_home(pair)
    found = {which.role: _read_process_status(pair, which, home) for which in pair.service_ids}
    installed = all(agent.installed for agent in found.values())
    url, readiness = _read_readiness(pair) if pair.installed_ids else ("", ProxyReadiness(False, "not installed"))
    is_ours = found["proxy"].pid is not None
    if readiness.is_ready and not is_ours:
        readiness = ProxyReadiness(False, f"the agent does not run; another process serves {url}")
    return ServiceStatus(installed, readiness.is_ready, readiness.reason, url, readiness.model, str(home or ""), found)


def _read_readiness(pair: ServicePair) -> tuple[str, ProxyReadiness]:
    try:
        config = verbs.read_config(pair)
    except ConfigurationError as error:
        return "", ProxyReadiness(False, str(error))
    if config is None:
        return "", ProxyReadiness(False, UNREADABLE)
    address = make_address(config)
    return address.url, asking.read_readiness(address)


def _read_process_status(pair: ServicePair, service_id: ServiceId, home: Path | None) -> ProcessStatus:
    is_installed = pair.manager.is_installed(service_id)
    state = pair.manager.read_state(service_id)
    output = agents.output_file(home, service_id.role) if home else None
    said = read_last_lines(output, 1) if output and state.pid is None else []
    return ProcessStatus(
        label=pair.manager.label(service_id),
        file=str(pair.manager.service_file(service_id)),
        installed=is_installed,
        loaded=state.loaded,
        pid=state.pid,
        ended=state.last_exit,
        said=said[0] if said else "",
        log=str(agents.log_file(home, service_id.role)) if home else "",
        output=str(output or ""),
    )


def format_lines(status: ServiceStatus) -> list[str]:
    """For people."""
    shown = [line for role, agent in status.agents.items() for line in _format_process(role, agent)]
    if status.ready:
        shown.append(f"ready    {status.url}, {status.model}")
    else:
        shown.append(f"ready    no: {status.reason}")
    shown += [f"home     {status.home}"] if status.home else []
    shown += [f"logs     {os.path.commonpath([agent.log for agent in status.agents.values()])}"] if status.home else []
    return shown


def _format_process(role: str, process: ProcessStatus) -> list[str]:
    if not process.installed:
        how = "not installed" + (f", but process {process.pid} runs as it" if process.pid else "")
    elif process.pid:
        how = f"running, process {process.pid}" + (f"; the one before: {process.ended}" if process.ended else "")
    elif not process.loaded:
        how = "not loaded"
    else:
        how = f"not running, {process.ended}" if process.ended else "not running"
    return [f"{role:<8} {how} ({process.label})", *([f"         {process.said}"] if process.said else [])]
