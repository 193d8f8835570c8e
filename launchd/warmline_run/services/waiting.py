"""After a start: until the pair serves, or what keeps it from that."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from warmline_run import probe as asking
from warmline_run.address import Address
from warmline_run.services.logs import read_last_lines
from warmline_run.services.manager import ServiceManager, ServiceState
from warmline_run.services.service import ROLES, ServiceId

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
    """What is wrong, in a line or more; "" where requests are served.  Blocks.

    `outputs`: by role, where what ends a start is written; `tell` hears what is waited for.
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
