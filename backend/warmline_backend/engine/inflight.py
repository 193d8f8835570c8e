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
from warmline_backend.generation.sequence import Ended, Event, Generation, Listener
from warmline_backend.kv_cache.segment_io import Cancelled
from warmline_common.protocol.messages import Settled, Timings

log = logging.getLogger(__name__)

SETTLED_KEPT_MAX = 256
EVENTS_WAITING_MAX = 100_000
UNREAD = f"more than {EVENTS_WAITING_MAX} events wait and nobody reads them"


class UnknownRequest(Exception):
    pass


@dataclass(eq=False)
class Call:
    """One generation as its handler has it.  `events` ends with `Ended`, which comes once and always."""

    id: str
    events: "asyncio.Queue[Event]" = field(default_factory=asyncio.Queue)
    background: bool = False
    submitted: bool = False  # the engine has it, or is about to
    cancelled: bool = False  # before that
    alone: bool = False  # it goes on without a client
    left: bool = False  # nobody reads its events any more
    unread: bool = False  # too many of them wait
    let_go: bool = False  # the engine was asked to end it
    over: bool = False


class Generations:
    """All calls under way, by request id, and how the last ones settled."""

    def __init__(self, engine: Engine, boot: str) -> None:
        self._engine, self._boot = engine, boot
        self._calls: dict[str, Call] = {}
        self._settled: OrderedDict[str, Settled] = OrderedDict()
        self._none = asyncio.Event()
        self._none.set()

    async def until_none(self) -> None:
        await self._none.wait()

    @property
    def under_way(self) -> list[str]:
        return list(self._calls)

    @contextmanager
    def accepted(self, request_id: str) -> Iterator[Call]:
        """From here on it can be cancelled; whoever leaves the block before its end lets go of it."""
        if (earlier := self._calls.get(request_id)) is not None:
            self._give_up(earlier)  # first, so that it is not the new one which that ends
        call = self._calls[request_id] = Call(request_id)
        self._settled.pop(request_id, None)
        self._none.clear()
        try:
            yield call
        finally:
            self._leave(call)

    def forget_settled(self) -> None:
        """How the last ones ended, with what they generated."""
        self._settled.clear()

    def listener(self, call: Call) -> Listener:
        """What the engine is to tell of this call; never blocks it, however far this loop lags."""
        loop = asyncio.get_running_loop()
        return lambda event: _call_soon(loop, lambda: self._hear(call, event))

    async def submit(self, call: Call, generation: Generation) -> None:
        """Hand a generation to the engine.  Raises Cancelled where that was asked for meanwhile."""
        if call.cancelled:
            raise Cancelled
        call.submitted, call.background = True, generation.background
        try:
            await asyncio.wrap_future(self._engine.ask(lambda scheduler: scheduler.submit(generation)))
        except Exception:
            self._forget(call)
            raise

    async def cancel(self, request_id: str) -> Settled:
        """End one, and answer when the engine has let go; one that has just ended is answered with how it did."""
        call = self._calls.get(request_id)
        if call is not None and not call.submitted:
            call.cancelled = True
            return self.nothing_kept(request_id, "cancelled")
        settled = await asyncio.wrap_future(self._engine.ask(lambda scheduler: scheduler.cancel(request_id)))
        settled = settled or self._settled.get(request_id)
        if settled is None:
            raise UnknownRequest(request_id)
        return settled

    async def finish_prefill(self, request_id: str) -> Settled | None:
        """Nobody waits for its answer any more: let it end with its prefill.  None: it goes on, alone.

        One that has no prefill worth finishing is cancelled, as `cancel` does.
        """
        call = self._calls.get(request_id)
        if call is None or not call.submitted:
            return await self.cancel(request_id)
        call.alone = True  # before the engine answers: the stream may be closed at any moment
        detached = False
        try:
            detached = await asyncio.wrap_future(self._engine.ask(lambda scheduler: scheduler.detach(request_id)))
            return None if detached else await self.cancel(request_id)
        finally:  # also where whoever asked has left before the engine has heard
            call.alone = detached
            if call.left:
                self._leave(call)

    def let_all_go(self) -> None:
        """Cancel all, without waiting."""
        for call in list(self._calls.values()):
            self._give_up(call)

    def let_background_go(self) -> None:
        """Cancel what nobody waits for, without waiting."""
        for call in list(self._calls.values()):
            if call.background:
                self._give_up(call)

    def end_all(self, reason: str) -> None:
        """The engine has ended: whoever still listens hears of it."""
        for call in list(self._calls.values()):
            self._hear(call, Ended(self.nothing_kept(call.id, "discarded", reason), 0))

    def nothing_kept(self, request_id: str, finish: str, error: str = "") -> Settled:
        """How something settles of which the engine holds nothing."""
        return Settled(
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

    def _hear(self, call: Call, event: Event) -> None:
        if call.over:
            return
        if isinstance(event, Ended):
            self._remember(event.settled)
            self._forget(call)
            if call.unread:
                settled = msgspec.structs.replace(event.settled, finish="error", error=UNREAD)
                event = replace(event, settled=settled)
        elif call.left or call.unread:
            return
        elif call.events.qsize() >= EVENTS_WAITING_MAX:
            log.error("request %s is cancelled: %s", call.id, UNREAD)
            call.unread = True
            self._let_go(call)
            return
        call.events.put_nowait(event)

    def _leave(self, call: Call) -> None:
        call.left = True
        if not call.submitted:
            self._forget(call)
        elif not (call.over or call.alone):
            self._let_go(call)

    def _give_up(self, call: Call) -> None:
        """Cancel without waiting, however far it has come."""
        if call.submitted:
            self._let_go(call)
        else:
            call.cancelled = True

    def _let_go(self, call: Call) -> None:
        """Have the engine cancel it, without waiting; it may never have got it, and then there is no end to hear of."""
        if call.let_go:
            return
        call.let_go, loop = True, asyncio.get_running_loop()
        letting_go = self._engine.ask(lambda scheduler: scheduler.cancel(call.id))
        letting_go.add_done_callback(lambda _: _call_soon(loop, lambda: self._forget(call)))

    def _forget(self, call: Call) -> None:
        call.over = True
        if self._calls.get(call.id) is call:
            del self._calls[call.id]
        if not self._calls:
            self._none.set()

    def _remember(self, settled: Settled) -> None:
        self._settled[settled.request_id] = settled
        while len(self._settled) > SETTLED_KEPT_MAX:
            self._settled.popitem(last=False)


def _call_soon(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(work)
    except RuntimeError:
        log.debug("the event loop has ended, nobody hears what the engine says")
