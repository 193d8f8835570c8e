"""Costs of decode passes by the tokens that they compute, and the best drafts by them.  Engine thread."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

PASS_TOKENS_MAX = 32  # of one sequence
BATCH_TOKENS_MAX = 128  # of all sequences of a pass that verifies drafts
GAIN_MIN = 1.1  # of a draft, over none: what it is expected to gain is not known better
STEP_WEIGHT = 0.1  # of the last step, in the usual duration
YIELD_WEIGHT = 0.2  # of the last pass, in the usual yield
NOMINAL_SECONDS = {1: 1.0, PASS_TOKENS_MAX: 3.0}  # of a pass in exact mode, where nothing may depend on a clock
NOMINAL_DRAFT_STEP_S = 0.15


class DraftOffer(NamedTuple):
    """A draft that one sequence of a pass could have verified.

    `is_last_guessed`: the token before it is not known yet, so that it is right only if that one was foreseen, too.
    """

    length: int
    acceptance: float
    is_last_guessed: bool = False


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


@dataclass(frozen=True)
class UsualPass:
    """Yield and width of the passes of a group of late."""

    average: PassYield
    width: float  # tokens that were computed of each sequence

    def approach(self, latest: "UsualPass") -> "UsualPass":
        """The same after one more pass."""
        mine, theirs = self.average, latest.average
        average = PassYield(_approach(mine.tokens, theirs.tokens), _approach(mine.cost, theirs.cost))
        return UsualPass(average, _approach(self.width, latest.width))


def _approach(usual: float, latest: float) -> float:
    return usual + YIELD_WEIGHT * (latest - usual)


class PassCosts:
    """Costs of passes by the tokens of all their sequences, in passes of one token; between measured ones on a line.

    `draft_step_s`: seconds that the draft model takes for a token; 0 without one.
    """

    def __init__(self, seconds_by_width: Mapping[int, float], draft_step_s: float = 0.0) -> None:
        widths = sorted(seconds_by_width)
        assert widths and widths[0] == 1
        seconds = list(accumulate((seconds_by_width[width] for width in widths), max))  # wider is never cheaper
        self.step_s = seconds[0]  # seconds of a single step
        self.draft_step = draft_step_s / seconds[0]  # cost of a token of the draft model
        self._costs = [_interpolate(widths, seconds, width) / seconds[0] for width in range(1, BATCH_TOKENS_MAX + 1)]

    def cost(self, tokens: int) -> float:
        """Cost of a pass of so many tokens; past BATCH_TOKENS_MAX, as many times as much."""
        counted = min(tokens, BATCH_TOKENS_MAX)
        return self._costs[counted - 1] * tokens / counted

    def choose_length(
        self,
        known: int,
        offers: Sequence[DraftOffer],
        sequences: int = 1,
        step_cost: float | None = None,
        token_cost: float = 0.0,
    ) -> int:
        """Length of the longest drafts of a pass, with the most tokens for the time; 0 where none is worth it.

        `offers`: of some of its `sequences`, each of which gets the `known` tokens computed in any case, and as many
        more as the longest draft.  `step_cost`: of a step without drafts, where that is known from steps.
        `token_cost`: of drafting one more token of each.
        """
        assert known > 0
        plain = self.cost(known * sequences) if step_cost is None else step_cost
        best_gain, best_length = GAIN_MIN * sequences / plain, 0
        shares = [offer.acceptance if offer.is_last_guessed else 1.0 for offer in offers]
        tokens = float(sequences)
        longest = max((offer.length for offer in offers), default=0)
        for length in range(1, min(longest, PASS_TOKENS_MAX - known, BATCH_TOKENS_MAX // sequences - known) + 1):
            for n, offer in enumerate(offers):
                shares[n] = shares[n] * offer.acceptance if length <= offer.length else 0.0
            tokens += sum(shares)
            if (gain := tokens / (self.cost((known + length) * sequences) + length * token_cost)) > best_gain:
                best_gain, best_length = gain, length
        return best_length

    def expect(self, length: int, acceptance: float, token_cost: float = 0.0) -> "PassYield":
        """Expected yield of a pass with a draft of `length`, where the token before it is known."""
        return PassYield(sum(acceptance**n for n in range(length + 1)), self.cost(1 + length) + length * token_cost)


class StepCosts:
    """Costs of passes of several sequences, in single steps of one: plain steps as seen of late, else by PassCosts."""

    def __init__(self, passes: PassCosts) -> None:
        self.passes = passes
        self._seconds: dict[int, float] = {1: passes.step_s}

    def record(self, sequences: int, seconds: float) -> None:
        """Record the duration of a step without drafts."""
        usual = self._seconds.get(sequences, seconds)
        self._seconds[sequences] = usual + STEP_WEIGHT * (seconds - usual)

    def cost(self, sequences: int) -> float:
        """Cost of a step without drafts.

        Such steps are sent ahead of each other, and so cost less than passes of as many tokens do.
        """
        seconds = self._seconds.get(sequences)
        return self.passes.cost(sequences) if seconds is None else seconds / self._seconds[1]

    def expect_yield(self, sequences: int) -> PassYield:
        """Yield of one step without drafts."""
        return PassYield(sequences, self.cost(sequences))

    def choose_length(self, known: int, offers: Sequence[DraftOffer], sequences: int, *, by_model: bool = False) -> int:
        """As PassCosts.choose_length; `known` is 1 for more than one sequence."""
        step_cost = self.cost(sequences) if sequences > 1 else None
        token_cost = self.draft_cost(sequences) if by_model else 0.0
        return self.passes.choose_length(known, offers, sequences, step_cost, token_cost)

    def draft_cost(self, sequences: int) -> float:
        """Cost of one token of the draft model for each of so many sequences."""
        return self.passes.draft_step * self.passes.cost(sequences)


def _interpolate(widths: list[int], seconds: list[float], width: int) -> float:
    """Seconds at a width; past the last one, as between the last two."""
    if len(widths) == 1:
        return seconds[0] * width
    right = min(max(1, bisect_left(widths, width)), len(widths) - 1)
    left = right - 1
    slope = (seconds[right] - seconds[left]) / (widths[right] - widths[left])
    return seconds[left] + slope * (width - widths[left])


NOMINAL_COSTS = PassCosts(NOMINAL_SECONDS, NOMINAL_DRAFT_STEP_S)
