"""After the answer: have the engine let go, let the next one in, save, record.  Also all at once, at a shutdown."""

import asyncio
import logging
from contextlib import suppress

from warmline_common.protocol.messages import GenerationResult
from warmline_proxy.audit.auditor import Auditor
from warmline_proxy.errors import ClientError, request_cancelled, service_unavailable
from warmline_proxy.pipeline.saver import Saver
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.request.request import Request
from warmline_proxy.request_log import CANCELLED
from warmline_proxy.tasks import BackgroundTasks, wait_for_events
from warmline_proxy.upstream.client import Upstream, UpstreamError, UpstreamTimeoutError
from warmline_proxy.upstream.watchdog import Watchdog

log = logging.getLogger(__name__)

LAST_EVENT_TIMEOUT_S = 10.0  # between the engine's letting go and the end of the stream
ERROR_DELIVERY_TIMEOUT_S = 4.0  # for clients to hear why they are cut off
SAVES_TIMEOUT_S = 8.0  # at a shutdown; what isn't written then is prefilled again


class Completion:
    """Ends requests, on their own or on demand.  Its state belongs to the event loop."""

    def __init__(
        self,
        registry: RequestRegistry,
        upstream: Upstream,
        watchdog: Watchdog,
        saver: Saver,
        auditor: Auditor,
        background: BackgroundTasks,
        finish_prefill: bool,
    ) -> None:
        self._registry, self._upstream, self._watchdog = registry, upstream, watchdog
        self._saver, self._auditor, self._background = saver, auditor, background
        self._finish_prefill = finish_prefill

    def release(self, request: Request) -> None:
        """From now on nothing more is wanted of the engine, whether or not its client has heard so."""
        if request.release_task is None:
            request.release_task = self._background.spawn(self._release_engine(request), f"end of {request.log.id}")

    def complete(self, request: Request) -> None:
        """The client has its answer, or has left."""
        request.response.close()
        request.response_done.set()
        self.release(request)
        self._background.spawn(self._finish(request), f"settling of {request.log.id}")

    async def cancel(self, request: Request) -> None:
        """End a request for somebody else than its client; returns when the engine has let go."""
        await self._cancel(request, request_cancelled("The request was cancelled by DELETE."))
        await request.released.wait()

    async def drain(self, timeout_s: float) -> None:
        """Let what runs come to its end for `timeout_s`, end the rest, and wait until all is on disk."""
        await self._wait_for_responses(timeout_s)
        reason = service_unavailable("The proxy is being stopped.  What was computed is kept.", "shutting_down")
        with suppress(TimeoutError):
            async with asyncio.timeout(ERROR_DELIVERY_TIMEOUT_S):
                await asyncio.gather(*(self._cancel(life, reason) for life in self._registry))
                await self._wait_for_responses(ERROR_DELIVERY_TIMEOUT_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(SAVES_TIMEOUT_S):
                await asyncio.gather(*(life.saved.wait() for life in self._registry))
                await self._saver.save_residents()

    async def _cancel(self, request: Request, reason: ClientError) -> None:
        request.cancel(reason)
        if request.is_detached:
            with suppress(UpstreamError):
                await self._upstream.cancel(request.log.id, self._watchdog.cancel_timeout_s)

    async def _wait_for_responses(self, timeout_s: float) -> None:
        await wait_for_events(
            (life.response_done for life in self._registry if not life.response_done.is_set()), timeout_s
        )

    async def _finish(self, request: Request) -> None:
        try:
            assert request.release_task is not None
            await request.release_task
            if request.ticket:  # else a flood of refusals would push out what the records are for
                await self._saver.save_request(request)
                self._auditor.consider_request(request)
        finally:
            request.saved.set()
            self._registry.discard(request)

    async def _release_engine(self, request: Request) -> None:
        """End what runs for it, and let the next one in."""
        try:
            await self._stop_generation(request)
        except UpstreamTimeoutError:
            self._watchdog.report_cancel_timeout(request.log.id)
        except UpstreamError as error:
            log.warning("request %s: what the backend made of it is unknown: %s", request.log.id, error)
        finally:
            request.released.set()
            if request.ticket:
                request.ticket.release()

    async def _stop_generation(self, request: Request) -> None:
        """Cancel what the client no longer waits for.  Prefill that was done stays, so a retry goes on from there."""
        await asyncio.gather(*(part.released.wait() for part in request.branches))
        await self._cancel_restore(request)
        if not request.sent or (request.generation is not None and request.generation.is_over):
            return
        try:
            if not (self._can_finish_prefill(request) and await self._finish_prefill_detached(request)):
                self._notify_settled(
                    request, await self._upstream.cancel(request.log.id, self._watchdog.cancel_timeout_s)
                )
        finally:
            if request.generation:
                await request.generation.wait_ended(LAST_EVENT_TIMEOUT_S)

    def _can_finish_prefill(self, request: Request) -> bool:
        """Its client has left by itself, in the midst of a prefill."""
        has_left = request.log.outcome == CANCELLED and request.cancel_scope.reason is None
        return self._finish_prefill and has_left and request.generation is not None and not request.log.ttft_s

    async def _finish_prefill_detached(self, request: Request) -> bool:
        """Let an idle engine complete the prefill, for the client's next try to find or to join.

        False where the backend does not say that it will.
        """
        assert request.generation is not None
        request.is_detached = True
        try:
            self._notify_settled(
                request, await self._upstream.finish_prefill(request.log.id, self._watchdog.cancel_timeout_s)
            )
        except UpstreamError as error:
            log.warning("request %s: its prefill can't go on alone: %s", request.log.id, error)
            request.is_detached = False
            return False
        if request.ticket:
            request.ticket.release()
        await (
            request.generation.wait_ended()
        )  # however long that takes: an engine that hangs is ended, and the stream with it
        return True

    def _notify_settled(self, request: Request, settled: GenerationResult | None) -> None:
        if request.listener and settled:
            request.listener.on_settled(settled)

    async def _cancel_restore(self, request: Request) -> None:
        if not request.restore_task or request.restore_task.done():
            return
        await self._upstream.cancel(request.log.id, self._watchdog.cancel_timeout_s)
        await asyncio.wait({request.restore_task}, timeout=LAST_EVENT_TIMEOUT_S)
        request.restore_task.cancel()  # where the cancel overtook it
        await asyncio.wait({request.restore_task})
