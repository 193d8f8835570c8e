"""Quiet: times without requests, in which audits and prewarming may compute, and the pauses between turns, which say
how long it takes until an audit may.

Event loop thread.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from warmline_proxy.request.registry import RequestRegistry
from warmline_proxy.request.request import Request
from warmline_proxy.upstream.watchdog import Watchdog

PAUSE_FACTOR = 2.0  # times the longest pause between two turns
QUIET_S_MAX = 3600.0  # after so long an audit may run whatever the pauses were
CONVERSATIONS_MAX = 1024
POLL_INTERVAL_S_MIN, POLL_INTERVAL_S_MAX = 0.1, 1.0

T = TypeVar("T")


@dataclass(eq=False)
class TurnPauses:
    """Longest pause between the end of a turn and the next one's arrival, by conversation; the last used are kept."""

    quiet_s_min: float  # 0: any instant without requests is quiet
    _turns: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict, init=False)  # last end, pause

    def record_turn(self, conversation: str, arrived_at: float, ended_at: float) -> None:
        """Record a turn; times are time.monotonic()."""
        last_end, longest = self._turns.pop(conversation, (arrived_at, 0.0))
        self._turns[conversation] = max(last_end, ended_at), max(longest, arrived_at - last_end)
        if len(self._turns) > CONVERSATIONS_MAX:
            self._turns.popitem(last=False)

    def required_quiet_s(self, conversation: str) -> float:
        """Quiet after which no next turn is expected any more, of this conversation or of the one that had the last."""
        if not self.quiet_s_min:
            return 0.0
        last = next(reversed(self._turns), conversation)
        longest = max(self._turns.get(each, (0.0, 0.0))[1] for each in (conversation, last))
        return min(max(self.quiet_s_min, PAUSE_FACTOR * longest), QUIET_S_MAX)

    def clear(self) -> None:
        self._turns.clear()


def name_conversation(request: Request) -> str:
    """Name of a request's conversation; its caller where it is not stored."""
    return request.log.session or request.log.session_hint or request.caller


@dataclass(frozen=True)
class QuietEngine:
    """The engine while no request is on its way.  `clock` and `sleep` as of time and asyncio."""

    registry: RequestRegistry
    watchdog: Watchdog
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    work_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # of all engines: one work at a time

    @property
    def quiet_s(self) -> float | None:
        """Time since the last request was answered and saved; None while one is on its way, or the backend is down."""
        is_busy = self.registry.has_foreground or not self.watchdog.is_up
        return None if is_busy else self.clock() - self.registry.emptied_at

    async def wait_for_quiet(self, required_s: Callable[[], float]) -> None:
        """Return once it has been quiet for as long as is required by then."""
        while (so_far := self.quiet_s) is None or so_far < required_s():
            left_s = 0.0 if so_far is None else required_s() - so_far
            await self.sleep(min(max(left_s, POLL_INTERVAL_S_MIN), POLL_INTERVAL_S_MAX))

    async def run(self, work: Coroutine[Any, Any, T], required_s: Callable[[], float]) -> T | None:
        """Run `work` once it has been quiet for as long as is required; None where a request's arrival has ended it."""
        try:
            while True:
                await self.wait_for_quiet(required_s)
                async with self.work_lock:
                    if (so_far := self.quiet_s) is not None and so_far >= required_s():
                        return await self._run_until_arrival(work)
        finally:
            work.close()  # does nothing once it has run

    async def _run_until_arrival(self, work: Coroutine[Any, Any, T]) -> T | None:
        running, arrival = asyncio.create_task(work), asyncio.create_task(self.registry.wait_for_arrival())
        try:
            await asyncio.wait({running, arrival}, return_when=asyncio.FIRST_COMPLETED)
            return running.result() if running.done() else None
        finally:
            for task in (running, arrival):
                task.cancel()
            await asyncio.gather(running, arrival, return_exceptions=True)
