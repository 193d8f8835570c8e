"""After a start: until the pair serves, or what keeps it from that."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from warmline_run import probe as asking
from warmline_run.address import Address
from warmline_run.services.logs import last_lines
from warmline_run.services.manager import ServiceManager, State
from warmline_run.services.service import ROLES, Which

POLL_S = 0.25
SIGHTINGS = 2  # in a row, of an agent without a process: one may lie between two processes
LAST_LINES = 10
CANNOT_EXECUTE = "exit code 78"


def until_ready(
    manager: ServiceManager,
    name: str,
    address: Address,
    outputs: Mapping[str, Path],
    timeout_s: float,
    tell: Callable[[str], None],
) -> str:
    """What is wrong, in a line or more; "" where requests are served.  Blocks.

    `outputs`: by role, where what ends a start is written; `tell` hears what is waited for.
    """
    until = time.monotonic() + timeout_s
    told, sightings = "", 0
    while True:
        states = {role: manager.state(Which(role, name)) for role in ROLES}
        failed = next((role for role, state in states.items() if state.has_failed), "")
        sightings = sightings + 1 if failed else 0
        if failed and sightings >= SIGHTINGS:
            return what_is_wrong(failed, states[failed], outputs[failed])
        found = asking.readiness(address)
        if found.ready and not failed:
            return ""
        if time.monotonic() >= until:
            return f"not ready after {timeout_s:g} s: {found.reason}; it goes on starting"
        if found.reason != told:
            tell(f"waiting: {found.reason}")
            told = found.reason
        time.sleep(POLL_S)


def what_is_wrong(role: str, state: State, output: Path) -> str:
    lines = last_lines(output, LAST_LINES)
    hint = "; this Python is gone or can't be executed: install again" if state.ended.startswith(CANNOT_EXECUTE) else ""
    said = "".join(f"\n  {line}" for line in lines) if lines else f" ({output} has no more)"
    return f"the {role} does not run, {state.ended}{hint}:{said}"
