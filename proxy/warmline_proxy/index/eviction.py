"""Choice of segments to evict: pure functions over a snapshot.

Leaves first: a segment is evicted when nothing builds on it any more.  Among leaves, the one goes whose bytes save
the least: prefill seconds per byte, aged by the time since its last use (hyperbolically, so that no value reaches
zero and the order of two files of one age never changes).
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

LOW_WATERMARK = 0.9  # of the budget: once it is passed, room is made down to here, so that not every save evicts
AGE_FLOOR_S = 60.0


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A segment or checkpoint.  `parent`: a segment's parent ("" at the root), or the segment of a checkpoint."""

    id: str
    parent: str
    is_checkpoint: bool
    bytes_count: int
    prefill_saved_s: float  # prefill that it spares
    last_used: float
    is_protected: bool  # pinned, leased, or being built on


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    ids: list[str]  # in this order; a segment's checkpoints before it
    bytes_freed: int


def bytes_to_free(used: int, needed: int, budget: int) -> int:
    """0 below the budget; above it, down to the low watermark."""
    if used + needed <= budget:
        return 0
    return used + needed - int(budget * LOW_WATERMARK)


def score_candidate(candidate: EvictionCandidate, bytes_count: int, now: float) -> float:
    age_s = max(0.0, now - candidate.last_used)
    return candidate.prefill_saved_s / max(1, bytes_count) / (age_s + AGE_FLOOR_S)


def choose_evictions(candidates: Sequence[EvictionCandidate], bytes_wanted: int, now: float) -> EvictionPlan:
    """Files to evict to free `bytes_wanted` bytes; fewer where the rest is pinned or leased."""
    by_id = {candidate.id: candidate for candidate in candidates}
    checkpoints: dict[str, list[EvictionCandidate]] = {}
    for candidate in candidates:
        if candidate.is_checkpoint:
            checkpoints.setdefault(candidate.parent, []).append(candidate)
    children = Counter(candidate.parent for candidate in candidates if not candidate.is_checkpoint)
    heap: list[tuple[float, str]] = []

    def offer(candidate: EvictionCandidate) -> None:
        mine = checkpoints.get(candidate.id, [])
        if not candidate.is_protected and not any(checkpoint.is_protected for checkpoint in mine):
            weight = candidate.bytes_count + sum(checkpoint.bytes_count for checkpoint in mine)
            heapq.heappush(heap, (score_candidate(candidate, weight, now), candidate.id))

    for candidate in candidates:
        if candidate.is_checkpoint or not children[candidate.id]:
            offer(candidate)
    ids: dict[str, None] = {}
    freed = 0
    while heap and freed < bytes_wanted:
        candidate = by_id[heapq.heappop(heap)[1]]
        for gone in [*checkpoints.get(candidate.id, []), candidate]:
            freed += 0 if gone.id in ids else gone.bytes_count
            ids[gone.id] = None
        if not candidate.is_checkpoint and candidate.parent:
            children[candidate.parent] -= 1
            if not children[candidate.parent]:
                offer(by_id[candidate.parent])
    return EvictionPlan(list(ids), freed)
