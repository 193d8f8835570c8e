"""Watches the backend's engine, has requests wait until it is there, and ends a process that no longer moves.

Slow is not stuck: a step may take as long as the configured limit, or five times the slowest of late, whichever is
longer.  Only what was seen counts: a machine that slept, or a process that was stopped for a while, has not stood still
for all that time.  Who starts the process again is not the watchdog's business: its supervisor does.
"""

import asyncio
import logging
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from warmline_common.protocol.messages import Pulse
from warmline_proxy.upstream.client import Broken, Upstream, UpstreamError

log = logging.getLogger(__name__)

STRETCH = 5.0  # times the slowest recent step
WARMING_STEPS = 8  # during which kernels are compiled and weights paged in
WARMING_FACTOR = 5.0
LOOK_INTERVAL_S = 1.0
LOOK_INTERVAL_DOWN_S = 0.2  # requests may be waiting
PULSE_TIMEOUT_S = 5.0
GAP_MAX_S = 10.0  # between two looks; a longer one says that we were not looking
BACKEND = "warmline_backend"  # in the command line of every process that may be ended


def limit_s(configured_s: float, pulse: Pulse | None) -> float:
    """How long the present step may take."""
    if pulse is None:
        return configured_s
    limit = max(configured_s, STRETCH * pulse.slowest_recent_step_s)
    return limit * WARMING_FACTOR if pulse.steps < WARMING_STEPS else limit


class Standstill:
    """For how long a backend was seen not to move: always in the same step, or always silent."""

    def __init__(self) -> None:
        self.stuck_s = 0.0
        self.silent_s = 0.0
        self._step: tuple[str, int] | None = None

    def moved(self) -> None:
        self.stuck_s = self.silent_s = 0.0
        self._step = None

    def heard(self, pulse: Pulse, gap_s: float) -> bool:
        """Whether it has moved since it was last heard.  `gap_s`: since the last look."""
        step, last = (pulse.boot, pulse.steps), self._step
        self.silent_s = 0.0
        stands = pulse.busy and step == last
        self.stuck_s = min(self.stuck_s + min(gap_s, GAP_MAX_S), pulse.step_age_s) if stands else 0.0
        self._step = step
        return step != last

    def unheard(self, gap_s: float) -> None:
        self.silent_s += min(gap_s, GAP_MAX_S)

    def why_hopeless(self, configured_s: float, pulse: Pulse | None) -> str:
        """ "" where there is hope."""
        limit = limit_s(configured_s, pulse)
        if self.silent_s > limit:
            return f"it has not answered for {self.silent_s:.1f} s; its limit is {limit:.1f} s"
        if pulse and self.stuck_s > limit:
            return (
                f"a step has been going on for {pulse.step_age_s:.1f} s; the slowest of late took "
                f"{pulse.slowest_recent_step_s:.1f} s and the limit is {limit:.1f} s"
            )
        return ""


def command_of(pid: int) -> str:
    """The command line of a process; "" where there is none."""
    with suppress(OSError):
        if Path("/proc/self/cmdline").exists():
            return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
        ps = ("ps", "-ww", "-o", "command=", "-p", str(pid))
        return subprocess.run(ps, capture_output=True, text=True, timeout=PULSE_TIMEOUT_S, check=False).stdout
    return ""


