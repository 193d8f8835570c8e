"""Whether a warm answer is the cold one, number by number."""

from dataclasses import dataclass
from typing import Any

from support.pair.pair import Reply


class Difference(AssertionError):
    """A warm answer that is not the cold one, or a home that is not as it should be."""


@dataclass(frozen=True)
class Verdict:
    """`difference` is "" where nothing speaks against both having computed the same."""

    difference: str = ""
    near_tie: bool = False
    numbers: int = 0  # log-probabilities compared
    largest: float = 0.0  # difference of two of them


def compare(cold: Reply, warm: Reply, tolerance: float) -> Verdict:
    """`tolerance` 0: every bit.  Else up to the first token that differs: after it they answer different prompts."""
    one, other = (reply.json["choices"][0] for reply in (cold, warm))
    mine, theirs = ((choice["logprobs"] or {"content": []})["content"] for choice in (one, other))
    numbers, largest = 0, 0.0
    for place, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        found = differences(a, b)
        numbers, largest = numbers + len(found), max(largest, *found)
        if max(found) > tolerance:
            return Verdict(f"token {place}: log-probabilities differ by {max(found):.2e}: {a} cold, {b} warm")
        if a["bytes"] != b["bytes"]:
            if nearly_tied(a, b, tolerance):
                return Verdict(near_tie=True, numbers=numbers, largest=largest)
            return Verdict(f"token {place}: {a['token']!r} cold, {b['token']!r} warm, and no tie: {a} cold, {b} warm")
    for what, x, y in (
        ("tokens", len(mine), len(theirs)),
        ("text", one["message"], other["message"]),
        ("end", one["finish_reason"], other["finish_reason"]),
        ("prompt tokens", cold.prompt_tokens, warm.prompt_tokens),
    ):
        if x != y:
            return Verdict(f"{what}: {x!r} cold, {y!r} warm")
    return Verdict(numbers=numbers, largest=largest)


def differences(a: Any, b: Any) -> list[float]:
    """Of the tokens that are among the likeliest in both; one that is in one list alone is as far from it as it says.

    What is not listed is at most as likely as the last that is.
    """
    mine, theirs = listed(a), listed(b)
    found = [abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys()]
    found += [max(0.0, mine[token] - min(theirs.values())) for token in mine.keys() - theirs.keys()]
    found += [max(0.0, theirs[token] - min(mine.values())) for token in theirs.keys() - mine.keys()]
    return found or [float("inf")]


def listed(entry: Any) -> dict[bytes, float]:
    return {bytes(each["bytes"]): each["logprob"] for each in entry["top_logprobs"]}


def nearly_tied(a: Any, b: Any, tolerance: float) -> bool:
    """Each finds the other's token as likely as its own, within the tolerance."""
    return tolerance > 0 and all(
        abs(entry["logprob"] - listed(entry).get(bytes(other["bytes"]), float("-inf"))) <= tolerance
        for entry, other in ((a, b), (b, a))
    )
