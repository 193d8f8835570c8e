"""Comparison of two greedy answers."""

from typing import Any

from support.pair.pair import Reply

# What logits of a warm run may differ by: rows computed while decoding, in other batches, and in chunks that end
# elsewhere, round differently; quantized rows turn a last bit into a step: cold runs in other chunks differed by 3.8e-2
# at most, in 80 pairs of answers of 16 tokens.
TOLERANCE = 1e-3
TOLERANCE_QUANTIZED = 4e-2
TOLERANCE_QUANTIZED_APART = 0.2  # steps of 4 bits are larger
QUANTIZED_FLAGS = ("--kv-bits", "8", "--kv-group-size", "32")
QUANTIZED_APART_FLAGS = (
    *("--kv-bits", "8,4", "--kv-group-size", "64,32"),
    *("--kv-boundary-layers", "1", "--kv-boundary-bits", "8,6"),
)
WITH_LOGPROBS = {"logprobs": True, "top_logprobs": 2}  # what `explain_difference` needs


def list_logprobs(choice: Any) -> list[Any]:
    """Log-probabilities of a choice's reasoning and of its content."""
    logprobs = choice["logprobs"] or {}
    return [entry for name in ("reasoning_content", "content") for entry in logprobs.get(name) or ()]


def explain_difference(cold: Reply, warm: Reply, tolerance: float = TOLERANCE) -> str:
    """ "" where the greedy answers are equal, or differ first where the two likeliest tokens were nearly tied."""
    mine, theirs = (list_logprobs(reply.json["choices"][0]) for reply in (cold, warm))
    for place, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one["token"] != other["token"]:
            first, second = (entry["logprob"] for entry in one["top_logprobs"])
            if first - second <= tolerance:
                print(f"a near tie: {first - second:.1e} between the two likeliest at token {place}")
                return ""
            return f"token {place}: {one['token']!r} cold, {other['token']!r} warm, {first - second:.1e} apart"
    return "" if len(mine) == len(theirs) else f"{len(mine)} tokens cold, {len(theirs)} warm"
