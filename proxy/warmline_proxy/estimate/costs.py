"""Durations to expect of the parts of a time to the first token.  Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from warmline_common.measurement.duration_model import DurationModel
from warmline_common.measurement.fitted_durations import CHUNK_ASSUMED
from warmline_common.measurement.scheduling import DECODE_SHARE, choose_batch_size, is_padding_small
from warmline_common.protocol.messages import KvLayout

# Assumed until something is measured; restoring wins clearly, as on every machine known.
RENDER_ASSUMED = DurationModel(0.003, 3e-6)  # by the prompt's tokens
PLAN_ASSUMED = DurationModel(0.003, 2e-7)  # by the prompt's tokens
RESTORE_ASSUMED = DurationModel(0.01, 2e-9)  # by bytes; the fixed part opens files and is one more call
FIRST_STEP_ASSUMED = DurationModel(0.02, 5e-7)  # by the prompt's tokens
CALL_ASSUMED_S = 0.005  # of a call to the backend, beside the step itself
STEP_TOKENS_ASSUMED = 2_048  # of a chunk


@dataclass(frozen=True)
class Costs:
    """Models of the parts' durations."""

    chunk: DurationModel = CHUNK_ASSUMED
    restore: DurationModel = RESTORE_ASSUMED
    render: DurationModel = RENDER_ASSUMED
    plan: DurationModel = PLAN_ASSUMED
    first_step: DurationModel = FIRST_STEP_ASSUMED
    step_tokens: int = STEP_TOKENS_ASSUMED  # most tokens of a chunk
    decode_step_s: float = 0.0  # 0.0: not measured yet

    def estimate_prefill_s(self, start: int, end: int, chunk_ends: Collection[int] = ()) -> float:
        """Seconds to compute tokens [start, end) in chunks, of which some end at `chunk_ends`."""
        if end <= start:
            return 0.0
        stops = sorted({start, end, *(at for at in chunk_ends if start < at < end)})
        chunks = sum(-(-(high - low) // self.step_tokens) for low, high in pairwise(stops))
        tokens, context = end - start, (start + end) / 2  # mean number of tokens before each
        return chunks * self.chunk.fixed_s + tokens * (self.chunk.unit_s + context * self.chunk.context_s)

    def estimate_batches_s(self, start: int, end: int, count: int) -> tuple[float, float]:
        """Seconds of the batches before the last one, with a decode step after each, and of that one.

        `count` prompts have tokens [start, end) to compute each, in batches as the engine makes them.  While a batch
        is computed, others come that fill the next one.
        """
        tokens = end - start
        mates_max = max(1, self.step_tokens // tokens)
        batch_s = [
            self.chunk.estimate_s(size * tokens, start + tokens / 2) + self.decode_step_s
            for size in range(1, min(count, mates_max) + 1)
        ]
        size = choose_batch_size(batch_s)
        before = (count - 1) // size
        return before * batch_s[size - 1], batch_s[(size if before else count) - 1] - self.decode_step_s


@dataclass(frozen=True)
class PrefillLeft:
    """Tokens [start, end) that another request has still to compute."""

    request_id: str
    start: int
    end: int


@dataclass(frozen=True)
class EngineLoad:
    """Waits of a request that are known when it is planned."""

    waited_s: float = 0.0  # since its arrival, but for its rendering
    prefills: Sequence[PrefillLeft] = ()  # of the other requests at the backend
    decoding_count: int = 0  # of the other requests at the backend

    def follow(self, leader_id: str, leader_s: float) -> "EngineLoad":
        """The load where the request waits `leader_s` for one of the others, and then for the rest of them."""
        others = [each for each in self.prefills if each.request_id != leader_id]
        return replace(self, waited_s=self.waited_s + leader_s, prefills=others)

    def estimate_prefill(
        self, start: int, end: int, costs: Costs, chunk_ends: Collection[int] = ()
    ) -> tuple[float, float]:
        """Seconds that a request waits, those of `waited_s` included, and those of its chunks for tokens [start, end).

        The engine computes the shortest prompt first, and short ones of similar length in batches; of a longer one the
        chunk that runs is awaited, half of it in the mean.  Decoding has its share of the time, and a step between two
        chunks at least.
        """
        prefill_s = costs.estimate_prefill_s(start, end, chunk_ends)
        mates = [each for each in self.prefills if _can_share_batch(each, start, end, costs)]
        left = [costs.estimate_prefill_s(each.start, each.end) for each in self.prefills if each not in mates]
        # Those with nothing left to compute start together with this one, or have started.
        shorter, longest = [seconds for seconds in left if 0.0 < seconds <= prefill_s], max(left, default=0.0)
        wait_s = sum(shorter) + len(shorter) * costs.decode_step_s
        if longest > prefill_s:
            wait_s += min(longest, costs.chunk.estimate_s(costs.step_tokens)) / 2
        if mates:
            batches_s, prefill_s = costs.estimate_batches_s(start, end, len(mates) + 1)
            wait_s += batches_s
        if self.decoding_count:
            computing_s = wait_s + prefill_s
            wait_s += max(costs.decode_step_s, computing_s * DECODE_SHARE / (1 - DECODE_SHARE))
        return self.waited_s + wait_s, prefill_s


def _can_share_batch(other: PrefillLeft, start: int, end: int, costs: Costs) -> bool:
    """True where the last chunks of both prompts may be computed in one batch: the padding is small."""
    mine, others = end - start, other.end - other.start
    if not (0 < mine <= costs.step_tokens and 0 < others <= costs.step_tokens):
        return False
    return all(is_padding_small(pair) for pair in ((mine, others), (end, other.end)))


def compute_restore_bytes(layout: KvLayout, tokens: int) -> int:
    """Bytes to read for the rows of `tokens` tokens, and for a state."""
    return tokens * layout.row_bytes + (layout.state_bytes if layout.has_states else 0)
