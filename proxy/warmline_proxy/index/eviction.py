"""Choice of segments to evict: pure functions over a snapshot.

Leaves first: a segment is evicted when nothing builds on it any more.  Among leaves, the first is the one whose bytes
save the least: prefill seconds per byte, aged by the time since its last use (hyperbolically, so that no value reaches
zero and the order of two files of one age never changes).
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

LOW_WATERMARK = 0.9  # of the budget: an eviction goes down to here, so that not every save evicts
AGE_FLOOR_S = 60.0


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A segment or checkpoint.  `parent`: a segment's parent ("" at the root), or the segment of a checkpoint."""

    id: str
    parent: str
    is_checkpoint: bool
    bytes_count: int
    prefill_saved_s: float
    last_used: float
    is_protected: bool  # pinned, leased, or being built on


def bytes_to_free(used: int, needed: int, budget: int) -> int:
    """Bytes to evict: 0 below the budget; above it, down to the low watermark."""
    if used + needed <= budget:
        return 0
    return used + needed - int(budget * LOW_WATERMARK)


def choose_evictions(candidates: Sequence[EvictionCandidate], bytes_wanted: int, now: float) -> dict[str, int]:
    """Files to evict to free `bytes_wanted` bytes, and the bytes of each; fewer where the rest is pinned or leased.

    In the order of eviction: a segment's checkpoints before it.
    """
    by_id = {candidate.id: candidate for candidate in candidates}
    checkpoints: dict[str, list[EvictionCandidate]] = {}
    for candidate in candidates:
        if candidate.is_checkpoint:
            checkpoints.setdefault(candidate.parent, []).append(candidate)
    children = Counter(candidate.parent for candidate in candidates if not candidate.is_checkpoint)
    heap: list[tuple[float, str]] = []

    def offer(candidate: EvictionCandidate) -> None:
        files = [candidate, *checkpoints.get(candidate.id, [])]
        if not any(file.is_protected for file in files):
            saved_s_per_byte = candidate.prefill_saved_s / max(1, sum(file.bytes_count for file in files))
            age_s = max(0.0, now - candidate.last_used)
            heapq.heappush(heap, (saved_s_per_byte / (age_s + AGE_FLOOR_S), candidate.id))

    for candidate in candidates:
        if candidate.is_checkpoint or not children[candidate.id]:
            offer(candidate)
    evicted: dict[str, int] = {}
    while heap and bytes_wanted > 0:
        candidate = by_id[heapq.heappop(heap)[1]]
        for file in [*checkpoints.get(candidate.id, []), candidate]:
            bytes_wanted -= 0 if file.id in evicted else file.bytes_count
            evicted[file.id] = file.bytes_count
        if not candidate.is_checkpoint and candidate.parent:
            children[candidate.parent] -= 1
            if not children[candidate.parent]:
                offer(by_id[candidate.parent])
    return evicted
