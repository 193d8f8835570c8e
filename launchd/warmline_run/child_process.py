"""Child processes of a supervisor: each in a session of its own, ended with its parent, started again with a backoff.

Event loop thread.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from warmline_common.process.parent_watch import PARENT_PIPE
from warmline_run.processes import Command

RESTART_DELAY_FIRST_S = 1.0
RESTART_DELAY_MAX_S = 30.0
BACKOFF_RESET_AFTER_S = 60.0  # a child up for this long has earned a fresh start


class SupervisorSignals:
    """Requests by signal: the first SIGINT or SIGTERM asks to stop, the next one to hurry."""

    def __init__(self) -> None:
        self.stop_requested = asyncio.Event()
        self.kill_requested = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._handle_signal)

    def _handle_signal(self) -> None:
        (self.kill_requested if self.stop_requested.is_set() else self.stop_requested).set()


@contextmanager
def open_parent_pipe() -> Iterator[int]:
    """Read end of a pipe; this process alone has the write end: children see it close when this process ends."""
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(read_end)
        os.close(write_end)


async def start_child(
    command: Command,
    pipe: int,
    variables: Mapping[str, str],
    *,
    has_input: bool = False,
    descriptors: Sequence[int] = (),
) -> asyncio.subprocess.Process:
    """Start a command in its own session, with `variables` besides its environment.  Raises OSError.

    `has_input`: its standard input is a pipe of the process that is returned; `descriptors`: that it inherits, too.
    """
    return await asyncio.create_subprocess_exec(
        *command.arguments,
        env={**command.environment, **variables, PARENT_PIPE: str(pipe)},
        pass_fds=(pipe, *descriptors),
        stdin=asyncio.subprocess.PIPE if has_input else asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )


async def wait_for_exit(process: asyncio.subprocess.Process, hurry: asyncio.Event, timeout_s: float) -> bool:
    """Wait until the process has ended, at most `timeout_s`, and no longer than until `hurry`.  True where it has."""
    exit_wait, hurry_wait = asyncio.create_task(process.wait()), asyncio.create_task(hurry.wait())
    try:
        await asyncio.wait([exit_wait, hurry_wait], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return process.returncode is not None
    finally:
        exit_wait.cancel()
        hurry_wait.cancel()


class RestartBackoff:
    """Delays before a child is started again: doubled at each death, and small again after a long life."""

    def __init__(self) -> None:
        self._next_s = RESTART_DELAY_FIRST_S
        self._started_at = 0.0  # time.monotonic()

    def record_start(self) -> None:
        self._started_at = time.monotonic()

    def next_delay_s(self) -> float:
        """Delay after a death."""
        if time.monotonic() - self._started_at >= BACKOFF_RESET_AFTER_S:
            self._next_s = RESTART_DELAY_FIRST_S
        delay_s, self._next_s = self._next_s, min(self._next_s * 2, RESTART_DELAY_MAX_S)
        return delay_s


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}  # real-time signals have no name of their own
    return f"was killed by {names.get(-code, f'signal {-code}')}"
