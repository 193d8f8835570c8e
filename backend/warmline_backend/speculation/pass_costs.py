"""Costs of decode passes by the tokens that they compute, and the best drafts by them.  Engine thread."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

PASS_TOKENS_MAX = 32  # of one sequence
BATCH_TOKENS_MAX = 128  # of all sequences of a pass that verifies drafts
GAIN_MIN = 1.1  # of a draft, over none: what it is expected to gain is not known better
STEP_WEIGHT = 0.1  # of the last step, in the usual duration
YIELD_WEIGHT = 0.2  # of the last pass, in the usual yield and slowdown
FORGET_WEIGHT = 0.002  # of what was measured at first, with each step: what was slow is tried again some day
SLOWDOWN_MAX = 4.0  # that is taken from one step or pass: a first one may compile kernels
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

    `draft_step_s`: seconds that the draft model takes for a token; 0 without one.  `allowed_widths`: tokens of one
    sequence that a pass may compute where it verifies drafts; None where it may be any number.
    """

    def __init__(
        self,
        seconds_by_width: Mapping[int, float],
        draft_step_s: float = 0.0,
        allowed_widths: Container[int] | None = None,
    ) -> None:
        widths = sorted(seconds_by_width)
        assert widths and widths[0] == 1
        # A narrower pass costs no more than a wider one: where one was measured to, something else took the time.
        seconds = list(accumulate((seconds_by_width[width] for width in reversed(widths)), min))[::-1]
        self.step_s = seconds[0]  # seconds of a single step
        self.draft_step = draft_step_s / seconds[0]  # cost of a token of the draft model
        self._allowed_widths = range(PASS_TOKENS_MAX + 1) if allowed_widths is None else allowed_widths
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
            if known + length not in self._allowed_widths:
                continue
            if (gain := tokens / (self.cost((known + length) * sequences) + length * token_cost)) > best_gain:
                best_gain, best_length = gain, length
        return best_length

    def find_draft_cost(self, sequences: int) -> float:
        """Cost of one token of the draft model for each of so many sequences."""
        return self.draft_step * self.cost(sequences)


