"""Steps 7 and 8: release of engine and ticket, save, record; and the drain at a shutdown."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from warmline_common.protocol.messages import GenerationResult
from warmline_proxy.errors import ClientError, request_cancelled, service_unavailable
from warmline_proxy.pipeline.saver import Saver
from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.request.request import Request
from warmline_proxy.request_log import CANCELLED
from warmline_proxy.tasks import BackgroundTasks, wait_for_events
from warmline_proxy.upstream.client import UpstreamError, UpstreamTimeoutError

log = logging.getLogger(__name__)

LAST_EVENT_TIMEOUT_S = 10.0  # from the engine's release to the end of the stream
ERROR_DELIVERY_TIMEOUT_S = 4.0  # for errors to reach clients at a shutdown
SAVES_TIMEOUT_S = 8.0  # at a shutdown; later saves are lost, their tokens prefilled again


@dataclass(eq=False)
class Completion:
    """Ends requests, by themselves or on demand.  Owned by the event loop."""

    registry: RequestRegistry
    saver: Saver
    on_completed: Sequence[Callable[[Request], None]]  # for a client's admitted request, once it is saved and recorded
    background: BackgroundTasks
    finish_prefill: bool

    def release(self, request: Request) -> None:
        """Start to release the engine, before the client has its error."""
        if request.release_task is None:
            request.release_task = self.background.spawn(self._release_engine(request), f"end of {request.log.id}")

    def complete(self, request: Request) -> None:
        """End a request whose client has its answer, or has left: release, save and record in the background."""
        request.response.close()
        request.mark_response_done()
        self.release(request)
        self.background.spawn(self._finish(request), f"saving of {request.log.id}")

    async def cancel(self, request: Request) -> None:
        """Cancel a request; returns when the engine has released it."""
        await self._cancel(request, request_cancelled("The request was cancelled by DELETE."))
        await request.released.wait()

    async def drain(self, timeout_s: float) -> None:
        """Let requests finish for `timeout_s`, cancel the rest, and wait until all is on disk."""
        await self._wait_for_responses(timeout_s)
        reason = service_unavailable("The proxy is being stopped.  What was computed is kept.", "shutting_down")
        with suppress(TimeoutError):
            async with asyncio.timeout(ERROR_DELIVERY_TIMEOUT_S):
                await asyncio.gather(*(self._cancel(request, reason) for request in self.registry))
                await self._wait_for_responses(ERROR_DELIVERY_TIMEOUT_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(SAVES_TIMEOUT_S):
                await asyncio.gather(*(request.saved.wait() for request in self.registry))
                await self.saver.save_all_residents()

    async def _cancel(self, request: Request, reason: ClientError) -> None:
        request.cancel(reason)
        if request.is_detached:
            with suppress(UpstreamError):
                await request.backend.cancel(request.log.id)

    async def _wait_for_responses(self, timeout_s: float) -> None:
        await wait_for_events([request.response_done for request in self.registry], timeout_s)

    async def _finish(self, request: Request) -> None:
        try:
            assert request.release_task is not None
            await request.release_task
            self.registry.mark_settling(request)
            if request.is_admitted:  # refused requests are not recorded: a flood of them would evict all other records
                await self.saver.save_request(request)
                for on_completed in self.on_completed if not request.is_background else ():
                    on_completed(request)
        finally:
            request.saved.set()
            self.registry.discard(request)
            if request.assigned_backend:
                request.assigned_backend.gate.leave(request)

    async def _release_engine(self, request: Request) -> None:
        """End the generation, and release the ticket."""
        try:
            await self._stop_generation(request)
        except UpstreamTimeoutError:
            request.backend.watchdog.report_cancel_timeout(request.log.id)
        except UpstreamError as error:
            log.warning("request %s: its result is unknown: %s", request.log.id, error)
        finally:
            request.mark_released()
            if request.ticket:
                request.ticket.release()

    async def _stop_generation(self, request: Request) -> None:
        """Cancel restore and generation, where they still run; prefilled rows stay for a retry."""
        await asyncio.gather(*(branch.released.wait() for branch in request.branches))
        if request.restore_task and not request.restore_task.done():
            await request.backend.cancel(request.log.id)
            await asyncio.wait({request.restore_task}, timeout=LAST_EVENT_TIMEOUT_S)
            request.restore_task.cancel()  # in case the cancel overtook the restore
            await asyncio.wait({request.restore_task})
        if not request.sent or (request.generation is not None and request.generation.is_over):
            return
        try:
            if not (self._can_finish_prefill(request) and await self._finish_prefill_detached(request)):
                self._record_result(request, await request.backend.cancel(request.log.id))
        finally:
            if request.generation:
                await request.generation.wait_ended(LAST_EVENT_TIMEOUT_S)

    def _can_finish_prefill(self, request: Request) -> bool:
        """True if the client left by itself during prefill, and that is to be finished."""
        has_left = request.log.outcome == CANCELLED and request.cancel_scope.reason is None
        return (
            self.finish_prefill
            and not request.is_background
            and has_left
            and request.generation is not None
            and not request.log.ttft_s
        )

    async def _finish_prefill_detached(self, request: Request) -> bool:
        """Let an idle engine complete the prefill, for the client's next try; False where the backend refuses."""
        assert request.generation is not None
        request.is_detached = True
        try:
            result = await request.backend.upstream.finish_prefill(
                request.log.id, request.backend.watchdog.cancel_timeout_s
            )
            self._record_result(request, result)
        except UpstreamError as error:
            log.warning("request %s: its prefill can't go on alone: %s", request.log.id, error)
            request.is_detached = False
            return False
        if request.ticket:
            request.ticket.release()
        await request.generation.wait_ended()  # without a limit: the watchdog ends an engine that hangs
        return True

    def _record_result(self, request: Request, result: GenerationResult | None) -> None:
        if request.listener and result:
            request.listener.on_result(result)
