"""Finds where what is stored along a prompt goes wrong: starts from ever other places of it, and compares with cold."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from warmline_common.protocol.messages import FirstLogits, KvLayout, SegmentRef
from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_proxy.audit.comparison import compare
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.planner import RequestPlan, plan_restores
from warmline_proxy.store.rows import PrefixMatch
from warmline_proxy.upstream.backend_state import SuspectPrefix
from warmline_proxy.upstream.client import UpstreamError
from warmline_proxy.upstream.first_token_probe import FirstTokenProbe, ModelChangedError

log = logging.getLogger(__name__)

SEARCH_TIMEOUT_S = 600.0  # meanwhile, whoever shares the prompt's beginning computes it again
TRIES_MAX = 3  # as in an audit: each is given up where others want the memory
TRY_INTERVAL_S = 1.0


@dataclass(frozen=True)
class AuditMismatch:
    """A prompt whose first token came from something else than in a cold run, after a start from `reuse` tokens."""

    root: bytes
    tokens: bytes
    reuse: int
    cold: FirstLogits
    layout: KvLayout
    tolerance: float  # what differs by no more agrees; in exact mode only what is equal does
    started_at: float  # time.monotonic() by which it had started


class Bisector:
    """By bisection.  Every place is judged by the same first token, which was seen to come out wrong: the rest of the
    prompt is computed, so a place agrees with a cold run where all that it starts from is right.
    """

    def __init__(self, index: Index, recomputer: FirstTokenProbe) -> None:
        self._index, self._recomputer = index, recomputer

    async def narrow_suspicion(self, case: AuditMismatch, suspicion: SuspectPrefix) -> None:
        """Raise `suspicion.good` to the last place from which a start agrees, where one from the next place differs.

        It stays 0 where what is stored does not differ: then it was something in memory, and nobody knows what came of
        that.  Where the backend fails, or time is over, it stays where it has come to.
        """
        try:
            async with asyncio.timeout(SEARCH_TIMEOUT_S):
                await self._narrow_suspicion(case, suspicion)
        except (TimeoutError, _ProbeFailedError, ModelChangedError, UpstreamError, IndexStoreError) as error:
            log.warning("where it goes wrong is not known any better: %s", error or "it took too long")

    async def _narrow_suspicion(self, case: AuditMismatch, suspicion: SuspectPrefix) -> None:
        # No further than the start that differed: what lies behind that was computed from it.
        match = await self._match(case, case.tokens[: case.reuse * TOKEN_BYTES])
        places = plan_restores(match, case.layout)
        if not places or not await self._has_mismatch(case, places[-1]):
            return
        low, high = 0, len(places) - 1  # the place `high` differs, and the one before `low` does not
        while low < high:
            middle = (low + high) // 2
            if await self._has_mismatch(case, places[middle]):
                high = middle
            else:
                low, suspicion.trusted_tokens = middle + 1, places[middle].reuse
        between = [link for link in match.chain if suspicion.trusted_tokens < link.upto < places[high].reuse]
        for link in reversed(between):
            if await self._is_segment_good(case, link):
                suspicion.trusted_tokens = link.upto
                return

    async def _has_mismatch(self, case: AuditMismatch, place: RequestPlan) -> bool:
        warm = await self._compute_first_logits(
            lambda: self._recomputer.compute_restored(case.root, case.tokens, place)
        )
        return not compare(warm, case.cold, case.layout, case.tolerance).agrees

    async def _is_segment_good(self, case: AuditMismatch, link: SegmentRef) -> bool:
        """Of a file that ends where the prompt can't be started from: whether all of it, which other conversations go
        on with, comes out right.
        """
        stored = await asyncio.to_thread(self._index.path_tokens, link.id)
        tokens = stored + stored[-TOKEN_BYTES:]  # one is left to compute, whichever
        places = plan_restores(await self._match(case, stored), case.layout)
        if not places or places[-1].reuse < link.upto:
            return False
        cold = await self._compute_first_logits(lambda: self._recomputer.compute_cold(case.root, tokens))
        warm = await self._compute_first_logits(
            lambda: self._recomputer.compute_restored(case.root, tokens, places[-1])
        )
        return compare(warm, cold, case.layout, case.tolerance).agrees

    async def _match(self, case: AuditMismatch, tokens: bytes) -> PrefixMatch:
        return await asyncio.to_thread(self._index.match_prefix, case.root, tokens, len(tokens) // TOKEN_BYTES)

    async def _compute_first_logits(self, compute: Callable[[], Awaitable[FirstLogits | None]]) -> FirstLogits:
        for _ in range(TRIES_MAX):
            if first := await compute():
                return first
            await asyncio.sleep(TRY_INTERVAL_S)
        raise _ProbeFailedError("others needed the backend's memory")


class _ProbeFailedError(Exception):
    """A place could not be tried."""
