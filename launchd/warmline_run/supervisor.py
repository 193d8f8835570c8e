"""`serve`: keeps the backend and the proxy running until a signal, and ends with them.

One asyncio loop owns everything.  Each child runs in its own session, so that a Ctrl-C in the terminal reaches only
serve, which then stops the proxy before the backend under it.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from warmline_common.process import exit_codes
from warmline_common.process.exit_codes import EXIT_CONFIGURATION
from warmline_run import probe as asking
from warmline_run.address import Address
from warmline_run.processes import Command

PARENT_PIPE = "WARMLINE_PARENT_PIPE"  # warmline_common.process.parent_watch reads it in the children
RESTART_DELAY_FIRST_S = 1.0
RESTART_DELAY_MAX_S = 30.0
BACKOFF_RESET_AFTER_S = 60.0  # a child up for this long has earned a fresh start
STOP_MARGIN_S = 15.0  # beyond what a child gives to running requests: to let go of them, and to write what is kept
PROBE_INTERVAL_S = 0.2

NeedsKey = Callable[[], bool]
ReadReport = Callable[[], str]


def print_message(line: str) -> None:
    _write_lines(sys.stderr, f"warmline: {line}\n")


def _write_lines(stream: TextIO, lines: str) -> None:
    """At once and whole: the children write there too, and any of us may be killed at any moment.

    print() writes a line's end by itself where output is unbuffered.
    """
    stream.write(lines)
    stream.flush()


def run(
    backend: Command, proxy: Command, address: Address, needs_key: NeedsKey = bool, read_report: ReadReport = str
) -> int:
    """Blocks until SIGINT or SIGTERM (0) or until a child reports a configuration error (2).

    Both are asked once, when requests are served, and may block: `needs_key` whether clients need one, `found` for the
    lines that tell what the start has found.
    """
    return asyncio.run(_serve(backend, proxy, address, needs_key, read_report))


async def _serve(
    backend: Command, proxy: Command, address: Address, needs_key: NeedsKey, read_report: ReadReport
) -> int:
    signals, outage = _Signals(), _OutageReporter(address)
    with _open_parent_pipe() as pipe:
        keepers = [
            _ChildSupervisor(each, pipe, signals, outage) for each in (proxy, backend)
        ]  # in the order of stopping
        kept = [asyncio.create_task(keeper.run()) for keeper in reversed(keepers)]
        announcing = asyncio.create_task(_announce_ready(address, needs_key, read_report, outage))
        asked = asyncio.create_task(signals.stop_requested.wait())
        try:
            done, _ = await asyncio.wait([*kept, asked], return_when=asyncio.FIRST_COMPLETED)
            if asked in done:
                print_message(
                    "stopping; once more to end at once"
                )  # how long that may take the proxy says, where anything runs
            return next((task.result() for task in kept if task in done), 0)
        finally:
            for task in (announcing, asked, *kept):
                task.cancel()
            outage.cancel()
            for keeper in keepers:
                await keeper.stop()


class _Signals:
    """The first SIGINT or SIGTERM asks to stop, the next one to hurry."""

    def __init__(self) -> None:
        self.stop_requested = asyncio.Event()
        self.kill_requested = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._handle_signal)

    def _handle_signal(self) -> None:
        (self.kill_requested if self.stop_requested.is_set() else self.stop_requested).set()


@contextmanager
def _open_parent_pipe() -> Iterator[int]:
    """The read end of a pipe whose write end only this process has: children see it close when we are gone."""
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(read_end)
        os.close(write_end)


class _ChildSupervisor:
    """Keeps one child running.  `keep` returns only on a configuration error; after cancelling it, call `end`."""

    def __init__(self, command: Command, pipe: int, signals: _Signals, outage: "_OutageReporter") -> None:
        self._command = command
        self._pipe = pipe
        self._signals = signals
        self._outage = outage
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> int:
        delay_s = RESTART_DELAY_FIRST_S
        environment = {**self._command.environment, PARENT_PIPE: str(self._pipe)}
        while True:
            started = time.monotonic()
            self._process = await asyncio.create_subprocess_exec(
                *self._command.arguments,
                env=environment,
                pass_fds=(self._pipe,),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            self._outage.record_start(self._command.name)
            code = await self._process.wait()
            self._outage.record_exit(self._command.name)
            if code == EXIT_CONFIGURATION:
                print_message(f"the {self._command.name} can't run as configured (see its message above)")
                return code
            if time.monotonic() - started >= BACKOFF_RESET_AFTER_S:
                delay_s = RESTART_DELAY_FIRST_S
            print_message(f"the {self._command.name} {_describe_exit(code)}; starting it again in {delay_s:g} s")
            environment.setdefault(
                exit_codes.AGENT_VARIABLE, exit_codes.SERVE
            )  # a cachectl may have the home now, and let go of it
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RESTART_DELAY_MAX_S)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after a grace or as soon as the user hurries."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        ended = asyncio.create_task(process.wait())
        hurried = asyncio.create_task(self._signals.kill_requested.wait())
        grace_s = self._command.drain_timeout_s + STOP_MARGIN_S
        await asyncio.wait([ended, hurried], timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not ended.done():
            print_message(f"the {self._command.name} doesn't end; killing it")
            process.kill()
        await ended


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}  # real-time signals have no name of their own
    return f"was killed by {names.get(-code, f'signal {-code}')}"


class _OutageReporter:
    """Says, once after children have died, that requests are served again; one that dies meanwhile prolongs it.

    Until requests are served for the first time there is none: that is announced by itself.
    """

    def __init__(self, address: Address) -> None:
        self.is_enabled = False
        self._address = address
        self._started_at = 0.0  # time.monotonic()
        self._exited_names: list[str] = []  # since requests were served
        self._down_names: set[str] = set()  # those of them that do not run
        self.report_task: asyncio.Task[None] | None = None

    def record_exit(self, name: str) -> None:
        if not self.is_enabled:
            return
        self.cancel()
        if not self._exited_names:
            self._started_at = time.monotonic()
        if name not in self._exited_names:
            self._exited_names.append(name)
        self._down_names.add(name)

    def record_start(self, name: str) -> None:
        self._down_names.discard(name)
        if self._exited_names and not self._down_names:
            self.report_task = asyncio.create_task(self._report_recovery())

    def cancel(self) -> None:
        if self.report_task is not None:
            self.report_task.cancel()

    async def _report_recovery(self) -> None:
        await _wait_until_ready(self._address)
        print_message(
            f"ready again, {time.monotonic() - self._started_at:.1f} s after the "
            f"{' and the '.join(self._exited_names)} ended"
        )
        self._exited_names.clear()


async def _announce_ready(
    address: Address, needs_key: NeedsKey, read_report: ReadReport, outage: _OutageReporter
) -> None:
    """Print, once, that requests are served; first what scripts wait for, then what people want to know."""
    await _wait_until_ready(address)
    outage.is_enabled = True
    curl = address.curl_command(await asyncio.to_thread(needs_key))
    _write_lines(sys.stdout, f"ready {address.url}\n{address.alternatives_line}{curl}\n")
    if more := await asyncio.to_thread(read_report):
        _write_lines(sys.stdout, more)


async def _wait_until_ready(address: Address) -> None:
    while True:
        if (await asyncio.to_thread(asking.read_readiness, address)).is_ready:
            return
        await asyncio.sleep(PROBE_INTERVAL_S)
