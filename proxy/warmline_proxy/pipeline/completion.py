"""After the answer: have the engine let go, let the next one in, save, record.  Also all at once, at a shutdown."""

import asyncio
import logging
from contextlib import suppress

from warmline_common.protocol.messages import Settled
from warmline_proxy.audit.auditor import Auditor
from warmline_proxy.errors import ClientError, cancelled, unavailable
from warmline_proxy.pipeline.saver import Settler
from warmline_proxy.request.registry import Lives
from warmline_proxy.request.request import Life
from warmline_proxy.request_log import CANCELLED
from warmline_proxy.tasks import Background, wait_for_events
from warmline_proxy.upstream.client import TimedOut, Upstream, UpstreamError
from warmline_proxy.upstream.watchdog import Watchdog

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
        auditor: Auditor,
        background: Background,
        finish_prefill: bool,
    ) -> None:
        self._lives, self._upstream, self._watchdog = lives, upstream, watchdog
        self._settler, self._auditor, self._background = settler, auditor, background
        self._finish_prefill = finish_prefill

    def let_go(self, life: Life) -> None:
        """From now on nothing more is wanted of the engine, whether or not its client has heard so."""
        if life.leaving is None:
            life.leaving = self._background.spawn(self._make_way(life), f"end of {life.trace.id}")

    def begin(self, life: Life) -> None:
        """The client has its answer, or has left."""
        life.answer.close()
        life.answered.set()
        self.let_go(life)
        self._background.spawn(self._finish(life), f"settling of {life.trace.id}")

    async def cancel(self, life: Life) -> None:
        """End a request for somebody else than its client; returns when the engine has let go."""
        await self._end(life, cancelled("The request was cancelled by DELETE."))
        await life.let_go.wait()

    async def drain(self, timeout_s: float) -> None:
        """Let what runs come to its end for `timeout_s`, end the rest, and wait until all is on disk."""
        await self._wait_for_answers(timeout_s)
        reason = unavailable("The proxy is being stopped.  What was computed is kept.", "shutting_down")
        with suppress(TimeoutError):
            async with asyncio.timeout(WORD_TIMEOUT_S):
                await asyncio.gather(*(self._end(life, reason) for life in self._lives))
                await self._wait_for_answers(WORD_TIMEOUT_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(SAVES_TIMEOUT_S):
                await asyncio.gather(*(life.settled.wait() for life in self._lives))
                await self._settler.save_residents()

    async def _end(self, life: Life, reason: ClientError) -> None:
        life.ring(reason)
        if life.alone:
            with suppress(UpstreamError):
                await self._upstream.cancel(life.trace.id, self._watchdog.patience_s)

    async def _wait_for_answers(self, timeout_s: float) -> None:
        await wait_for_events((life.answered for life in self._lives if not life.answered.is_set()), timeout_s)

    async def _finish(self, life: Life) -> None:
        try:
            assert life.leaving is not None
            await life.leaving
            if life.ticket:  # else a flood of refusals would push out what the records are for
                await self._settler.settle(life)
                self._auditor.consider(life)
        finally:
            life.settled.set()
            self._lives.discard(life)

    async def _make_way(self, life: Life) -> None:
        """End what runs for it, and let the next one in."""
        try:
            await self._let_go(life)
        except TimedOut:
            self._watchdog.did_not_let_go(life.trace.id)
        except UpstreamError as error:
            log.warning("request %s: what the backend made of it is unknown: %s", life.trace.id, error)
        finally:
            life.let_go.set()
            if life.ticket:
                life.ticket.release()

    async def _let_go(self, life: Life) -> None:
        """Cancel what the client no longer waits for.  Prefill that was done stays, so a retry goes on from there."""
        await asyncio.gather(*(part.let_go.wait() for part in life.parts))
        await self._give_up_restore(life)
        if not life.sent or (life.generation is not None and life.generation.is_over):
            return
        try:
            if not (self._is_to_finish(life) and await self._finish_alone(life)):
                self._learn(life, await self._upstream.cancel(life.trace.id, self._watchdog.patience_s))
        finally:
            if life.generation:
                await life.generation.end(LAST_EVENT_TIMEOUT_S)

    def _is_to_finish(self, life: Life) -> bool:
        """Its client has left by itself, in the midst of a prefill."""
        left = life.trace.outcome == CANCELLED and life.alarm.reason is None
        return self._finish_prefill and left and life.generation is not None and not life.trace.ttft_s

    async def _finish_alone(self, life: Life) -> bool:
        """Let an idle engine complete the prefill, for the client's next try to find or to join.

        False where the backend does not say that it will.
        """
        assert life.generation is not None
        life.alone = True
        try:
            self._learn(life, await self._upstream.finish_prefill(life.trace.id, self._watchdog.patience_s))
        except UpstreamError as error:
            log.warning("request %s: its prefill can't go on alone: %s", life.trace.id, error)
            life.alone = False
            return False
        if life.ticket:
            life.ticket.release()
        await life.generation.end()  # however long that takes: an engine that hangs is ended, and the stream with it
        return True

    def _learn(self, life: Life, settled: Settled | None) -> None:
        if life.hearing and settled:
            life.hearing.settled(settled)

    async def _give_up_restore(self, life: Life) -> None:
        if not life.restoring or life.restoring.done():
            return
        await self._upstream.cancel(life.trace.id, self._watchdog.patience_s)
        await asyncio.wait({life.restoring}, timeout=LAST_EVENT_TIMEOUT_S)
        life.restoring.cancel()  # where the cancel overtook it
        await asyncio.wait({life.restoring})
