"""Drafter of one answer: asks the sources, judges how much of a draft is worth a try, and learns.  Engine thread."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from warmline_backend.speculation.acceptance import Acceptance
from warmline_backend.speculation.draft import DRAFT_MODEL, Draft, DraftClass, DraftSource, TokenHistory
from warmline_backend.speculation.lookup import PredictionLookup
from warmline_backend.speculation.model_drafter import MODEL_TOKENS_MAX, ModelDraftLengths
from warmline_backend.speculation.pass_costs import PASS_TOKENS_MAX, DraftOffer

_BY_MODEL = Draft([], DRAFT_MODEL, 1).draft_class


@dataclass(frozen=True)
class ProposedDraft:
    """A draft, and the probability that its next token is right, those before it being so.

    `is_first_guess`: its first token is a guess of the next one, which the pass computes in any case.
    """

    draft: Draft
    acceptance: float
    is_first_guess: bool

    @property
    def offer(self) -> DraftOffer:
        return DraftOffer(len(self.draft.tokens) - self.is_first_guess, self.acceptance, self.is_first_guess)

    def cut(self, length: int) -> Draft:
        """The draft, with at most `length` tokens that the pass would not compute anyway."""
        return replace(self.draft, tokens=self.draft.tokens[: length + self.is_first_guess])


@dataclass(frozen=True)
class _UntriedToken:
    """A token that was foreseen, and left to a plain step: it shows at no cost what drafts are worth."""

    draft_class: DraftClass
    position: int
    token: int


class Drafter:
    """Drafts of one answer.

    `sources`: best first.  `ends`: tokens that end an answer.  `count_valid` counts the leading tokens of a draft that
    the answer's grammar allows.  `model_lengths`: of drafts of a draft model, which is asked where the sources have
    nothing; None without one.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sources: list[DraftSource],
        acceptance: Acceptance,
        ends: Container[int],
        count_valid: Callable[[list[int]], int] = len,
        model_lengths: ModelDraftLengths | None = None,
    ) -> None:
        self._history, self._sources, self._acceptance = TokenHistory(prompt), sources, acceptance
        self._ends, self._count_valid = ends, count_valid
        self._model_lengths = model_lengths
        self._untried: _UntriedToken | None = None
        self.has_proposed = False  # when it was last asked

    def propose(
        self, computed: Sequence[int], following: Sequence[int], most: int, *, is_next_drawn: bool
    ) -> ProposedDraft | None:
        """Propose a draft after the `computed` tokens and those `following`, whose rows are still to be computed.

        `is_next_drawn`: the next token is drawn already, but not known yet.  The draft's first token is a guess of it
        then, and the next pass computes the token itself.  `most`: tokens that the answer may still get.
        """
        self._history.update(computed, following)
        self._learn()
        draft = self._find_draft(most + is_next_drawn, [] if is_next_drawn else following[-1:])
        self.has_proposed = draft is not None
        if draft is None:
            return None
        self._untried = _UntriedToken(draft.draft_class, self._history.length, draft.tokens[0])
        return ProposedDraft(draft, self._acceptance.estimate(draft.draft_class), is_next_drawn)

    def choose_model_length(self, known: int, most: int, sequences: int) -> int:
        """Length of a draft to ask the draft model for, of at most `most` tokens; 0 for none.

        `known`: tokens that a pass of so many sequences has to compute of each in any case, the next one included.
        Call `propose` before.
        """
        if self._model_lengths is None:
            return 0
        acceptance = self._acceptance.estimate(_BY_MODEL)
        return self._model_lengths.choose(self._history.length, known, most, acceptance, sequences)

    def offer_by_model(self) -> DraftOffer | None:
        """Draft that the draft model could be asked for; None without one, or beyond its context."""
        if self._model_lengths is None or not self._model_lengths.is_in_context(self._history.length):
            return None
        return DraftOffer(MODEL_TOKENS_MAX, self._acceptance.estimate(_BY_MODEL))

    def make_model_draft(self, tokens: list[int], next_token: int) -> Draft | None:
        """Draft of tokens that the draft model foresees after the next one, as far as the answer may have them."""
        tokens = self._cut(tokens, [next_token])
        return Draft(tokens, DRAFT_MODEL, 1) if tokens else None

    def record(self, draft: Draft, accepted: int) -> None:
        """Record that the draft's first `accepted` tokens were right, and no further one."""
        self._untried = None
        self._acceptance.record(draft.draft_class, accepted, has_rejected=accepted < len(draft.tokens))
        if draft.source == DRAFT_MODEL and self._model_lengths is not None:
            self._model_lengths.record_trial(self._history.length, is_right=accepted == len(draft.tokens))

    def count_predicted(self, tokens: Sequence[int]) -> int:
        """Count the answer's tokens that the client foresaw; `tokens`: of prompt and answer."""
        self._history.update(tokens, ())
        lookups = (source for source in self._sources if isinstance(source, PredictionLookup))
        return sum(source.count_agreed(self._history) for source in lookups)

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens of prompt and answer."""
        self._history.truncate(length)
        self._untried = None
        for source in self._sources:
            source.rewind(self._history)

    def _find_draft(self, most: int, untaken: Sequence[int]) -> Draft | None:
        """The first source's draft, or another one that goes on where it ends; without tokens that end an answer.

        `untaken`: the last tokens, where the answer's grammar has not taken them yet.
        """
        found: Draft | None = None
        for source in self._sources:
            draft = source.propose(self._history, min(most, PASS_TOKENS_MAX))
            if draft is not None and (found is None or draft.tokens[: len(found.tokens)] == found.tokens):
                found = draft
        if found is None:
            return None
        tokens = self._cut(found.tokens, untaken)
        return replace(found, tokens=tokens) if tokens else None

    def _cut(self, tokens: list[int], untaken: Sequence[int]) -> list[int]:
        """Tokens before one that ends an answer, or that its grammar does not allow."""
        end = next((n for n, token in enumerate(tokens) if token in self._ends), len(tokens))
        return tokens[: max(0, self._count_valid([*untaken, *tokens[:end]]) - len(untaken))]

    def _learn(self) -> None:
        untried, self._untried = self._untried, None
        if untried is not None and untried.position < self._history.length:
            is_right = int(self._history.ids[untried.position]) == untried.token
            self._acceptance.record(untried.draft_class, int(is_right), has_rejected=not is_right)
