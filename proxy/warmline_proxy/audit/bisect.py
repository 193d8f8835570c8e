"""Bisection of the stored tokens along a prompt: the last place from which a start agrees with a cold run."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from warmline_common.protocol.messages import FirstLogits, KvLayout, SegmentRef
from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_proxy.audit.comparison import compare
from warmline_proxy.audit.first_token_probe import FirstTokenProbe, ModelChangedError
from warmline_proxy.audit.quiet import QuietEngine
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.planner import RequestPlan, plan_restores
from warmline_proxy.store.rows import PrefixMatch
from warmline_proxy.upstream.backend_state import SuspectPrefix
from warmline_proxy.upstream.client import UpstreamError

log = logging.getLogger(__name__)

ProbeRun = Coroutine[Any, Any, FirstLogits | None]

SEARCH_TIMEOUT_S = 600.0  # meanwhile requests that share the prompt's beginning compute it again
TRIES_MAX = 10  # of one run: it is lost when a request arrives
TRY_INTERVAL_S = 1.0


@dataclass(frozen=True)
class AuditMismatch:
    """A prompt whose first token's logits, after a start from `reuse` tokens, differ from a cold run's."""

    root: bytes
    tokens: bytes
    reuse: int
    cold: FirstLogits
    layout: KvLayout
    tolerance: float  # nats; a larger difference is a mismatch.  In exact mode any difference is
    started_at: float  # time.monotonic(), not before the request's start
    quiet_s: float = 0.0  # before each run of the bisection


class Bisector:
    """Search for the first wrong segment of a prompt.

    Every place is judged by the first token that came out wrong: the rest of the prompt is computed after a start from
    there, so a place agrees with the cold run where everything before it is right.
    """

    def __init__(self, index: Index, first_token_probe: FirstTokenProbe, engine: QuietEngine) -> None:
        self._index, self._probe, self._engine = index, first_token_probe, engine

    async def narrow_suspicion(self, case: AuditMismatch, suspicion: SuspectPrefix) -> None:
        """Raise `suspicion.trusted_tokens` to the last place that agrees, where a start from the next place differs.

        The value stays 0 where the stored tokens agree: then a resident was wrong, with unknown consequences.  Where
        the backend fails, or at the time limit, the value reached so far remains.
        """
        try:
            async with asyncio.timeout(SEARCH_TIMEOUT_S):
                await self._narrow_suspicion(case, suspicion)
        except (TimeoutError, _ProbeFailedError, ModelChangedError, UpstreamError, IndexStoreError) as error:
            log.warning("the search for the first wrong segment ended early: %s", error or "it took too long")

    async def _narrow_suspicion(self, case: AuditMismatch, suspicion: SuspectPrefix) -> None:
        # Up to the start that differed: later tokens were computed from it.
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
        warm = await self._compute(case, lambda: self._probe.compute_restored(case.root, case.tokens, place))
        return not compare(warm, case.cold, case.layout, case.tolerance).agrees

    async def _is_segment_good(self, case: AuditMismatch, link: SegmentRef) -> bool:
        """Judge the whole path of a segment that other conversations continue, where the prompt has no start there."""
        stored = await asyncio.to_thread(self._index.path_tokens, link.id)
        tokens = stored + stored[-TOKEN_BYTES:]  # any further token, which is left to compute
        places = plan_restores(await self._match(case, stored), case.layout)
        if not places or places[-1].reuse < link.upto:
            return False
        cold = await self._compute(case, lambda: self._probe.compute_cold(case.root, tokens))
        warm = await self._compute(case, lambda: self._probe.compute_restored(case.root, tokens, places[-1]))
        return compare(warm, cold, case.layout, case.tolerance).agrees

    async def _match(self, case: AuditMismatch, tokens: bytes) -> PrefixMatch:
        return await asyncio.to_thread(self._index.match_prefix, case.root, tokens, len(tokens) // TOKEN_BYTES)

    async def _compute(self, case: AuditMismatch, run: Callable[[], ProbeRun]) -> FirstLogits:
        for _ in range(TRIES_MAX):
            if first := await self._engine.run(run(), lambda: case.quiet_s):
                return first
            await asyncio.sleep(TRY_INTERVAL_S)
        raise _ProbeFailedError("others needed the engine or its memory")


class _ProbeFailedError(Exception):
    """No run from a place was completed."""
