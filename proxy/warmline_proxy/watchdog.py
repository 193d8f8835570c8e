"""Watches the backend's engine, has requests wait until it is there, and ends a process that no longer moves.

Slow is not stuck: a step may take as long as the configured limit, or five times the slowest of late, whichever is
longer.  Who starts the process again is not the watchdog's business: its supervisor does.
"""

import asyncio
import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from warmline_proxy.upstream import Unreachable, Upstream, UpstreamError
from warmline_wire.messages import Pulse

log = logging.getLogger(__name__)

STRETCH = 5.0  # times the slowest recent step
WARMING_STEPS = 8  # during which kernels are compiled and weights paged in
WARMING_FACTOR = 5.0
LOOK_INTERVAL_S = 1.0
LOOK_INTERVAL_DOWN_S = 0.2  # requests may be waiting
PULSE_TIMEOUT_S = 5.0


def limit_s(configured_s: float, pulse: Pulse | None) -> float:
    """How long the present step may take."""
    if pulse is None:
        return configured_s
    limit = max(configured_s, STRETCH * pulse.slowest_recent_step_s)
    return limit * WARMING_FACTOR if pulse.steps < WARMING_STEPS else limit


def wedged(configured_s: float, pulse: Pulse | None, silent_s: float) -> str:
    """Why a backend that last said `pulse`, and has been silent for `silent_s`, is past hope; "" where it is not."""
    limit = limit_s(configured_s, pulse)
    if silent_s > limit:
        return f"it has not answered for {silent_s:.1f} s; its limit is {limit:.1f} s"
    if pulse and not silent_s and pulse.step_age_s > limit:
        return (
            f"a step has been going on for {pulse.step_age_s:.1f} s; the slowest of late took "
            f"{pulse.slowest_recent_step_s:.1f} s and the limit is {limit:.1f} s"
        )
    return ""


class Watchdog:
    """What is known of the backend's process.  Owned by the event loop; `run` is its one task."""

    def __init__(self, upstream: Upstream, wedge_timeout_s: float, pid_file: Path) -> None:
        self.pulse: Pulse | None = None  # the last one of a process that still lives, as far as we know
        self.why_down = "the backend has not been heard of yet"
        self.moved_at = 0.0  # time.monotonic() at which the engine was last seen to have done a step
        self.kills = 0
        self._upstream, self._wedge_timeout_s, self._pid_file = upstream, wedge_timeout_s, pid_file
        self._silent_since: float | None = None  # it takes connections and doesn't answer
        self._up = asyncio.Event()
        self._hurry = asyncio.Event()

    @property
    def is_up(self) -> bool:
        return self._up.is_set()

    @property
    def limit_s(self) -> float:
        """How long the engine may take to let go of a request."""
        return limit_s(self._wedge_timeout_s, self.pulse)

    @property
    def slowest_recent_step_s(self) -> float:
        return self.pulse.slowest_recent_step_s if self.pulse else 0.0

    async def up(self, timeout_s: float | None = None) -> None:
        """Wait until the backend serves.  Raises Unreachable after `timeout_s`, saying why it doesn't."""
        if self.is_up:
            return
        self._hurry.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError:
            raise Unreachable(f"{self.why_down} (waited {timeout_s:g} s)") from None

    def doubt(self) -> None:
        """A call has failed: look again before anybody else calls."""
        self._up.clear()
        self._hurry.set()

    def condemn(self, why: str) -> None:
        """End the process, and at once."""
        if (pid := self._pid()) is None:
            return
        log.error("the backend (pid %d) is wedged and is killed: %s", pid, why)
        self.kills += 1
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._down("the backend was wedged and is being started again")

    def _pid(self) -> int | None:
        """Of the process that was heard last; of one that never spoke, what it wrote at its start."""
        if self.pulse:
            return self.pulse.pid
        with suppress(OSError, ValueError):
            return int(self._pid_file.read_text())
        return None

    async def run(self) -> None:
        while True:
            self._hurry.clear()
            await self._look()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._hurry.wait()

    @property
    def _interval_s(self) -> float:
        return min(LOOK_INTERVAL_S if self.is_up else LOOK_INTERVAL_DOWN_S, self._wedge_timeout_s / 4)

    async def _look(self) -> None:
        try:
            pulse = await self._upstream.pulse(min(PULSE_TIMEOUT_S, self._wedge_timeout_s / 2))
        except Unreachable as error:
            self._down(str(error))
        except UpstreamError as error:
            self._silent(str(error))
        else:
            self._hear(pulse)

    def _hear(self, pulse: Pulse) -> None:
        last, self.pulse, self._silent_since = self.pulse, pulse, None
        if last is None or (last.boot, last.steps) != (pulse.boot, pulse.steps):
            self.moved_at = time.monotonic()
        if why := wedged(self._wedge_timeout_s, pulse, 0.0):
            self.condemn(why)
        elif pulse.ready:
            self._up.set()
        else:
            self._up.clear()
            self.why_down = pulse.failure or "the backend is starting"

    def _silent(self, why: str) -> None:
        self._up.clear()
        self.why_down = why
        self._silent_since = self._silent_since or time.monotonic()
        if why := wedged(self._wedge_timeout_s, self.pulse, time.monotonic() - self._silent_since):
            self.condemn(why)

    def _down(self, why: str) -> None:
        self.pulse, self._silent_since, self.why_down = None, None, why
        self._up.clear()
