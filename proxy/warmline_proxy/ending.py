"""After the answer: have the engine let go, let the next one in, save, record.  Also all at once, at a shutdown."""

import asyncio
import logging
from contextlib import suppress

from warmline_proxy.background import Background
from warmline_proxy.errors import cancelled, unavailable
from warmline_proxy.life import Life
from warmline_proxy.lives import Lives
from warmline_proxy.settle import Settler
from warmline_proxy.trace import CANCELLED
from warmline_proxy.upstream import TimedOut, Upstream, UpstreamError
from warmline_proxy.watchdog import Watchdog
from warmline_wire.messages import Settled

log = logging.getLogger(__name__)

LAST_EVENT_TIMEOUT_S = 10.0  # between the engine's letting go and the end of the stream
WORD_TIMEOUT_S = 4.0  # for clients to hear why they are cut off
SAVES_TIMEOUT_S = 8.0  # at a shutdown; what isn't written then is prefilled again


class Ending:
    """Ends requests, on their own or on demand.  Its state belongs to the event loop."""

    def __init__(
        self,
        lives: Lives,
        upstream: Upstream,
        watchdog: Watchdog,
        settler: Settler,
        background: Background,
        finish_prefill: bool,
    ) -> None:
        self._lives, self._upstream, self._watchdog = lives, upstream, watchdog
        self._settler, self._background, self._finish_prefill = settler, background, finish_prefill

    def begin(self, life: Life) -> None:
        """The client has its answer, or has left."""
        life.answered = True
        life.ended.set()
        self._background.spawn(self._finish(life), f"settling of {life.trace.id}")

    async def cancel(self, life: Life) -> None:
        """End a request for somebody else than its client; returns when the engine has let go."""
        life.alarm.ring(cancelled("The request was cancelled by DELETE."))
        if life.alone:
            await self._upstream.cancel(life.trace.id, self._watchdog.limit_s)
        await life.let_go.wait()

    async def drain(self, timeout_s: float) -> None:
        """Let what runs come to its end for `timeout_s`, end the rest, and wait until all is on disk."""
        await self._wait(timeout_s)
        for life in self._lives:
            life.alarm.ring(unavailable("The proxy is being stopped.  What was computed is kept.", "shutting_down"))
            if life.alone:
                with suppress(UpstreamError):
                    await self._upstream.cancel(life.trace.id, self._watchdog.limit_s)
        await self._wait(WORD_TIMEOUT_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(SAVES_TIMEOUT_S):
                await asyncio.gather(*(life.settled.wait() for life in self._lives))
                await self._settler.save_residents()

    async def _wait(self, timeout_s: float) -> None:
        """For all answers that are under way."""
        ends = [asyncio.ensure_future(life.ended.wait()) for life in self._lives if not life.answered]
        if ends:
            _, late = await asyncio.wait(ends, timeout=timeout_s)
            for end in late:
                end.cancel()

    async def _finish(self, life: Life) -> None:
        try:
            await self._make_way(life)
            if life.ticket:  # else a flood of refusals would push out what the records are for
                await self._settler.settle(life)
        finally:
            life.settled.set()
            self._lives.discard(life)

    async def _make_way(self, life: Life) -> None:
        """End what runs for it, and let the next one in."""
        try:
            await self._let_go(life)
        except TimedOut:
            self._watchdog.condemn(f"request {life.trace.id} was cancelled, and the engine does not let go of it")
        except UpstreamError as error:
            log.warning("request %s: what the backend made of it is unknown: %s", life.trace.id, error)
        finally:
            life.let_go.set()
            if life.ticket:
                life.ticket.release()

    async def _let_go(self, life: Life) -> None:
        """Cancel what the client no longer waits for.  Prefill that was done stays, so a retry goes on from there."""
        await self._give_up_restore(life)
        generation = life.generation
        if not life.sent or (generation is not None and generation.is_over):
            return
        if self._finish_prefill and generation and life.trace.outcome == CANCELLED and not life.trace.ttft_s:
            await self._finish_alone(life)
            return
        try:
            await self._cancel(life)
        finally:
            if generation:
                await generation.end(LAST_EVENT_TIMEOUT_S)

    async def _cancel(self, life: Life) -> None:
        if settled := await self._upstream.cancel(life.trace.id, self._watchdog.limit_s):
            self._learn(life, settled)

    async def _finish_alone(self, life: Life) -> None:
        """Let an idle engine complete the prefill, for the client's next try to find or to join."""
        assert life.generation is not None
        life.alone = True
        if settled := await self._upstream.finish_prefill(life.trace.id, self._watchdog.limit_s):
            self._learn(life, settled)
        if life.ticket:
            life.ticket.release()
        await life.generation.end()

    def _learn(self, life: Life, settled: Settled) -> None:
        if life.hearing:
            life.hearing.settled(settled)

    async def _give_up_restore(self, life: Life) -> None:
        if life.restoring and not life.restoring.done():
            await self._upstream.cancel(life.trace.id, self._watchdog.limit_s)
            await asyncio.wait({life.restoring})
