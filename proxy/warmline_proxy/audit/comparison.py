"""Whether two runs of one prompt agree, by what their first token was chosen from.  Pure.

In exact mode every bit is equal.  In fast mode the log-probabilities of the likely tokens agree within a tolerance:
rows that were computed while decoding, or in chunks that end elsewhere, round differently.
"""

import math
import struct
from dataclasses import dataclass

from warmline_common.protocol.messages import FirstLogits, KvLayout

EQUAL, WITHIN, DIFFERS, UNSTABLE = "equal", "within", "differs", "unstable"

LIKELY_NATS = 5.0  # below the likeliest token: what is rarer than e^-5 of that has no say in the answer
# In nats: two to four times the largest that a trained model of 135M parameters gave between rows of which a part was
# decoded and those of a prefill (benchmarks/rounding.py; docs/benchmarks.md has the runs), for a false alarm costs
# conversations.  On a GPU that was 0.62 in bfloat16 and 0.047 in float16: some steps of the logits, which are 1/8 and
# 1/64 near 16, where a likely token's lies.  With float32 logits it was 0.11 for KV of 8 bits and 1.6 for KV of 4 (cold
# runs: 4.4): quantizing turns a difference in the last bit into one of a step, and that into many in the next layers.
# float32 itself gave 2e-5; its 1e-3 is what fast mode promises, and what products in TF32 don't keep (they gave 1e-2).
TOLERANCES = {"float32": 1e-3, "q8": 0.4, "q4": 6.0, "float16": 0.125, "bfloat16": 2.0}
NOISE_FACTOR = 8.0  # as much further from a cold run than cold runs are from each other a warm one may be
UNUSED_BITS = {"bfloat16": 0xFFFF, "float16": 0x1FFF}  # of a float32 that was widened from it


@dataclass(frozen=True)
class Verdict:
    outcome: str
    difference: float  # nats; 0.0 where equal
    tolerance: float  # 0.0 in exact mode

    @property
    def agrees(self) -> bool:
        return self.outcome in (EQUAL, WITHIN)


def compare(one: FirstLogits, other: FirstLogits, layout: KvLayout, tolerance: float = 0.0) -> Verdict:
    """`tolerance` in nats, for fast mode; 0: as the types of KV and logits allow."""
    if one.digest == other.digest:
        return Verdict(EQUAL, 0.0, 0.0)
    if layout.grid:
        return Verdict(DIFFERS, max_difference(one, other), 0.0)
    tolerance = tolerance or max(
        dtype_tolerance(layout.dtype), dtype_tolerance(detect_dtype(one)), dtype_tolerance(detect_dtype(other))
    )
    nats = max_difference(one, other)
    return Verdict(WITHIN if nats <= tolerance else DIFFERS, nats, tolerance)


def judge(
    warm: FirstLogits, cold: FirstLogits, cold_again: FirstLogits, layout: KvLayout, tolerance: float = 0.0
) -> Verdict:
    """As `compare` of the first two, knowing by how much cold runs of this very prompt differ from each other.

    UNSTABLE where that is more than is tolerated, and the warm run's difference is of that kind.
    """
    verdict, noise = compare(warm, cold, layout, tolerance), compare(cold, cold_again, layout, tolerance)
    if noise.outcome == EQUAL:
        return verdict
    tolerance_nats = max(verdict.tolerance, NOISE_FACTOR * noise.difference)
    if verdict.difference > tolerance_nats:
        return Verdict(DIFFERS, verdict.difference, tolerance_nats)
    return Verdict(WITHIN if noise.agrees else UNSTABLE, verdict.difference, tolerance_nats)


def dtype_tolerance(dtype: str) -> float:
    """One that is not listed counts as the coarsest of its kind: quantized, or not."""
    return TOLERANCES.get(dtype, TOLERANCES["q4" if dtype.startswith("q") else "bfloat16"])


def detect_dtype(first: FirstLogits) -> str:
    """What the model computed its logits in, by the bits that these values don't use."""
    words = struct.unpack(f"<{len(first.logprobs) // 4}I", first.logprobs)
    return next((dtype for dtype, bits in UNUSED_BITS.items() if not any(word & bits for word in words)), "float32")


def max_difference(one: FirstLogits, other: FirstLogits) -> float:
    """The largest difference in nats among the tokens that are likely in either run.

    A token that the other run does not list has at most the least that it lists.  Infinite where a run has no likely
    token at all, as one of NaN has not.
    """
    mine, theirs = rank_tokens(one), rank_tokens(other)
    return max(_one_sided_difference(mine, theirs), _one_sided_difference(theirs, mine))


def rank_tokens(first: FirstLogits) -> dict[int, float]:
    """Log-probabilities by token, the likeliest first."""
    count = len(first.ids) // 4
    ids, values = struct.unpack(f"<{count}I", first.ids), struct.unpack(f"<{count}f", first.logprobs)
    return dict(zip(ids, values, strict=True))


def _one_sided_difference(mine: dict[int, float], theirs: dict[int, float]) -> float:
    """As `difference`, among the tokens that are likely in mine."""
    if not mine or not theirs or not all(math.isfinite(max(row.values())) for row in (mine, theirs)):
        return math.inf
    if any(math.isnan(value) for row in (mine, theirs) for value in row.values()):
        return math.inf
    top, least = max(mine.values()), min(theirs.values())
    likely = [(token, value) for token, value in mine.items() if value >= top - LIKELY_NATS]
    return max(abs(value - theirs[token]) if token in theirs else max(0.0, value - least) for token, value in likely)
