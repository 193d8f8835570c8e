"""Keeps the mirror and the backend's status fresh: the acting half of `mirror.py`."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from warmline_common.protocol.messages import BackendStatus, Reply
from warmline_common.protocol.tokens import TOKEN_BYTES, count_common_tokens
from warmline_proxy.planner import Costs, ResidentCandidate
from warmline_proxy.upstream.client import Upstream
from warmline_proxy.upstream.resident_view import ResidentView

RATES_INTERVAL_S = 1.0
MEMORY_FILLING_SHARE = 0.5


@dataclass(eq=False)
class SuspectPrefix:
    """Something that begins with these tokens is wrong: it shares more than the first `good` of them."""

    root: bytes
    tokens: bytes
    trusted_tokens: int = 0


class BackendState:
    """What is known of the backend.  Refreshes are made one at a time; the rest reads."""

    def __init__(self, upstream: Upstream) -> None:
        self.resident_view = ResidentView()
        self._upstream = upstream
        self._status: BackendStatus | None = None
        self._rates_read_at = 0.0  # time.monotonic()
        self._refresh_lock = asyncio.Lock()
        self._suspects: set[SuspectPrefix] = set()
        self.before_listing: Callable[[], Awaitable[None]] | None = None  # may raise UpstreamError

    async def status(self) -> BackendStatus:
        """The last status; asked for where there is none, or one of a model that was still loading.

        Raises UpstreamError.
        """
        if (known := self._loaded_status()) is not None:
            return known
        async with self._refresh_lock:
            return self._loaded_status() or await self._refresh()

    def _loaded_status(self) -> BackendStatus | None:
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

    async def sync_residents(self, reply: Reply) -> None:
        """Make the mirror agree with a backend that has moved on since it last looked.  Raises UpstreamError."""
        if not self.resident_view.is_stale(reply):
            return
        async with self._refresh_lock:  # many requests may notice a restart at once
            if reply.boot != self.resident_view.boot:
                await self._refresh()
            elif self.resident_view.is_stale(reply):
                await self._prune_residents()

    async def refresh(self) -> None:
        """Ask for everything; what the mirror knew and the backend still has is kept.  Raises UpstreamError."""
        async with self._refresh_lock:
            await self._refresh()

    async def _refresh(self) -> BackendStatus:
        if self.before_listing:
            await self.before_listing()
        known = self.resident_view.ids()
        listing = await self._upstream.list_residents(ids=True)
        # The status last: where the backend restarts in between, the mirror is behind, and asks again.
        self._status = status = await self._upstream.fetch_status()
        self.resident_view.update_generation(listing)
        self.resident_view.prune(listing.residents, known)
        self.resident_view.add_listed(listing.residents)
        return status

    async def _prune_residents(self) -> None:
        known = self.resident_view.ids()
        listing = await self._upstream.list_residents(ids=False)  # without ids it is cheap
        if listing.boot == self.resident_view.boot:
            self.resident_view.update_generation(listing)
            self.resident_view.prune(listing.residents, known)

    def add_suspect(self, root: bytes, tokens: bytes) -> SuspectPrefix:
        """Nothing that begins like these is to be used, on disk or in memory, until it is `cleared`."""
        suspect = SuspectPrefix(root, tokens)
        self._suspects.add(suspect)
        return suspect

    def remove_suspect(self, suspect: SuspectPrefix) -> None:
        self._suspects.discard(suspect)

    def count_trusted_tokens(self, root: bytes, prompt: bytes) -> int:
        """How many of the prompt's tokens may be taken from what is stored."""
        goods = (
            each.trusted_tokens
            for each in self._suspects
            if each.root == root and count_common_tokens(each.tokens, prompt) > each.trusted_tokens
        )
        return min(goods, default=len(prompt) // TOKEN_BYTES)

    def candidates(self, root: bytes, prompt: bytes) -> list[ResidentCandidate]:
        """The residents that may be started from."""
        trusted = self.count_trusted_tokens(root, prompt)
        return [each for each in self.resident_view.candidates(root, prompt) if each.common_tokens <= trusted]

    def is_memory_filling(self) -> bool:
        """Whether the backend may soon have to give residents up."""
        status = self._status
        return status is not None and (
            status.resident_bytes + status.running_bytes > MEMORY_FILLING_SHARE * status.memory_budget_bytes
        )

    async def refresh_rates(self) -> None:
        """Take over the rates that the backend has measured since; once a second is enough."""
        if time.monotonic() - self._rates_read_at < RATES_INTERVAL_S:
            return
        self._rates_read_at = time.monotonic()
        status = await self._upstream.fetch_status()
        if self._status is None or status.boot == self._status.boot:
            self._status = status
