"""Watchdog of the backend's engine: polls its pulse, lets requests wait for it, and kills a wedged process.

A step may take the configured limit or five times the slowest recent step (without outliers), whichever is longer.
Only time between two polls counts as stalled, up to POLL_GAP_MAX_S each: a machine that slept did not stall.  The
supervisor restarts the backend.
"""

import asyncio
import logging
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

from warmline_common.process.pids import read_command_line
from warmline_common.protocol.messages import HealthReply
from warmline_common.storage.file_lock import find_lock_holder, read_pid
from warmline_common.storage.home import Home
from warmline_proxy.upstream.client import Upstream, UpstreamConnectionError, UpstreamError

log = logging.getLogger(__name__)

SLOWEST_STEP_FACTOR = 5.0  # times the slowest recent step
WARM_UP_STEPS = 8  # which compile kernels and page weights in
WARM_UP_FACTOR = 5.0
POLL_INTERVAL_S = 1.0
POLL_INTERVAL_DOWN_S = 0.2  # requests may be waiting
PULSE_TIMEOUT_S = 5.0
POLL_GAP_MAX_S = 10.0  # between two polls; in a longer gap this process did not run
BACKEND_COMMAND = "warmline_backend"  # in the command line of every process that may be killed


def step_limit_s(configured_s: float, pulse: HealthReply | None) -> float:
    """Limit of the current step's duration."""
    if pulse is None:
        return configured_s
    limit = max(configured_s, SLOWEST_STEP_FACTOR * pulse.slowest_recent_step_s)
    return limit * WARM_UP_FACTOR if pulse.steps < WARM_UP_STEPS else limit


def is_backend(pid: int, home: Home) -> bool:
    """True for the pid of a backend; where there are several, of the one that holds this instance's lock."""
    if BACKEND_COMMAND not in read_command_line(pid):
        return False
    return not home.instance or find_lock_holder(home.backend_lock) == str(pid)


@dataclass(eq=False)
class StallTracker:
    """Seconds for which a backend has stalled: in one step, or silent."""

    stuck_s: float = 0.0
    silent_s: float = 0.0
    _step: tuple[str, int] | None = None

    def record_pulse(self, pulse: HealthReply, gap_s: float) -> bool:
        """Take a pulse `gap_s` after the last poll; say whether a step was done since the last pulse."""
        step, last = (pulse.boot, pulse.steps), self._step
        self.silent_s = 0.0
        is_stuck = pulse.busy and step == last
        self.stuck_s = min(self.stuck_s + min(gap_s, POLL_GAP_MAX_S), pulse.step_age_s) if is_stuck else 0.0
        self._step = step
        return step != last

    def record_silence(self, gap_s: float) -> None:
        self.silent_s += min(gap_s, POLL_GAP_MAX_S)

    def find_stall_reason(self, configured_s: float, pulse: HealthReply | None) -> str:
        """Describe a stall beyond the limit; "" where there is none."""
        limit = step_limit_s(configured_s, pulse)
        if self.silent_s > limit:
            return f"it has not answered for {self.silent_s:.1f} s; its limit is {limit:.1f} s"
        if pulse and self.stuck_s > limit:
            slowest = f"the slowest of late took {pulse.slowest_recent_step_s:.1f} s and the limit is {limit:.1f} s"
            return f"a step has been going on for {pulse.step_age_s:.1f} s; {slowest}"
        return ""


