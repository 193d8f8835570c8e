"""Memory of prefill chunks: reckoned before they are computed, bounded meanwhile, measured afterwards.  Engine thread.

mlx sends operations ahead of the device, and allocates their memory when they are sent: that of many layers at once, up
to its memory limit.  So this limit is set for each chunk to what it needs.  Above it, mlx waits for the device before
it sends more, and returns freed buffers to the system.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx

from warmline_backend.generation.sequence import Sequence
from warmline_backend.model.step_memory import StepMemory, fit_tokens, halve_chunk

log = logging.getLogger(__name__)

USABLE_SHARE = 0.95  # of what weights leave; the rest is the driver's, and lost between buffers
# Above mlx's limit are the arrays of one operation more: up to 17 % on an H200.
MARGIN = 1.25
ROOM_SHARE_MIN = 0.25  # of the room: a chunk that needs less may be sent ahead of the device
SHORTENING_MAX = 8  # residents are evicted before chunks get shorter than this part of the step
CACHE_SHARE = 0.1  # of what weights leave, for freed buffers that mlx keeps


@dataclass(frozen=True)
class _Excess:
    """A chunk that took more than was reckoned."""

    depth: int
    token_bytes: float


class ChunkMemory:
    """Sizes and bounds of chunks.  `step_memory` is None where nothing is known: then chunks have their full size.

    `usable_bytes` of weights, KV and chunks together may change at any time: in exact mode it decides no chunk's size,
    only whether residents are evicted first.
    """

    def __init__(self, step_memory: StepMemory | None, usable_bytes: int) -> None:
        self._step_memory, self.usable_bytes = step_memory, usable_bytes
        self._excess: _Excess | None = None  # the last one
        self._peak_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """mlx's peak memory since the process started."""
        return max(self._peak_bytes, mx.get_peak_memory())

    def reckon_bytes(self, tokens: int, depth: int) -> int:
        """Bytes that a chunk may take, beside the KV; 0 where nothing is known."""
        return int(self._reckon_needed_bytes(tokens, depth) * MARGIN)

    def _reckon_needed_bytes(self, tokens: int, depth: int) -> float:
        needed = float(self._step_memory.bytes_for(tokens, depth)) if self._step_memory else 0.0
        if self._excess and depth >= self._excess.depth:
            needed = max(needed, self._excess.token_bytes * tokens)
        return needed

    def choose_tokens(self, sequence: Sequence, step: int, committed_bytes: int) -> int:
        """Most tokens of the next chunk: the step, or fewer where that would not fit beside `committed_bytes`.

        In exact mode it is the step always.
        """
        if sequence.kv.grid:
            return step
        depth, wanted = sequence.kv.length, min(step, sequence.chunk_tokens_max)
        room = self._compute_room(committed_bytes)
        tokens = fit_tokens(wanted, room, lambda tokens: self.reckon_bytes(tokens, depth))
        if tokens < wanted and not sequence.has_short_chunks:
            sequence.has_short_chunks = True
            log.info(
                "request %s: %d tokens a chunk after %d tokens: %d would take %.1f GB",
                *(sequence.request.id, tokens, depth, wanted, self.reckon_bytes(wanted, depth) / 1e9),
            )
        return tokens

    def has_room(self, sequence: Sequence, step: int, committed_bytes: int) -> bool:
        """True where the next chunk should fit without being much shorter than the step."""
        wanted = step if sequence.kv.grid else min(step, sequence.chunk_tokens_max) // SHORTENING_MAX
        return self.fits(wanted, sequence.kv.length, committed_bytes)

    def fits(self, tokens: int, depth: int, committed_bytes: int) -> bool:
        """True where a chunk should fit."""
        return self.reckon_bytes(tokens, depth) <= self._compute_room(committed_bytes)

    def _compute_room(self, committed_bytes: int) -> int:
        """Bytes left for a chunk beside `committed_bytes` of weights and KV, or beside what is in use, if more."""
        return self.usable_bytes - max(committed_bytes, mx.get_active_memory())

    def plan_retry(self, sequence: Sequence, tokens: int, problem: str) -> bool:
        """Halve the chunks of a sequence after one of `tokens` found no memory.

        Where they can't be shorter, as in exact mode, it is tried once more without residents; False after that.
        """
        shorter = tokens if sequence.kv.grid else halve_chunk(tokens)
        if shorter == tokens and sequence.needs_eviction:
            return False
        sequence.needs_eviction = shorter == tokens
        sequence.chunk_tokens_max = shorter
        log.warning(
            "request %s: no memory for a chunk of %d tokens after %d tokens; it goes on with %d a chunk (%s)",
            *(sequence.request.id, tokens, sequence.kv.length, shorter, problem),
        )
        return True

    def describe_lack(self, sequence: Sequence, tokens: int, problem: str) -> str:
        """Text of the error that ends a sequence whose shortest chunk found no memory."""
        prompt, depth = len(sequence.request.prompt), sequence.kv.length
        sizes = self.reckon_bytes(tokens, depth), mx.get_active_memory(), self.usable_bytes
        needed, used, usable = (f"{size / 1e6:.1f} MB" for size in sizes)
        todo = "set a smaller --prefill-step-size" if sequence.kv.grid else "lower --memory-budget-gb"
        return (
            f"the memory ran out at token {depth} of the prompt's {prompt}: a chunk of {tokens} tokens takes about "
            f"{needed} beside {used} in use, of {usable} ({problem}); shorten the prompt, or {todo}"
        )

    @contextmanager
    def bound_chunk(self, tokens: int, depth: int, committed_bytes: int) -> Iterator[None]:
        """Keep mlx's memory within what a chunk needs while it is computed, and measure what it takes.

        Where there are no `tokens`, KV is copied alone: nothing is bound, and nothing measured.
        """
        if not tokens:
            yield
            return
        needed, room = self._reckon_needed_bytes(tokens, depth), self._compute_room(committed_bytes)
        allowed = int(max(needed, room * ROOM_SHARE_MIN))
        self._peak_bytes = self.peak_bytes
        active = mx.get_active_memory()
        mx.reset_peak_memory()
        limit = mx.set_memory_limit(active + allowed)
        try:
            yield
        finally:
            mx.set_memory_limit(limit)
        taken = mx.get_peak_memory() - active
        if taken > allowed * MARGIN:  # mlx waited at `allowed`; more than one operation's arrays is what it needed
            self._excess = _Excess(depth, taken / tokens)
        elif self._excess and depth >= self._excess.depth and taken < allowed / 2:
            self._excess = None  # something else took memory then, such as a restore


def compute_usable_bytes(weight_bytes: int, process_bytes: int) -> int:
    """Bytes that weights, KV and chunks may take together, of all that the process may take."""
    return weight_bytes + int((process_bytes - weight_bytes) * USABLE_SHARE)


def bound_buffer_cache(weight_bytes: int, process_bytes: int, bytes_max: int = 0) -> None:
    """Bound the freed buffers that mlx keeps, to `bytes_max` where it is less than a share of what weights leave.

    mlx's own bound is nearly all of the memory.
    """
    share = int(max(0, process_bytes - weight_bytes) * CACHE_SHARE)
    mx.set_cache_limit(min(share, bytes_max) if bytes_max else share)
