"""Status of services: installed, running, ready."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from warmline_common.settings.resolve import ConfigurationError
from warmline_run import probe
from warmline_run.address import make_address
from warmline_run.probe import ProxyReadiness
from warmline_run.services.actions import ServicePair, find_home, read_config
from warmline_run.services.logs import read_last_lines
from warmline_run.services.service import ServiceId, log_file, output_file

JSON_KEYS = {"last_line": "said"}  # of fields whose key in `status --json` is another
UNREADABLE = "the installed file is not as this version writes it: install again"


@dataclass(frozen=True)
class ProcessStatus:
    """`ended`: end of the last run; `last_line`: last line of its output."""

    label: str
    file: str
    installed: bool
    loaded: bool
    pid: int | None
    ended: str
    last_line: str
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


def read_status(pair: ServicePair) -> ServiceStatus:
    """Raises ServiceManagerError."""
    home = find_home(pair)
    processes = {each.role: _read_process_status(pair, each, home) for each in pair.service_ids}
    installed = all(process.installed for process in processes.values())
    url, readiness = _read_readiness(pair) if pair.installed_ids else ("", ProxyReadiness(False, "not installed"))
    if readiness.is_ready and processes["proxy"].pid is None:
        readiness = ProxyReadiness(False, f"the agent does not run; another process serves {url}")
    home_name = str(home or "")
    return ServiceStatus(installed, readiness.is_ready, readiness.reason, url, readiness.model, home_name, processes)


def _read_readiness(pair: ServicePair) -> tuple[str, ProxyReadiness]:
    try:
        config = read_config(pair)
    except ConfigurationError as error:
        return "", ProxyReadiness(False, str(error))
    if config is None:
        return "", ProxyReadiness(False, UNREADABLE)
    address = make_address(config)
    return address.url, probe.read_readiness(address)


def _read_process_status(pair: ServicePair, service_id: ServiceId, home: Path | None) -> ProcessStatus:
    state = pair.manager.read_state(service_id)
    output = output_file(home, service_id.role) if home else None
    last_lines = read_last_lines(output, 1) if output and state.pid is None else []
    return ProcessStatus(
        label=pair.manager.label(service_id),
        file=str(pair.manager.service_file(service_id)),
        installed=pair.manager.is_installed(service_id),
        loaded=state.loaded,
        pid=state.pid,
        ended=state.last_exit,
        last_line=next(iter(last_lines), ""),
        log=str(log_file(home, service_id.role)) if home else "",
        output=str(output or ""),
    )


def format_json(status: ServiceStatus) -> str:
    """JSON for programs."""
    fields = asdict(status, dict_factory=lambda items: {JSON_KEYS.get(name, name): value for name, value in items})
    return json.dumps(fields, indent=2)


def format_lines(status: ServiceStatus) -> list[str]:
    """Lines for people."""
    lines = [line for role, process in status.agents.items() for line in _format_process(role, process)]
    lines.append("ready    " + (f"{status.url}, {status.model}" if status.ready else f"no: {status.reason}"))
    if status.home:
        logs = os.path.commonpath([process.log for process in status.agents.values()])
        lines += [f"home     {status.home}", f"logs     {logs}"]
    return lines


def _format_process(role: str, process: ProcessStatus) -> list[str]:
    if not process.installed:
        state = "not installed" + (f", but process {process.pid} runs as it" if process.pid else "")
    elif process.pid:
        state = f"running, process {process.pid}" + (f"; the one before: {process.ended}" if process.ended else "")
    elif not process.loaded:
        state = "not loaded"
    else:
        state = f"not running, {process.ended}" if process.ended else "not running"
    return [f"{role:<8} {state} ({process.label})", *([f"         {process.last_line}"] if process.last_line else [])]
