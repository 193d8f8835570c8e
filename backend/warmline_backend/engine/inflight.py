"""Generations in flight, from the acceptance of their call to the last event.  Event loop thread.

Errors of the engine (ResidentNotFoundError, ResidentMismatchError, KvTooLargeError, EngineStoppedError) pass through.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import msgspec

from warmline_backend.engine.engine import Engine
from warmline_backend.generation.events import EndedEvent, EventListener, GenerationEvent
from warmline_backend.generation.sequence import GenerationRequest
from warmline_backend.kv_cache.segment_io import OperationCancelledError
from warmline_common.protocol.messages import GenerationResult, Timings

log = logging.getLogger(__name__)

RESULTS_MAX = 256
EVENTS_QUEUED_MAX = 100_000
LEADER_TIMEOUT_S = 5.0  # for a leader that was sent before its follower, and may be overtaken on the way
EVENTS_OVERFLOW = f"more than {EVENTS_QUEUED_MAX} events wait without a reader"


class UnknownGenerationError(Exception):
    """No generation of that id is, or was lately, in flight."""


class Stage(Enum):
    """Stage of a generation in flight; CANCELLED means before it was submitted."""

    ACCEPTED = auto()
    CANCELLED = auto()
    SUBMITTED = auto()
    DONE = auto()


@dataclass(eq=False)
class InflightGeneration:
    """One generation as its handler has it.  `events` ends with one EndedEvent, always."""

    id: str
    events: "asyncio.Queue[GenerationEvent]" = field(default_factory=asyncio.Queue)
    stage: Stage = Stage.ACCEPTED
    background: bool = False
    detached: bool = False  # it goes on without a client
    abandoned: bool = False  # its events are read no more
    overflowed: bool = False  # too many events are queued
    cancel_sent: bool = False  # the engine was asked to cancel it
    submitted: asyncio.Event = field(default_factory=asyncio.Event)  # the engine was asked for it, or never will be


class InflightGenerations:
    """All generations in flight by request id, and the results of the last ones."""

    def __init__(self, engine: Engine, boot: str) -> None:
        self._engine, self._boot = engine, boot
        self._by_id: dict[str, InflightGeneration] = {}
        self._results: OrderedDict[str, GenerationResult] = OrderedDict()
        self._empty = asyncio.Event()
        self._empty.set()
        self._arrival = asyncio.Event()  # replaced at each

    async def wait_until_empty(self) -> None:
        await self._empty.wait()

    @property
    def request_ids(self) -> list[str]:
        return list(self._by_id)

    @property
    def releasing_count(self) -> int:
        """Generations whose events are read no more, and whose end the engine has not reached."""
        return sum(inflight.abandoned and not inflight.detached for inflight in self._by_id.values())

    @contextmanager
    def accept(self, request_id: str) -> Iterator[InflightGeneration]:
        """Make a generation cancellable; leaving the block before its end cancels it."""
        if (earlier := self._by_id.get(request_id)) is not None:
            self._cancel_nowait(earlier)  # first, so that the cancel does not hit the new one
        inflight = self._by_id[request_id] = InflightGeneration(request_id)
        self._results.pop(request_id, None)
        self._empty.clear()
        self._arrival.set()
        self._arrival = asyncio.Event()
        try:
            yield inflight
        finally:
            self._abandon(inflight)

    def clear_results(self) -> None:
        """Drop the results of the last generations, with their tokens."""
        self._results.clear()

    def make_listener(self, inflight: InflightGeneration) -> EventListener:
        """Make a listener that queues events on this loop without blocking the engine."""
        loop = asyncio.get_running_loop()
        return lambda event: _call_soon(loop, lambda: self._handle_event(inflight, event))

    async def wait_until_submitted(self, request_id: str) -> None:
        """Wait until the engine was asked for a generation, or it has ended; for a while also until it arrives.

        A follower that is submitted after that finds its leader, however long the engine's present step is.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(LEADER_TIMEOUT_S):
                while request_id not in self._by_id and request_id not in self._results:
                    await self._arrival.wait()
                if (inflight := self._by_id.get(request_id)) is not None:
                    await inflight.submitted.wait()

    async def submit(self, inflight: InflightGeneration, request: GenerationRequest) -> None:
        """Submit a generation to the engine.  Raises OperationCancelledError if it was cancelled meanwhile."""
        if inflight.stage is Stage.CANCELLED:
            raise OperationCancelledError
        inflight.stage, inflight.background = Stage.SUBMITTED, request.background
        try:
            submitting = self._engine.submit(lambda scheduler: scheduler.submit(request))
            inflight.submitted.set()
            await asyncio.wrap_future(submitting)
        except Exception:
            self._remove(inflight)
            raise

    async def cancel(self, request_id: str) -> GenerationResult:
        """End a generation and return its result once it has ended, also where it ended by itself just before."""
        inflight = self._by_id.get(request_id)
        if inflight is not None and inflight.stage is not Stage.SUBMITTED:
            inflight.stage = Stage.CANCELLED
            return self.make_empty_result(request_id, "cancelled")
        result = await asyncio.wrap_future(self._engine.submit(lambda scheduler: scheduler.cancel(request_id)))
        if (result := result or self._results.get(request_id)) is None:
            raise UnknownGenerationError(request_id)
        return result

    async def finish_prefill(self, request_id: str) -> GenerationResult | None:
        """Let a generation whose client has left end with its prefill.  None: it goes on, alone.

        Without a prefill worth finishing it is cancelled, as by `cancel`.
        """
        inflight = self._by_id.get(request_id)
        if inflight is None or inflight.stage is not Stage.SUBMITTED:
            return await self.cancel(request_id)
        inflight.detached = True  # before the engine answers: the stream may be closed at any moment
        detached = False
        try:
            detached = await asyncio.wrap_future(self._engine.submit(lambda scheduler: scheduler.detach(request_id)))
            return None if detached else await self.cancel(request_id)
        finally:  # also where the caller was cancelled before the engine's answer
            inflight.detached = detached
            if inflight.abandoned:
                self._abandon(inflight)

    def cancel_all(self, *, only_background: bool = False) -> None:
        """Cancel all generations, or the background ones, without waiting."""
        for inflight in list(self._by_id.values()):
            if inflight.background or not only_background:
                self._cancel_nowait(inflight)

    def end_all(self, reason: str) -> None:
        """Send an end event to all, after the engine has ended."""
        for inflight in list(self._by_id.values()):
            self._handle_event(inflight, EndedEvent(self.make_empty_result(inflight.id, "discarded", reason), 0))

    def make_empty_result(self, request_id: str, finish: str, error: str = "") -> GenerationResult:
        """Make the result of a generation of which the engine holds nothing."""
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
        if inflight.stage is Stage.DONE:
            return
        if isinstance(event, EndedEvent):
            self._results[event.result.request_id] = event.result
            if len(self._results) > RESULTS_MAX:
                self._results.popitem(last=False)
            self._remove(inflight)
            if inflight.overflowed:
                result = msgspec.structs.replace(event.result, finish="error", error=EVENTS_OVERFLOW)
                event = replace(event, result=result)
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
        if inflight.stage is not Stage.SUBMITTED:
            self._remove(inflight)
        elif not inflight.detached:
            self._cancel_on_engine(inflight)

    def _cancel_nowait(self, inflight: InflightGeneration) -> None:
        if inflight.stage is Stage.SUBMITTED:
            self._cancel_on_engine(inflight)
        else:
            inflight.stage = Stage.CANCELLED

    def _cancel_on_engine(self, inflight: InflightGeneration) -> None:
        """Have the engine cancel it, without waiting; if the engine never got it, no end event will come."""
        if inflight.cancel_sent:
            return
        inflight.cancel_sent, loop = True, asyncio.get_running_loop()
        cancelling = self._engine.submit(lambda scheduler: scheduler.cancel(inflight.id))
        cancelling.add_done_callback(lambda _: _call_soon(loop, lambda: self._remove(inflight)))

    def _remove(self, inflight: InflightGeneration) -> None:
        inflight.stage = Stage.DONE
        inflight.submitted.set()
        if self._by_id.get(inflight.id) is inflight:
            del self._by_id[inflight.id]
        if not self._by_id:
            self._empty.set()


def _call_soon(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(work)
    except RuntimeError:
        log.debug("the event loop has ended, events of the engine are dropped")
