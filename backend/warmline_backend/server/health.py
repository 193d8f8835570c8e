"""What watchers are told: the pulse, and whether it is ready.  Event loop thread.

All but a probe is answered from what the engine last said of itself, whatever it is busy with.
"""

import asyncio
import os
import time
from concurrent.futures import Future

from warmline_backend.engine.engine import Engine
from warmline_common.protocol.messages import Pulse

STEP_AGE_MAX_S = 120.0  # or SLOWEST_STEPS times the slowest recent one
SLOWEST_STEPS = 5
PROBE_EVERY_S = 5.0
PROBE_WAIT_S = 10.0


def pulse(engine: Engine, boot: str, failure: str) -> Pulse:
    beat = engine.beat
    return Pulse(
        boot=boot,
        pid=os.getpid(),
        ready=not failure,
        busy=beat.busy,
        steps=beat.steps,
        step_age_s=beat.age_s,
        slowest_recent_step_s=engine.snapshot.slowest_recent_step_s,
        failure=failure,
    )


class Readiness:
    """Whether the engine computes.  A busy one's present step tells; an idle one is asked for a token.

    A probe that hangs makes it unready until it is over.  At most one every `PROBE_EVERY_S`; in between its result
    holds.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._probe: Future[None] | None = None
        self._probed_at = 0.0  # time.monotonic()

    async def why_not(self) -> str:
        """ "" where it is ready; else the reason."""
        probing = self._probe is not None and self._probe.running()
        if self._engine.beat.busy and not probing:
            return self._why_not_by_step()
        return await self._why_not_by_token()

    def _why_not_by_step(self) -> str:
        age_s = self._engine.beat.age_s
        if age_s < max(STEP_AGE_MAX_S, SLOWEST_STEPS * self._engine.snapshot.slowest_recent_step_s):
            return ""
        return f"the engine's present step has been going on for {age_s:.0f} s"

    async def _why_not_by_token(self) -> str:
        probe = self._latest_probe()
        wait_s = max(0.0, self._probed_at + PROBE_WAIT_S - time.monotonic())
        if not probe.done():
            await _wait(probe, wait_s)
        if not probe.done():
            hangs = f"the engine has not computed a token in {PROBE_WAIT_S:g} s"
            return hangs if probe.running() else self._why_not_by_step()  # else it waits behind somebody's chunk
        error = probe.exception()
        return "" if error is None else f"the engine could not compute a token: {error or type(error).__name__}"

    def _latest_probe(self) -> "Future[None]":
        now = time.monotonic()
        if self._probe is None or (self._probe.done() and now - self._probed_at >= PROBE_EVERY_S):
            self._probe, self._probed_at = self._engine.ask(lambda scheduler: scheduler.probe()), now
        return self._probe


async def _wait(probe: "Future[None]", timeout_s: float) -> None:
    """Until it is over, however it ends, or the time is."""
    over = asyncio.wrap_future(probe)
    over.add_done_callback(lambda over: over.cancelled() or over.exception())  # which `probe` tells: nobody asks here
    await asyncio.wait({over}, timeout=timeout_s)
