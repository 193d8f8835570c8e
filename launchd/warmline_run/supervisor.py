"""`serve`: keeps the backend and the proxy running until a signal, and ends with them.

One asyncio loop owns everything.  Each child runs in its own session, so that a Ctrl-C in the terminal reaches only
serve, which then stops the proxy before the backend under it.
"""

import asyncio
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warmline_common.process import exit_codes
from warmline_common.process.console import write_line
from warmline_common.process.exit_codes import EXIT_CONFIGURATION
from warmline_common.settings.resolve import ResolvedConfig
from warmline_run import probe
from warmline_run.address import Address, make_address
from warmline_run.child_process import (
    RestartBackoff,
    SupervisorSignals,
    describe_exit,
    open_parent_pipe,
    start_child,
    wait_for_exit,
)
from warmline_run.processes import Command
from warmline_run.startup_report import choose_example_model, format_report, has_unknown_sizes

STOP_MARGIN_S = 15.0  # beyond the drain of running requests: to release them, and to save
PROBE_INTERVAL_S = 0.2
SIZES_WAIT_S = 5.0  # for the sizes of several models, before the report of a start


def print_message(line: str) -> None:
    write_line(f"warmline: {line}")


def run(backend: Command, proxy: Command, config: ResolvedConfig) -> int:
    """Supervise the pair.  Blocks until SIGINT or SIGTERM (0) or until a child reports a configuration error (2)."""
    return asyncio.run(_serve(backend, proxy, config))


async def _serve(backend: Command, proxy: Command, config: ResolvedConfig) -> int:
    signals, outage = SupervisorSignals(), _OutageReporter(make_address(config))
    with open_parent_pipe() as pipe:
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


class _ChildSupervisor:
    """Supervisor of one child.  `run` returns only on a configuration error; after cancelling it, call `stop`."""

    def __init__(self, command: Command, pipe: int, signals: SupervisorSignals, outage: "_OutageReporter") -> None:
        self._command, self._pipe, self._signals, self._outage = command, pipe, signals, outage
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> int:
        backoff, variables = RestartBackoff(), dict[str, str]()
        while True:
            backoff.record_start()
            self._process = await start_child(self._command, self._pipe, variables)
            self._outage.record_start(self._command.name)
            code = await self._process.wait()
            self._outage.record_exit(self._command.name)
            if code == EXIT_CONFIGURATION:
                print_message(f"the {self._command.name} can't run as configured (see its message above)")
                return code
            delay_s = backoff.next_delay_s()
            print_message(f"the {self._command.name} {describe_exit(code)}; starting it again in {delay_s:g} s")
            # From now on the child waits for a held home: a cachectl may have it, and release it.
            variables.setdefault(exit_codes.AGENT_VARIABLE, exit_codes.SERVE)
            await asyncio.sleep(delay_s)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL after a grace or as soon as the user hurries."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        grace_s, hurry = self._command.drain_timeout_s + STOP_MARGIN_S, self._signals.kill_requested
        if not await wait_for_exit(process, hurry, grace_s) and not await self._stop_at_once(process):
            print_message(f"the {self._command.name} doesn't end; killing it")
            process.kill()
        await process.wait()

    async def _stop_at_once(self, process: asyncio.subprocess.Process) -> bool:
        """Pass the hurry on to a child that has children of its own to end.  True where it has ended."""
        if not self._command.hurry_s:
            return False
        process.terminate()
        return await wait_for_exit(process, asyncio.Event(), self._command.hurry_s)


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
    status = await _read_status_with_sizes(address, Path(str(config["home"])))
    curl = address.curl_command(status.get("needs_key") is True, choose_example_model(status))
    report = format_report(status, config, address)
    sys.stdout.write(f"ready {address.url}\n{address.alternatives_line}{curl}\n{report}")
    sys.stdout.flush()


async def _read_status_with_sizes(address: Address, home: Path) -> Mapping[str, Any]:
    """Status once the size of each model is known, which says what can't be loaded; for SIZES_WAIT_S at most."""
    deadline = time.monotonic() + SIZES_WAIT_S
    while True:
        status = await asyncio.to_thread(probe.read_status, address, home)
        if not has_unknown_sizes(status) or time.monotonic() > deadline:
            return status
        await asyncio.sleep(PROBE_INTERVAL_S)


async def _wait_until_ready(address: Address) -> None:
    while True:
        if (await asyncio.to_thread(probe.read_readiness, address)).is_ready:
            return
        await asyncio.sleep(PROBE_INTERVAL_S)
