"""`serve`: keeps the backend and the proxy running until a signal, and ends with them.

One asyncio loop owns everything.  Each child runs in its own session, so that a Ctrl-C in the terminal reaches only
serve, which then stops the proxy before the backend under it.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from warmline_common.process import exit_codes
from warmline_common.process.console import write_line
from warmline_common.process.exit_codes import EXIT_CONFIGURATION
from warmline_common.process.parent_watch import PARENT_PIPE
from warmline_common.settings.resolve import ResolvedConfig
from warmline_run import probe
from warmline_run.address import Address, make_address
from warmline_run.processes import Command
from warmline_run.startup_report import format_report

RESTART_DELAY_FIRST_S = 1.0
RESTART_DELAY_MAX_S = 30.0
BACKOFF_RESET_AFTER_S = 60.0  # a child up for this long has earned a fresh start
STOP_MARGIN_S = 15.0  # beyond the drain of running requests: to release them, and to save
PROBE_INTERVAL_S = 0.2


def print_message(line: str) -> None:
    write_line(f"warmline: {line}")


def run(backend: Command, proxy: Command, config: ResolvedConfig) -> int:
    """Supervise the pair.  Blocks until SIGINT or SIGTERM (0) or until a child reports a configuration error (2)."""
    return asyncio.run(_serve(backend, proxy, config))


async def _serve(backend: Command, proxy: Command, config: ResolvedConfig) -> int:
    signals, outage = _Signals(), _OutageReporter(make_address(config))
    with _open_parent_pipe() as pipe:
        children = [_ChildSupervisor(each, pipe, signals, outage) for each in (proxy, backend)]  # in order of stopping
        runs = [asyncio.create_task(child.run()) for child in reversed(children)]
        announcement = asyncio.create_task(_announce_ready(config, outage))
        stop_request = asyncio.create_task(signals.stop_requested.wait())
        try:
            done, _ = await asyncio.wait([*runs, stop_request], return_when=asyncio.FIRST_COMPLETED)
            if stop_request in done:  # the proxy says how long that may take, where anything runs
                print_message("stopping; once more to end at once")
            return next((run.result() for run in runs if run in done), 0)
        finally:
            for task in (announcement, stop_request, *runs):
                task.cancel()
            outage.cancel()
            for child in children:
                await child.stop()


class _Signals:
    """Requests by signal: the first SIGINT or SIGTERM asks to stop, the next one to hurry."""

    def __init__(self) -> None:
        self.stop_requested = asyncio.Event()
        self.kill_requested = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._handle_signal)

    def _handle_signal(self) -> None:
        (self.kill_requested if self.stop_requested.is_set() else self.stop_requested).set()


@contextmanager
def _open_parent_pipe() -> Iterator[int]:
    """Read end of a pipe; this process alone has the write end: children see it close when this process ends."""
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(read_end)
        os.close(write_end)


class _ChildSupervisor:
    """Supervisor of one child.  `run` returns only on a configuration error; after cancelling it, call `stop`."""

    def __init__(self, command: Command, pipe: int, signals: _Signals, outage: "_OutageReporter") -> None:
        self._command, self._pipe, self._signals, self._outage = command, pipe, signals, outage
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
            # From now on the child waits for a held home: a cachectl may have it, and release it.
            environment.setdefault(exit_codes.AGENT_VARIABLE, exit_codes.SERVE)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RESTART_DELAY_MAX_S)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after a grace or as soon as the user hurries."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        exit_wait = asyncio.create_task(process.wait())
        kill_request = asyncio.create_task(self._signals.kill_requested.wait())
        grace_s = self._command.drain_timeout_s + STOP_MARGIN_S
        await asyncio.wait([exit_wait, kill_request], timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        kill_request.cancel()
        if not exit_wait.done():
            print_message(f"the {self._command.name} doesn't end; killing it")
            process.kill()
        await exit_wait


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}  # real-time signals have no name of their own
    return f"was killed by {names.get(-code, f'signal {-code}')}"


class _OutageReporter:
    """Reporter of an outage's end: one message after children have died; one that dies meanwhile prolongs the outage.

    Disabled until requests are served for the first time: that is announced by itself.
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
        outage_s, names = time.monotonic() - self._started_at, " and the ".join(self._exited_names)
        print_message(f"ready again, {outage_s:.1f} s after the {names} ended")
        self._exited_names.clear()


async def _announce_ready(config: ResolvedConfig, outage: _OutageReporter) -> None:
    """Print, once, that requests are served: first the line that scripts wait for, then the lines for people.

    In one write, unlike print() where output is unbuffered: the children write there too, and any process may be killed
    at any moment.
    """
    address = make_address(config)
    await _wait_until_ready(address)
    outage.is_enabled = True
    status = await asyncio.to_thread(probe.read_status, address, Path(str(config["home"])))
    curl = address.curl_command(needs_key=status.get("needs_key") is True)
    report = format_report(status, config, address)
    sys.stdout.write(f"ready {address.url}\n{address.alternatives_line}{curl}\n{report}")
    sys.stdout.flush()


async def _wait_until_ready(address: Address) -> None:
    while True:
        if (await asyncio.to_thread(probe.read_readiness, address)).is_ready:
            return
        await asyncio.sleep(PROBE_INTERVAL_S)
