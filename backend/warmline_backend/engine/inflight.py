"""Generations under way, from the moment their call is accepted to the last event.  Event loop thread.

    UnknownRequest    none of that id is, or lately was, under way

What the engine raises (ResidentGone, ResidentMismatch, TooLarge, EngineStopped) passes through.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import msgspec

from warmline_backend.engine.engine import Engine
from warmline_backend.generation.events import EndedEvent, EventListener, GenerationEvent
from warmline_backend.generation.sequence import GenerationRequest
from warmline_backend.kv_cache.segment_io import OperationCancelledError
from warmline_common.protocol.messages import GenerationResult, Timings

log = logging.getLogger(__name__)

RESULTS_MAX = 256
EVENTS_QUEUED_MAX = 100_000
EVENTS_OVERFLOW = f"more than {EVENTS_QUEUED_MAX} events wait and nobody reads them"


class UnknownGenerationError(Exception):
    pass


@dataclass(eq=False)
class InflightGeneration:
    """One generation as its handler has it.  `events` ends with `Ended`, which comes once and always."""

    id: str
    events: "asyncio.Queue[GenerationEvent]" = field(default_factory=asyncio.Queue)
    background: bool = False
    submitted: bool = False  # the engine has it, or is about to
    cancelled: bool = False  # before that
    detached: bool = False  # it goes on without a client
    abandoned: bool = False  # nobody reads its events any more
    overflowed: bool = False  # too many of them wait
    cancel_sent: bool = False  # the engine was asked to end it
    done: bool = False


class InflightGenerations:
    """All calls under way, by request id, and how the last ones settled."""

    def __init__(self, engine: Engine, boot: str) -> None:
        self._engine, self._boot = engine, boot
        self._by_id: dict[str, InflightGeneration] = {}
        self._results: OrderedDict[str, GenerationResult] = OrderedDict()
        self._empty = asyncio.Event()
        self._empty.set()

    async def wait_until_empty(self) -> None:
        await self._empty.wait()

    @property
    def request_ids(self) -> list[str]:
        return list(self._by_id)

    @contextmanager
    def accept(self, request_id: str) -> Iterator[InflightGeneration]:
        """From here on it can be cancelled; whoever leaves the block before its end lets go of it."""
        if (earlier := self._by_id.get(request_id)) is not None:
            self._cancel_nowait(earlier)  # first, so that it is not the new one which that ends
        call = self._by_id[request_id] = InflightGeneration(request_id)
        self._results.pop(request_id, None)
        self._empty.clear()
        try:
            yield call
        finally:
            self._abandon(call)

    def clear_results(self) -> None:
        """How the last ones ended, with what they generated."""
        self._results.clear()

    def make_listener(self, inflight: InflightGeneration) -> EventListener:
        """What the engine is to tell of this call; never blocks it, however far this loop lags."""
        loop = asyncio.get_running_loop()
        return lambda event: _call_soon(loop, lambda: self._handle_event(inflight, event))

    async def submit(self, inflight: InflightGeneration, request: GenerationRequest) -> None:
        """Hand a generation to the engine.  Raises Cancelled where that was asked for meanwhile."""
        if inflight.cancelled:
            raise OperationCancelledError
        inflight.submitted, inflight.background = True, request.background
        try:
            await asyncio.wrap_future(self._engine.submit(lambda scheduler: scheduler.submit(request)))
        except Exception:
            self._remove(inflight)
            raise

    async def cancel(self, request_id: str) -> GenerationResult:
        """End one, and answer when the engine has let go; one that has just ended is answered with how it did."""
        call = self._by_id.get(request_id)
        if call is not None and not call.submitted:
            call.cancelled = True
            return self.make_empty_result(request_id, "cancelled")
        settled = await asyncio.wrap_future(self._engine.submit(lambda scheduler: scheduler.cancel(request_id)))
        settled = settled or self._results.get(request_id)
        if settled is None:
            raise UnknownGenerationError(request_id)
        return settled

    async def finish_prefill(self, request_id: str) -> GenerationResult | None:
        """Nobody waits for its answer any more: let it end with its prefill.  None: it goes on, alone.

        One that has no prefill worth finishing is cancelled, as `cancel` does.
        """
        call = self._by_id.get(request_id)
        if call is None or not call.submitted:
            return await self.cancel(request_id)
        call.detached = True  # before the engine answers: the stream may be closed at any moment
        detached = False
        try:
            detached = await asyncio.wrap_future(self._engine.submit(lambda scheduler: scheduler.detach(request_id)))
            return None if detached else await self.cancel(request_id)
        finally:  # also where whoever asked has left before the engine has heard
            call.detached = detached
            if call.abandoned:
                self._abandon(call)

    def cancel_all(self) -> None:
        """Cancel all, without waiting."""
        for call in list(self._by_id.values()):
            self._cancel_nowait(call)

    def cancel_background(self) -> None:
        """Cancel what nobody waits for, without waiting."""
        for call in list(self._by_id.values()):
            if call.background:
                self._cancel_nowait(call)

    def end_all(self, reason: str) -> None:
        """The engine has ended: whoever still listens hears of it."""
        for call in list(self._by_id.values()):
            self._handle_event(call, EndedEvent(self.make_empty_result(call.id, "discarded", reason), 0))

    def make_empty_result(self, request_id: str, finish: str, error: str = "") -> GenerationResult:
        """How something settles of which the engine holds nothing."""
        return GenerationResult(
            boot=self._boot,
            generation=self._engine.snapshot.generation,
            request_id=request_id,
            finish=finish,
            resident="",
            generated=b"",
            prefilled_until=0,
            checkpoints=[],
            positions=[],
            timings=Timings(),
            error=error,
        )

    def _handle_event(self, inflight: InflightGeneration, event: GenerationEvent) -> None:
        if inflight.done:
            return
        if isinstance(event, EndedEvent):
            self._record_result(event.result)
            self._remove(inflight)
            if inflight.overflowed:
                settled = msgspec.structs.replace(event.result, finish="error", error=EVENTS_OVERFLOW)
                event = replace(event, result=settled)
        elif inflight.abandoned or inflight.overflowed:
            return
        elif inflight.events.qsize() >= EVENTS_QUEUED_MAX:
            log.error("request %s is cancelled: %s", inflight.id, EVENTS_OVERFLOW)
            inflight.overflowed = True
            self._cancel_on_engine(inflight)
            return
        inflight.events.put_nowait(event)

    def _abandon(self, inflight: InflightGeneration) -> None:
        inflight.abandoned = True
        if not inflight.submitted:
            self._remove(inflight)
        elif not (inflight.done or inflight.detached):
            self._cancel_on_engine(inflight)

    def _cancel_nowait(self, inflight: InflightGeneration) -> None:
        """Cancel without waiting, however far it has come."""
        if inflight.submitted:
            self._cancel_on_engine(inflight)
        else:
            inflight.cancelled = True

    def _cancel_on_engine(self, inflight: InflightGeneration) -> None:
        """Have the engine cancel it, without waiting; it may never have got it, and then there is no end to hear of."""
        if inflight.cancel_sent:
            return
        inflight.cancel_sent, loop = True, asyncio.get_running_loop()
        letting_go = self._engine.submit(lambda scheduler: scheduler.cancel(inflight.id))
        letting_go.add_done_callback(lambda _: _call_soon(loop, lambda: self._remove(inflight)))

    def _remove(self, inflight: InflightGeneration) -> None:
        inflight.done = True
        if self._by_id.get(inflight.id) is inflight:
            del self._by_id[inflight.id]
        if not self._by_id:
            self._empty.set()

    def _record_result(self, result: GenerationResult) -> None:
        self._results[result.request_id] = result
        while len(self._results) > RESULTS_MAX:
            self._results.popitem(last=False)


def _call_soon(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(work)
    except RuntimeError:
        log.debug("the event loop has ended, nobody hears what the engine says")
