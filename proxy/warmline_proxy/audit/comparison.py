"""Comparison of two runs of one prompt by the log-probabilities of their first token.  Pure.

In exact mode all bits are equal.  In fast mode the likely tokens' log-probabilities agree within a tolerance: KV rows
that were computed while decoding, or in chunks with other ends, round differently.
"""

import math
import re
import struct
from dataclasses import dataclass

from warmline_common.protocol.messages import FirstLogits, KvLayout

EQUAL, WITHIN, DIFFERS, UNSTABLE = "equal", "within", "differs", "unstable"

LIKELY_NATS = 5.0  # below the likeliest token; rarer tokens hardly change the answer
# Nats, by dtype: two to four times the largest difference of a trained model of 135M parameters between partly decoded
# and prefilled rows (benchmarks/rounding.py, runs in docs/benchmarks.md), since a false positive costs conversations.
# On a GPU: 0.62 in bfloat16 and 0.047 in float16, some steps of the logits, which are 1/8 and 1/64 near 16, where a
# likely token lies.  With float32 logits 0.11 for 8-bit KV and 1.6 for 4-bit KV (cold runs: 4.4): quantizing turns a
# difference in the last bit into a step, and that into many in the next layers.  float32 itself: 2e-5; its 1e-3 is the
# promise of fast mode, which products in TF32 don't keep (1e-2).  Not measured: 5 and 6 bits, which have that of 4,
# and 2 and 3 bits, which have twice that.
TOLERANCES = {
    **{"float32": 1e-3, "float16": 0.125, "bfloat16": 2.0},
    **{"q8": 0.4, "q6": 6.0, "q5": 6.0, "q4": 6.0, "q3": 12.0, "q2": 12.0},
}
NOISE_FACTOR = 8.0  # a warm run's largest difference from a cold run, in differences between cold runs
UNUSED_BITS = {"bfloat16": 0xFFFF, "float16": 0x1FFF}  # zero in a float32 that was widened from it


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison: EQUAL, WITHIN, DIFFERS or UNSTABLE, with its figures."""

    outcome: str
    difference: float  # nats; 0.0 where equal
    tolerance: float  # 0.0 in exact mode

    @property
    def agrees(self) -> bool:
        return self.outcome in (EQUAL, WITHIN)

    def describe_difference(self) -> str:
        """Figures for the log."""
        expected = f"tolerance {self.tolerance:g}" if self.tolerance else "exact to the last bit is expected"
        return f"log-probabilities differ by {self.difference:.2e}, {expected}"


def compare(one: FirstLogits, other: FirstLogits, layout: KvLayout, tolerance: float = 0.0) -> Verdict:
    """Compare two runs; `tolerance` in nats, for fast mode, 0: by the dtypes of KV and logits."""
    if one.digest == other.digest:
        return Verdict(EQUAL, 0.0, 0.0)
    if layout.grid:
        return Verdict(DIFFERS, max_difference(one, other), 0.0)
    tolerance = tolerance or max(map(dtype_tolerance, (layout.dtype, detect_dtype(one), detect_dtype(other))))
    nats = max_difference(one, other)
    return Verdict(WITHIN if nats <= tolerance else DIFFERS, nats, tolerance)


def judge(
    warm: FirstLogits, cold: FirstLogits, cold_again: FirstLogits, layout: KvLayout, tolerance: float = 0.0
) -> Verdict:
    """Compare a warm and a cold run, given the difference between two cold runs of the same prompt.

    UNSTABLE where the cold runs differ by more than the tolerance, and the warm run by at most NOISE_FACTOR times that.
    """
    verdict, noise = compare(warm, cold, layout, tolerance), compare(cold, cold_again, layout, tolerance)
    if noise.outcome == EQUAL:
        return verdict
    tolerance_nats = max(verdict.tolerance, NOISE_FACTOR * noise.difference)
    if verdict.difference > tolerance_nats:
        return Verdict(DIFFERS, verdict.difference, tolerance_nats)
    return Verdict(WITHIN if noise.agrees else UNSTABLE, verdict.difference, tolerance_nats)


def dtype_tolerance(dtype: str) -> float:
    """Tolerance of a dtype in nats; an unlisted dtype counts as the coarsest of its kind, quantized or not."""
    if numbers := re.findall(r"[0-9]+", dtype) if dtype.startswith("q") else []:
        dtype = f"q{min(map(int, numbers))}"  # the coarsest of keys, values and layers
    return TOLERANCES.get(dtype, TOLERANCES["q2" if dtype.startswith("q") else "bfloat16"])


def detect_dtype(first: FirstLogits) -> str:
    """Dtype in which the model computed its logits, by the bits that are zero in all values."""
    words = struct.unpack(f"<{len(first.logprobs) // 4}I", first.logprobs)
    return next((dtype for dtype, bits in UNUSED_BITS.items() if not any(word & bits for word in words)), "float32")


def max_difference(one: FirstLogits, other: FirstLogits) -> float:
    """Largest difference in nats among the tokens that are likely in either run.

    A token that a run does not list counts as its least likely listed one.  Infinite where a run has no likely token,
    as with NaN.
    """
    mine, theirs = rank_tokens(one), rank_tokens(other)
    return max(_one_sided_difference(mine, theirs), _one_sided_difference(theirs, mine))


def rank_tokens(first: FirstLogits) -> dict[int, float]:
    """Log-probabilities by token id, likeliest first."""
    count = len(first.ids) // 4
    ids, values = struct.unpack(f"<{count}I", first.ids), struct.unpack(f"<{count}f", first.logprobs)
    return dict(zip(ids, values, strict=True))


def _one_sided_difference(mine: dict[int, float], theirs: dict[int, float]) -> float:
    """Largest difference among the tokens that are likely in `mine`."""
    if not mine or not theirs or not all(math.isfinite(max(row.values())) for row in (mine, theirs)):
        return math.inf
    if any(math.isnan(value) for row in (mine, theirs) for value in row.values()):
        return math.inf
    top, least = max(mine.values()), min(theirs.values())
    likely = [(token, value) for token, value in mine.items() if value >= top - LIKELY_NATS]
    return max(abs(value - theirs[token]) if token in theirs else max(0.0, value - least) for token, value in likely)