class Watchdog:
    """What is known of the backend's process.  Owned by the event loop; `run` is its one task."""

    def __init__(self, upstream: Upstream, wedge_timeout_s: float, pid_file: Path) -> None:
        self.pulse: Pulse | None = None  # the last one of a process that was not seen to end
        self.why_down = "the backend has not been heard of yet"
        self.moved_at = 0.0  # time.monotonic() at which the engine was last seen to have done a step
        self.kills = 0
        self.boots = 0  # backend processes that were heard of
        self._boot = ""
        self._upstream, self._wedge_timeout_s, self._pid_file = upstream, wedge_timeout_s, pid_file
        self._standstill = Standstill()
        self._looked_at = time.monotonic()
        self._up = asyncio.Event()
        self._hurry = asyncio.Event()

    @property
    def is_up(self) -> bool:
        return self._up.is_set()

    @property
    def patience_s(self) -> float:
        """How long the engine may take to let go of a request."""
        return limit_s(self._wedge_timeout_s, self.pulse)

    @property
    def slowest_recent_step_s(self) -> float:
        return self.pulse.slowest_recent_step_s if self.pulse else 0.0

    async def up(self, timeout_s: float | None = None) -> None:
        """Wait until the backend serves.  Raises TimeoutError, after which `why_down` says why it doesn't."""
        if self.is_up:
            return
        self._hurry.set()
        async with asyncio.timeout(timeout_s):
            await self._up.wait()

    def doubt(self) -> None:
        """A call has failed: look again before anybody else calls."""
        self._up.clear()
        self._hurry.set()

    def did_not_let_go(self, request_id: str) -> None:
        """The engine has not acknowledged a cancel in all its patience: it is wedged, unless it moves."""
        if self.pulse is None:
            return  # it is gone already
        if time.monotonic() - self.moved_at > self.patience_s / 2:
            self._condemn(f"it does not let go of request {request_id}")
        else:
            log.error("the engine moves, and yet does not let go of request %s", request_id)

    async def run(self) -> None:
        while True:
            self._hurry.clear()
            try:
                await self._look()
            except Exception:  # without a watchdog, nobody would be served any more
                log.exception("looking at the backend failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._hurry.wait()

    @property
    def _interval_s(self) -> float:
        return min(LOOK_INTERVAL_S if self.is_up else LOOK_INTERVAL_DOWN_S, self._wedge_timeout_s / 4)

    async def _look(self) -> None:
        try:
            # A process that is short of memory answers late; the longer it is silent, the longer we listen.
            pulse = await self._upstream.pulse(
                min(max(PULSE_TIMEOUT_S, self._standstill.silent_s), self._wedge_timeout_s / 2)
            )
        except Broken as error:  # it takes connections, or at least has the port, and doesn't answer
            self._standstill.unheard(self._gap_s())
            self._up.clear()
            self.why_down = str(error)
        except UpstreamError as error:  # nobody listens, or somebody else
            self._gap_s()
            self._down(str(error))
        else:
            self._hear(pulse)
        if why := self._standstill.why_hopeless(self._wedge_timeout_s, self.pulse):
            self._condemn(why)

    def _gap_s(self) -> float:
        """Since the last look."""
        last, self._looked_at = self._looked_at, time.monotonic()
        return self._looked_at - last

    def _hear(self, pulse: Pulse) -> None:
        self.pulse = pulse
        if pulse.boot != self._boot:
            self._boot, self.boots = pulse.boot, self.boots + 1
        if self._standstill.heard(pulse, self._gap_s()):
            self.moved_at = time.monotonic()
        if pulse.ready:
            self._up.set()
        else:
            self._up.clear()
            self.why_down = pulse.failure or "the backend is starting"

    def _condemn(self, why: str) -> None:
        """End the process, and at once."""
        pid = self._pid()
        self._down("the backend was wedged and is being started again")
        if pid is None or BACKEND not in command_of(pid):
            log.error("the backend is wedged (%s), and there is no such process to end: was it started elsewhere?", why)
            return
        log.error("the backend (pid %d) is wedged and is killed: %s", pid, why)
        self.kills += 1
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError as error:
            log.error("the backend (pid %d) could not be killed: %s", pid, error)

    def _pid(self) -> int | None:
        """Of the process that was heard last; of one that never spoke, what it wrote at its start."""
        if self.pulse:
            return self.pulse.pid
        with suppress(OSError, ValueError):
            return int(self._pid_file.read_text())
        return None

    def _down(self, why: str) -> None:
        self.pulse, self.why_down = None, why
        self._standstill.moved()
        self._up.clear()
