"""Readiness of the engine, for monitors.  Event loop thread."""

import asyncio
import time
from concurrent.futures import Future

from warmline_backend.engine.engine import Engine

STEP_AGE_MAX_S = 120.0  # or SLOWEST_STEP_FACTOR times the slowest recent one
SLOWEST_STEP_FACTOR = 5
PROBE_INTERVAL_S = 5.0
PROBE_TIMEOUT_S = 10.0


class EngineReadiness:
    """Readiness of the engine: by the age of a busy one's step; an idle one is probed for a token.

    A hanging probe makes it unready until its end.  A probe's result holds for PROBE_INTERVAL_S.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._probe: Future[None] | None = None
        self._probed_at = 0.0  # time.monotonic()

    async def find_problem(self) -> str:
        """The reason why it is not ready, or ""."""
        probing = self._probe is not None and self._probe.running()
        if self._engine.heartbeat.is_busy and not probing:
            return self._find_step_problem()
        return await self._find_probe_problem()

    def _find_step_problem(self) -> str:
        age_s = self._engine.heartbeat.step_age_s
        if age_s < max(STEP_AGE_MAX_S, SLOWEST_STEP_FACTOR * self._engine.snapshot.slowest_recent_step_s):
            return ""
        return f"the engine's present step has been going on for {age_s:.0f} s"

    async def _find_probe_problem(self) -> str:
        now, probe = time.monotonic(), self._probe
        if probe is None or (probe.done() and now - self._probed_at >= PROBE_INTERVAL_S):
            probe = self._probe = self._engine.submit(lambda scheduler: scheduler.probe())
            self._probed_at = now
        if not probe.done():
            over = asyncio.wrap_future(probe)
            over.add_done_callback(lambda over: over.cancelled() or over.exception())  # mark its exception as retrieved
            await asyncio.wait({over}, timeout=max(0.0, self._probed_at + PROBE_TIMEOUT_S - now))
        if not probe.done():
            problem = f"the engine has not computed a token in {PROBE_TIMEOUT_S:g} s"
            return problem if probe.running() else self._find_step_problem()  # else it waits behind a chunk
        error = probe.exception()
        return "" if error is None else f"the engine could not compute a token: {error or type(error).__name__}"
