"""Speculation of one engine: costs of passes, acceptance seen so far, and a drafter for each answer.  Engine thread."""

from collections.abc import Container, Sequence

from warmline_backend.speculation.acceptance import Acceptance
from warmline_backend.speculation.draft import GRAMMAR, Draft, DraftSource, TokenHistory
from warmline_backend.speculation.drafter import Drafter
from warmline_backend.speculation.lookup import PredictionLookup, PromptLookup
from warmline_backend.speculation.model_drafter import ModelDrafter
from warmline_backend.speculation.pass_costs import NOMINAL_COSTS, PassCosts, StepCosts
from warmline_backend.structured_output.matcher import Matcher


class GrammarSource:
    """Source of the tokens that the answer's grammar forces."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher

    def propose(self, history: TokenHistory, most: int) -> Draft | None:
        answer = history.answer_ids
        untaken = answer[min(len(answer), self._matcher.token_count) :].tolist()  # known, but not masked after yet
        forced = self._matcher.compute_forced(untaken)[:most]
        return Draft(forced, GRAMMAR, 1) if forced else None

    def rewind(self, history: TokenHistory) -> None:
        """Nothing is kept here: the matcher goes back by itself."""


class Speculation:
    """Maker of drafters.

    `costs`: None in exact mode, where drafts may depend on token ids alone.  `model`: of the draft model, if there is
    one.
    """

    def __init__(self, costs: PassCosts | None, model: ModelDrafter | None = None) -> None:
        self.is_exact, self.model, self._acceptance = costs is None, model, Acceptance()
        self.costs = StepCosts(costs or NOMINAL_COSTS, learns=costs is not None)

    def make_drafter(
        self, prompt: Sequence[int], prediction: Sequence[int], matcher: Matcher | None, ends: Container[int]
    ) -> Drafter:
        """Make the drafter of an answer, which the tokens `ends` end."""
        sources: list[DraftSource] = [GrammarSource(matcher)] if matcher is not None else []
        if prediction:
            sources.append(PredictionLookup(prediction))
        sources.append(PromptLookup())
        acceptance = Acceptance(Acceptance() if self.is_exact else self._acceptance)
        count_valid = len if matcher is None else matcher.count_valid
        lengths = self.model.make_lengths(self.costs, len(prompt)) if self.model is not None else None
        return Drafter(prompt, sources, acceptance, ends, count_valid, lengths)
