"""Keeps the mirror and the backend's status fresh: the acting half of `mirror.py`."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from warmline_common.protocol.messages import Reply, Status
from warmline_common.protocol.tokens import TOKEN_BYTES, common_prefix
from warmline_proxy.planner import Candidate, Costs
from warmline_proxy.upstream.client import Upstream
from warmline_proxy.upstream.resident_view import Mirror

MEASURE_INTERVAL_S = 1.0
MEMORY_FILLING_SHARE = 0.5


@dataclass(eq=False)
class Suspicion:
    """Something that begins with these tokens is wrong: it shares more than the first `good` of them."""

    root: bytes
    tokens: bytes
    good: int = 0


class Knowledge:
    """What is known of the backend.  Refreshes are made one at a time; the rest reads."""

    def __init__(self, upstream: Upstream) -> None:
        self.mirror = Mirror()
        self._upstream = upstream
        self._status: Status | None = None
        self._measured_at = 0.0  # time.monotonic()
        self._refreshing = asyncio.Lock()
        self._suspicions: set[Suspicion] = set()
        self.before_listing: Callable[[], Awaitable[None]] | None = None  # may raise UpstreamError

    async def status(self) -> Status:
        """The last status; asked for where there is none, or one of a model that was still loading.

        Raises UpstreamError.
        """
        if (known := self._loaded()) is not None:
            return known
        async with self._refreshing:
            return self._loaded() or await self._refresh()

    def _loaded(self) -> Status | None:
        return self._status if self._status and self._status.layout else None

    @property
    def model(self) -> str:
        """The served one's name, as last told; "" until it was."""
        return self._status.model if self._status else ""

    @property
    def fingerprint(self) -> str:
        """The same of its fingerprint."""
        return self._status.fingerprint if self._status else ""

    def costs(self) -> Costs:
        if self._status is None:
            return Costs()
        return Costs(self._status.prefill_rates, self._status.restore_bytes_per_s)

    @property
    def decode_tokens_per_s(self) -> float:
        """0.0 until the backend has measured."""
        return self._status.decode_tokens_per_s if self._status else 0.0

    async def catch_up(self, reply: Reply) -> None:
        """Make the mirror agree with a backend that has moved on since it last looked.  Raises UpstreamError."""
        if not self.mirror.is_behind(reply):
            return
        async with self._refreshing:  # many requests may notice a restart at once
            if reply.boot != self.mirror.boot:
                await self._refresh()
            elif self.mirror.is_behind(reply):
                await self._prune()

    async def refresh(self) -> None:
        """Ask for everything; what the mirror knew and the backend still has is kept.  Raises UpstreamError."""
        async with self._refreshing:
            await self._refresh()

    async def _refresh(self) -> Status:
        if self.before_listing:
            await self.before_listing()
        known = self.mirror.ids()
        listing = await self._upstream.residents(ids=True)
        # The status last: where the backend restarts in between, the mirror is behind, and asks again.
        self._status = status = await self._upstream.status()
        self.mirror.note(listing)
        self.mirror.keep_only(listing.residents, known)
        self.mirror.add_listed(listing.residents)
        return status

    async def _prune(self) -> None:
        known = self.mirror.ids()
        listing = await self._upstream.residents(ids=False)  # without ids it is cheap
        if listing.boot == self.mirror.boot:
            self.mirror.note(listing)
            self.mirror.keep_only(listing.residents, known)

    def suspect(self, root: bytes, tokens: bytes) -> Suspicion:
        """Nothing that begins like these is to be used, on disk or in memory, until it is `cleared`."""
        suspicion = Suspicion(root, tokens)
        self._suspicions.add(suspicion)
        return suspicion

    def cleared(self, suspicion: Suspicion) -> None:
        self._suspicions.discard(suspicion)

    def trusted(self, root: bytes, prompt: bytes) -> int:
        """How many of the prompt's tokens may be taken from what is stored."""
        goods = (
            each.good
            for each in self._suspicions
            if each.root == root and common_prefix(each.tokens, prompt) > each.good
        )
        return min(goods, default=len(prompt) // TOKEN_BYTES)

    def candidates(self, root: bytes, prompt: bytes) -> list[Candidate]:
        """The residents that may be started from."""
        trusted = self.trusted(root, prompt)
        return [each for each in self.mirror.candidates(root, prompt) if each.common <= trusted]

    def memory_is_filling(self) -> bool:
        """Whether the backend may soon have to give residents up."""
        status = self._status
        return status is not None and (
            status.resident_bytes + status.running_bytes > MEMORY_FILLING_SHARE * status.memory_budget_bytes
        )

    async def measure(self) -> None:
        """Take over the rates that the backend has measured since; once a second is enough."""
        if time.monotonic() - self._measured_at < MEASURE_INTERVAL_S:
            return
        self._measured_at = time.monotonic()
        status = await self._upstream.status()
        if self._status is None or status.boot == self._status.boot:
            self._status = status
