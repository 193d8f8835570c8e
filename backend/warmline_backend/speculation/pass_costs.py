"""Costs of decode passes by their width, the number of tokens that they compute, and the best draft by them.  Pure."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

PASS_TOKENS_MAX = 32
GAIN_MIN = 1.1  # of a draft, over none: what it is expected to gain is not known better
NOMINAL_SECONDS = {1: 1.0, PASS_TOKENS_MAX: 3.0}  # of a pass in exact mode, where nothing may depend on a clock


@dataclass(frozen=True)
class PassYield:
    """Tokens of a pass, and its cost in passes of one token."""

    tokens: float
    cost: float

    def __add__(self, other: "PassYield") -> "PassYield":
        """Yield of two passes, one after the other."""
        return PassYield(self.tokens + other.tokens, self.cost + other.cost)

    @property
    def speed(self) -> float:
        return self.tokens / self.cost


class PassCosts:
    """Costs of passes of 1 to PASS_TOKENS_MAX tokens, in passes of one token; between measured widths on a line."""

    def __init__(self, seconds_by_width: Mapping[int, float]) -> None:
        widths = sorted(seconds_by_width)
        assert widths and widths[0] == 1
        seconds = list(accumulate((seconds_by_width[width] for width in widths), max))  # wider is never cheaper
        self.step_s = seconds[0]  # seconds of a single step
        self._costs = [_interpolate(widths, seconds, width) / seconds[0] for width in range(1, PASS_TOKENS_MAX + 1)]

    def cost(self, width: int) -> float:
        return self._costs[min(width, PASS_TOKENS_MAX) - 1]

    def choose_length(self, known: int, most: int, acceptance: float, *, is_last_guessed: bool) -> int:
        """Length of the draft, of at most `most`, with the most tokens for the time; 0 where none is worth it.

        `known`: tokens that the pass has to compute in any case.  `is_last_guessed`: the last of them is not known
        yet, so that a draft is right only if the token before it was foreseen, too.
        """
        assert known > 0
        best_gain, best_length = GAIN_MIN / self.cost(known), 0
        share, tokens = (acceptance if is_last_guessed else 1.0), 1.0
        for length in range(1, min(most, PASS_TOKENS_MAX - known) + 1):
            share *= acceptance
            tokens += share
            if (gain := tokens / self.cost(known + length)) > best_gain:
                best_gain, best_length = gain, length
        return best_length

    def expect(self, length: int, acceptance: float) -> "PassYield":
        """Expected yield of a pass with a draft of `length`, where the token before it is known."""
        return PassYield(sum(acceptance**n for n in range(length + 1)), self.cost(1 + length))


def _interpolate(widths: list[int], seconds: list[float], width: int) -> float:
    """Seconds at a width; past the last one, as between the last two."""
    if len(widths) == 1:
        return seconds[0] * width
    right = min(max(1, bisect_left(widths, width)), len(widths) - 1)
    left = right - 1
    slope = (seconds[right] - seconds[left]) / (widths[right] - widths[left])
    return seconds[left] + slope * (width - widths[left])


NOMINAL_COSTS = PassCosts(NOMINAL_SECONDS)