class StepCosts:
    """Costs of steps and passes of several sequences, in single steps of one sequence of late.

    What PassCosts measured holds for one sequence with a short context.  So durations are learned by the number of
    sequences: of steps without drafts, and how much slower than measured passes are that verify drafts.  `learns`: not
    in exact mode, where nothing may depend on a clock.
    """

    def __init__(self, passes: PassCosts, *, learns: bool = True) -> None:
        self.passes, self._learns = passes, learns
        self._step_s: dict[int, float] = {}
        self._counts: list[int] = []  # its keys in order
        self._slowdowns: dict[int, float] = {}
        self._seen_shapes = set[tuple[int, int]]()  # passes by their sequences and width; steps have width 1
        self._recorded = Counter[int]()  # passes whose duration was learned, by their sequences

    def record_step(self, sequences: int, seconds: float) -> None:
        """Record the duration of a step without drafts.

        Such steps are sent ahead of each other, and so cost less than passes of as many tokens do.
        """
        if not self._learns or self._is_first(sequences, 1):
            return
        self._forget()
        usual = self._step_seconds(sequences)
        seen = min(SLOWDOWN_MAX * usual, seconds)
        if sequences not in self._step_s:
            insort(self._counts, sequences)
        self._step_s[sequences] = usual + STEP_WEIGHT * (seen - usual)

    def record_pass(self, sequences: int, width: int, cost: float, seconds: float) -> None:
        """Record the duration of a pass that verified drafts, and of `cost` by PassCosts, drafting included.

        `width`: tokens that it computed of each sequence.
        """
        if not self._learns or self._is_first(sequences, width):
            return
        self._forget()
        usual = self._slowdown(sequences)
        seen = min(SLOWDOWN_MAX, max(1 / SLOWDOWN_MAX, seconds / (cost * self.passes.step_s)))
        self._recorded[sequences] += 1
        weight = max(YIELD_WEIGHT, 1 / (1 + self._recorded[sequences]))  # what was predicted counts as one pass
        self._slowdowns[sequences] = usual + weight * (seen - usual)

    def _is_first(self, sequences: int, width: int) -> bool:
        """True for the first pass of its shape, which may compile kernels, and says nothing of those after it."""
        is_first = (sequences, width) not in self._seen_shapes
        self._seen_shapes.add((sequences, width))
        return is_first

    def _step_seconds(self, sequences: int) -> float:
        """Seconds of a step without drafts; of a number of sequences that was not seen, as for the nearest that was."""
        seen = self._step_s.get(sequences)
        return self._predict_step(sequences) if seen is None else seen

    def _predict_step(self, sequences: int) -> float:
        """Seconds of a step without drafts, by those of other numbers of sequences.

        All are slower than PassCosts measured where contexts are long.
        """
        place = bisect_left(self._counts, sequences)
        others = [count for count in self._counts[max(0, place - 1) : place + 2] if count != sequences]
        nearest = min(others, key=lambda count: abs(count - sequences), default=None)
        ratio = self._step_s[nearest] / self.passes.cost(nearest) if nearest is not None else self.passes.step_s
        return ratio * self.passes.cost(sequences)

    def _slowdown(self, sequences: int) -> float:
        """Factor by which passes that verify drafts are slower than measured; a prediction before the first."""
        seen = self._slowdowns.get(sequences)
        return self._predict_slowdown(sequences) if seen is None else seen

    def _predict_slowdown(self, sequences: int) -> float:
        """Predict it: a pass of several sequences is to a step of theirs as one of two tokens is to a single step.

        A pass is waited for, steps are sent ahead: that is most of the cost where launching kernels takes the time.
        """
        if sequences not in self._step_s:
            return max(1.0, self._step_seconds(1) / self.passes.step_s)
        growth = self.passes.cost(2 * sequences) / self.passes.cost(2)
        return max(1.0, self._step_s[sequences] / (growth * self.passes.step_s))

    def _forget(self) -> None:
        """Go back a little to what was predicted: what is slow is avoided, and not seen any more."""
        predicted = {count: self._predict_step(count) for count in self._step_s}
        for count, seconds in predicted.items():
            self._step_s[count] += FORGET_WEIGHT * (seconds - self._step_s[count])
        for count, slowdown in self._slowdowns.items():
            self._slowdowns[count] = slowdown + FORGET_WEIGHT * (self._predict_slowdown(count) - slowdown)

    def cost(self, sequences: int) -> float:
        """Cost of a step without drafts."""
        return self._step_seconds(sequences) / self._step_seconds(1)

    def pass_cost(self, sequences: int, tokens: int) -> float:
        """Cost of a pass that verifies drafts, of so many tokens of all its sequences."""
        return self._scale(sequences) * self.passes.cost(tokens)

    def draft_cost(self, sequences: int) -> float:
        """Cost of one token of the draft model for each of so many sequences."""
        return self._scale(sequences) * self.passes.find_draft_cost(sequences)

    def expect_yield(self, sequences: int) -> PassYield:
        """Yield of one step without drafts."""
        return PassYield(sequences, self.cost(sequences))

    def expect_pass(self, offer: DraftOffer, *, by_model: bool = False) -> tuple[PassYield, int]:
        """Expected yield of the best pass of one sequence whose next token is known, and its width."""
        length = self.choose_length(1, [offer._replace(is_last_guessed=False)], 1, by_model=by_model)
        if not length:
            return self.expect_yield(1), 1
        cost = self.pass_cost(1, 1 + length) + by_model * length * self.draft_cost(1)
        return PassYield(sum(offer.acceptance**n for n in range(length + 1)), cost), 1 + length

    def choose_length(self, known: int, offers: Sequence[DraftOffer], sequences: int, *, by_model: bool = False) -> int:
        """As PassCosts.choose_length; `known` is 1 for more than one sequence."""
        step_cost = self.cost(sequences) / self._scale(sequences) if known == 1 else None
        token_cost = self.passes.find_draft_cost(sequences) if by_model else 0.0
        return self.passes.choose_length(known, offers, sequences, step_cost, token_cost)

    def _scale(self, sequences: int) -> float:
        """Cost of a pass that verifies drafts, to the one by PassCosts."""
        return self._slowdown(sequences) * self.passes.step_s / self._step_seconds(1)


def _interpolate(widths: list[int], seconds: list[float], width: int) -> float:
    """Seconds at a width; past the last one, as between the last two."""
    if len(widths) == 1:
        return seconds[0] * width
    right = min(max(1, bisect_left(widths, width)), len(widths) - 1)
    left = right - 1
    slope = (seconds[right] - seconds[left]) / (widths[right] - widths[left])
    return seconds[left] + slope * (width - widths[left])


NOMINAL_COSTS = PassCosts(NOMINAL_SECONDS, NOMINAL_DRAFT_STEP_S)
