"""Comparison of a warm answer with the cold one, number by number."""

from dataclasses import dataclass
from typing import Any

from support.pair.answers import list_logprobs
from support.pair.pair import Reply


class Difference(AssertionError):
    """Warm answer that differs from the cold one, or inconsistent home."""


@dataclass(frozen=True)
class ReplyComparison:
    """Result of a comparison; `difference` is "" for equal answers."""

    difference: str = ""
    near_tie: bool = False
    numbers: int = 0  # log-probabilities compared
    largest: float = 0.0  # difference of two of them


def compare_replies(cold: Reply, warm: Reply, tolerance: float) -> ReplyComparison:
    """Compare two answers; `tolerance` 0: every bit.  Else up to the first token that differs at a near tie."""
    one, other = (reply.json["choices"][0] for reply in (cold, warm))
    mine, theirs = (list_logprobs(choice) for choice in (one, other))
    numbers, largest = 0, 0.0
    for place, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        found = find_differences(a, b)
        numbers, largest = numbers + len(found), max(largest, *found)
        if max(found) > tolerance:
            return ReplyComparison(f"token {place}: log-probabilities differ by {max(found):.2e}: {a} cold, {b} warm")
        if a["bytes"] != b["bytes"]:
            if is_near_tie(a, b, tolerance):
                return ReplyComparison(near_tie=True, numbers=numbers, largest=largest)
            return ReplyComparison(
                f"token {place}: {a['token']!r} cold, {b['token']!r} warm, and no tie: {a} cold, {b} warm"
            )
    for what, x, y in (
        ("tokens", len(mine), len(theirs)),
        ("text", one["message"], other["message"]),
        ("end", one["finish_reason"], other["finish_reason"]),
        ("prompt tokens", cold.prompt_tokens, warm.prompt_tokens),
    ):
        if x != y:
            return ReplyComparison(f"{what}: {x!r} cold, {y!r} warm")
    return ReplyComparison(numbers=numbers, largest=largest)


def find_differences(a: Any, b: Any) -> list[float]:
    """Differences of log-probabilities; a token that a list lacks counts as its last one, if that is less likely."""
    mine, theirs = top_logprobs(a), top_logprobs(b)
    found = [abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys()]
    found += [max(0.0, mine[token] - min(theirs.values())) for token in mine.keys() - theirs.keys()]
    found += [max(0.0, theirs[token] - min(mine.values())) for token in theirs.keys() - mine.keys()]
    return found or [float("inf")]


def top_logprobs(entry: Any) -> dict[bytes, float]:
    return {bytes(each["bytes"]): each["logprob"] for each in entry["top_logprobs"]}


def is_near_tie(a: Any, b: Any, tolerance: float) -> bool:
    """Say whether each run finds the other's token as likely as its own, within the tolerance."""
    return tolerance > 0 and all(
        abs(entry["logprob"] - top_logprobs(entry).get(bytes(other["bytes"]), float("-inf"))) <= tolerance
        for entry, other in ((a, b), (b, a))
    )