class Watchdog:
    """State of the backend's process.  Event loop thread; `run` is its only task."""

    def __init__(self, upstream: Upstream, wedge_timeout_s: float, home: Home) -> None:
        """`home` names the backend's files, of an instance where there are several."""
        self.pulse: HealthReply | None = None  # the last one; None while the process is down
        self.down_reason = "the backend has not answered yet"
        self.last_step_at = 0.0  # time.monotonic() of the poll that last saw a new step
        self.kills = 0
        self.boots = 0  # backend processes seen so far
        self._boot = ""
        self._upstream, self._wedge_timeout_s, self._home = upstream, wedge_timeout_s, home
        self._stall_tracker = StallTracker()
        self._polled_at = time.monotonic()
        self._up_event = asyncio.Event()
        self._poll_event = asyncio.Event()

    @property
    def is_up(self) -> bool:
        return self._up_event.is_set()

    @property
    def cancel_timeout_s(self) -> float:
        """Time limit for the engine to acknowledge a cancel."""
        return step_limit_s(self._wedge_timeout_s, self.pulse)

    @property
    def slowest_recent_step_s(self) -> float:
        return self.pulse.slowest_recent_step_s if self.pulse else 0.0

    @property
    def stalled_s(self) -> float:
        """Seconds for which the engine has finished no step of its work, or the process has not answered."""
        return max(self._stall_tracker.stuck_s, self._stall_tracker.silent_s)

    async def wait_until_up(self, timeout_s: float | None = None) -> None:
        """Wait until the backend serves.  Raises TimeoutError; then `down_reason` says why it doesn't."""
        if self.is_up:
            return
        self._poll_event.set()
        async with asyncio.timeout(timeout_s):
            await self._up_event.wait()

    def recheck(self) -> None:
        """Poll again before the next call, after a failed one."""
        self._up_event.clear()
        self._poll_event.set()

    def report_cancel_timeout(self, request_id: str) -> None:
        """Kill the backend, unless its engine does steps, since a cancel was not acknowledged in time."""
        if self.pulse is None:
            return  # it is down already
        if time.monotonic() - self.last_step_at > self.cancel_timeout_s / 2:
            self._kill_backend(f"it has not released request {request_id}")
        else:
            log.error("the engine takes steps, and has not released request %s", request_id)

    async def run(self) -> None:
        while True:
            self._poll_event.clear()
            try:
                await self._poll()
            except Exception:  # without a watchdog, no request would be served any more
                log.exception("polling the backend failed")
            with suppress(TimeoutError):
                interval_s = POLL_INTERVAL_S if self.is_up else POLL_INTERVAL_DOWN_S
                async with asyncio.timeout(min(interval_s, self._wedge_timeout_s / 4)):
                    await self._poll_event.wait()

    async def _poll(self) -> None:
        try:
            # A process short of memory answers late: the timeout grows with the silence.
            timeout_s = min(max(PULSE_TIMEOUT_S, self._stall_tracker.silent_s), self._wedge_timeout_s / 2)
            pulse = await self._upstream.fetch_pulse(timeout_s)
        except UpstreamConnectionError as error:  # the port is open, and there is no answer
            self._stall_tracker.record_silence(self._measure_gap_s())
            self._up_event.clear()
            self.down_reason = str(error)
        except UpstreamError as error:  # no process listens, or another program does
            self._measure_gap_s()
            self._mark_down(str(error))
        else:
            self._record_pulse(pulse)
        if why := self._stall_tracker.find_stall_reason(self._wedge_timeout_s, self.pulse):
            self._kill_backend(why)

    def _measure_gap_s(self) -> float:
        """Measure the time since the last poll."""
        last, self._polled_at = self._polled_at, time.monotonic()
        return self._polled_at - last

    def _record_pulse(self, pulse: HealthReply) -> None:
        self.pulse = pulse
        if pulse.boot != self._boot:
            self._boot, self.boots = pulse.boot, self.boots + 1
        if self._stall_tracker.record_pulse(pulse, self._measure_gap_s()):
            self.last_step_at = time.monotonic()
        if pulse.ready:
            self._up_event.set()
        else:
            self._up_event.clear()
            self.down_reason = pulse.failure or "the backend is starting"

    def _kill_backend(self, why: str) -> None:
        """Kill the process with SIGKILL, if it is a backend."""
        pid = self.pulse.pid if self.pulse else read_pid(self._home.pid_file("backend"))
        self._mark_down("the backend was wedged and is being started again")
        if pid is None or not is_backend(pid, self._home):
            log.error("the backend is wedged (%s), and there is no such process to end: was it started elsewhere?", why)
            return
        log.error("the backend (pid %d) is wedged and is killed: %s", pid, why)
        self.kills += 1
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError as error:
            log.error("the backend (pid %d) could not be killed: %s", pid, error)

    def _mark_down(self, why: str) -> None:
        self.pulse, self.down_reason, self._stall_tracker = None, why, StallTracker()
        self._up_event.clear()
