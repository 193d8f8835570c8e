"""Backend state: its last status, the view of its residents, and suspect prefixes, refreshed on demand."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from warmline_common.protocol.messages import RESIDENT_IDS_MAX, BackendStatus, Reply, ResidentsReply
from warmline_common.protocol.tokens import TOKEN_BYTES, count_common_tokens
from warmline_proxy.estimate.costs import Costs
from warmline_proxy.estimate.estimator import DurationEstimator
from warmline_proxy.planner import ResidentCandidate
from warmline_proxy.upstream.client import Upstream
from warmline_proxy.upstream.resident_view import ResidentView

RATES_INTERVAL_S = 1.0
MEMORY_FILLING_SHARE = 0.5
RELEASE_INTERVAL_S = 0.05


@dataclass(eq=False)
class SuspectPrefix:
    """A prefix that an audit found wrong: stored tokens that share more than `trusted_tokens` of it are not used."""

    root: bytes
    tokens: bytes
    trusted_tokens: int = 0

    def matches(self, root: bytes, tokens: bytes) -> bool:
        return self.root == root and count_common_tokens(self.tokens, tokens) > self.trusted_tokens


def _split(names: Sequence[str], count: int) -> Iterator[Sequence[str]]:
    """Parts of at most `count` names."""
    return (names[start : start + count] for start in range(0, len(names), count))


class BackendState:
    """Backend status and residents.  Event loop thread; refreshes run one at a time."""

    def __init__(self, upstream: Upstream, estimator: DurationEstimator | None = None) -> None:
        self.resident_view, self.estimator = ResidentView(), estimator or DurationEstimator()
        self._upstream = upstream
        self._status: BackendStatus | None = None
        self._rates_read_at = 0.0  # time.monotonic()
        self._refresh_lock = asyncio.Lock()
        self._may_have_predecessor = True  # a proxy that died, and whose requests the backend still computes
        self._predecessor_lock = asyncio.Lock()
        self._suspects: set[SuspectPrefix] = set()
        self._suspect_changes = 0
        self.before_listing: Callable[[], Awaitable[None]] | None = None  # may raise UpstreamError

    async def status(self) -> BackendStatus:
        """Return the last status; fetch it if there is none yet, or the model was loading.  Raises UpstreamError."""
        if self._status is None or self._status.layout is None:
            async with self._refresh_lock:
                if self._status is None or self._status.layout is None:
                    return await self._refresh()
        return self._status

    @property
    def known_status(self) -> BackendStatus | None:
        """Last status; None before the first."""
        return self._status

    @property
    def model(self) -> str:
        """Name of the served model; "" before the first status."""
        return self._status.model if self._status else ""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the served model; "" before the first status."""
        return self._status.fingerprint if self._status else ""

    def costs(self) -> Costs:
        return self.estimator.costs

    @property
    def decode_tokens_per_s(self) -> float:
        """Measured decode rate; 0.0 before the first measurement."""
        return self._status.decode_tokens_per_s if self._status else 0.0

    async def sync_residents(self, reply: Reply) -> None:
        """Refresh the resident view if `reply` shows that it is stale.  Raises UpstreamError."""
        if not self.resident_view.is_stale(reply):
            return
        async with self._refresh_lock:  # many requests may notice a restart at once
            if reply.boot != self.resident_view.boot:
                await self._refresh()
            elif self.resident_view.is_stale(reply):
                ids_before = self.resident_view.ids()
                listing = await self._upstream.list_residents(since=self.resident_view.revision)
                if listing.boot == self.resident_view.boot:
                    self.resident_view.update(listing, ids_before)

    async def wait_for_predecessor_releases(self) -> None:
        """Wait, once after this proxy's start, until the backend has released the requests of a proxy that died.

        The backend cancels them with their connections; a step later their KV can be continued from.  Raises
        UpstreamError.
        """
        if not self._may_have_predecessor:
            return
        async with self._predecessor_lock:
            while self._may_have_predecessor:
                if (await self._upstream.fetch_status()).releasing:
                    await asyncio.sleep(RELEASE_INTERVAL_S)
                else:
                    await self.refresh()  # with the token ids of what was released since the first listing
                    self._may_have_predecessor = False

    async def refresh(self) -> None:
        """Fetch listing and status; entries that the backend still has are kept.  Raises UpstreamError."""
        async with self._refresh_lock:
            await self._refresh()

    async def _refresh(self) -> BackendStatus:
        if self.before_listing:
            await self.before_listing()
        ids_before = self.resident_view.ids()
        listing = await self._list_with_unknown_tokens()
        # The status last: after a backend restart in between, the view is stale, and is refreshed again.
        self._status = status = await self._upstream.fetch_status()
        self.estimator.update_status(status)
        self.resident_view.update(listing, ids_before)
        return status

    async def _list_with_unknown_tokens(self) -> ResidentsReply:
        """List all residents, with token ids where the view lacks them: they may be megabytes."""
        listing = await self._upstream.list_residents()
        view, is_same_boot = self.resident_view, listing.boot == self.resident_view.boot
        unknown_ids = [each.id for each in listing.residents if not is_same_boot or view.is_unknown(each)]
        tokens: dict[str, bytes | None] = {}
        for ids in _split(unknown_ids, RESIDENT_IDS_MAX):
            found = await self._upstream.list_residents(ids=ids)
            if found.boot == listing.boot:  # else the next reply says that the view is stale
                tokens.update((each.id, each.ids) for each in found.residents)
        for each in listing.residents:
            each.ids = tokens.get(each.id)
        return listing

    async def order_durable_residents(self, resident: str = "") -> None:
        """Have the backend drop durable residents first, and then this one.  Raises UpstreamError.

        It is told of each once.
        """
        names = self.resident_view.take_unordered_ids()
        try:
            await self._upstream.extend_eviction_order([*names, resident] if resident else names)
        except BaseException:
            self.resident_view.return_unordered_ids(names)
            raise

    def add_suspect(self, root: bytes, tokens: bytes) -> SuspectPrefix:
        """Exclude these tokens, on disk and in memory, from use until `remove_suspect`."""
        suspect = SuspectPrefix(root, tokens)
        self._suspects.add(suspect)
        self._suspect_changes += 1
        return suspect

    def remove_suspect(self, suspect: SuspectPrefix) -> None:
        self._suspects.discard(suspect)
        self._suspect_changes += 1

    @property
    def change_count(self) -> int:
        """Changes of residents and suspects: as long as it is equal, so are candidates and trusted tokens."""
        return self.resident_view.change_count + self._suspect_changes

    def count_trusted_tokens(self, root: bytes, prompt: bytes) -> int:
        """Count the prompt's tokens that may be reused."""
        trusted = (each.trusted_tokens for each in self._suspects if each.matches(root, prompt))
        return min(trusted, default=len(prompt) // TOKEN_BYTES)

    def candidates(self, root: bytes, prompt: bytes) -> list[ResidentCandidate]:
        """List the residents that a request may start from."""
        return self.resident_view.candidates(root, prompt, self.count_trusted_tokens(root, prompt))

    def is_memory_filling(self) -> bool:
        """Say whether the backend may soon have to drop residents."""
        if (status := self._status) is None:
            return False
        return status.resident_bytes + status.running_bytes > MEMORY_FILLING_SHARE * status.memory_budget_bytes

    async def refresh_rates(self) -> None:
        """Fetch the backend's measured rates, at most once in RATES_INTERVAL_S.  Raises UpstreamError."""
        if time.monotonic() - self._rates_read_at < RATES_INTERVAL_S:
            return
        self._rates_read_at = time.monotonic()
        status = await self._upstream.fetch_status()
        if self._status is None or status.boot == self._status.boot:
            self._status = status
            self.estimator.update_status(status)
