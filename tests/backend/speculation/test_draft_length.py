"""Length of drafts: costs of passes, acceptance by source and match, what is learned at no cost."""

from collections.abc import Sequence

import pytest

from warmline_backend.speculation.acceptance import Acceptance, classify
from warmline_backend.speculation.draft import GRAMMAR, PROMPT_LOOKUP, Draft, TokenHistory
from warmline_backend.speculation.drafter import Drafter
from warmline_backend.speculation.pass_costs import NOMINAL_COSTS, PASS_TOKENS_MAX, PassCosts

FLAT = PassCosts({1: 1.0, 32: 1.1})  # a dense model whose weights take the time
STEEP = PassCosts({1: 1.0, 2: 1.5, 4: 2.6, 8: 4.6})  # each token wakes further experts


def expected_tokens(length: int, acceptance: float) -> float:
    return sum(acceptance**n for n in range(length + 1))


@pytest.mark.parametrize("costs", [FLAT, STEEP, NOMINAL_COSTS], ids=["flat", "steep", "nominal"])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 0.95, 1.0])
def test_draft_has_the_best_length_for_its_time(costs: PassCosts, acceptance: float) -> None:
    gains = [expected_tokens(n, acceptance) / costs.cost(1 + n) for n in range(PASS_TOKENS_MAX)]
    length = costs.choose_length(1, 100, acceptance, is_last_guessed=False)
    assert gains[length] == pytest.approx(max(gains)) or (length == 0 and max(gains) <= 1.1)
    assert costs.choose_length(1, 3, acceptance, is_last_guessed=False) <= 3
    assert costs.choose_length(1, 100, acceptance, is_last_guessed=True) <= length
    assert costs.choose_length(PASS_TOKENS_MAX, 100, acceptance, is_last_guessed=False) == 0


def test_wider_passes_are_never_cheaper_and_lie_on_a_line() -> None:
    costs = PassCosts({1: 2.0, 2: 1.5, 4: 4.0})
    assert [costs.cost(width) for width in (1, 2, 3, 4, 6)] == [1.0, 1.0, 1.5, 2.0, 3.0]
    assert costs.cost(PASS_TOKENS_MAX + 5) == costs.cost(PASS_TOKENS_MAX)
    assert PassCosts({1: 1.0}).choose_length(1, 30, 0.99, is_last_guessed=False) == 0, "nothing wider was measured"


def test_acceptance_is_learned_by_answer_and_by_process() -> None:
    process, kind = Acceptance(), classify(PROMPT_LOOKUP, 4)
    usual, answer = process.estimate(kind), Acceptance(process)
    assert answer.estimate(kind) == usual
    for _ in range(30):
        answer.record(kind, 0, has_rejected=True)
    assert answer.estimate(kind) < 0.05 < process.estimate(kind) * 2 < usual
    assert Acceptance(process).estimate(kind) == process.estimate(kind), "the next answer begins with that"
    for _ in range(30):
        answer.record(kind, 5, has_rejected=False)
    assert answer.estimate(kind) > 0.8, "an answer that begins to repeat is noticed soon"
    assert answer.estimate(classify(PROMPT_LOOKUP, 32)) == pytest.approx(0.95)
    assert answer.estimate(classify(GRAMMAR, 1)) == pytest.approx(0.9)


class FixedSource:
    """Source that proposes these tokens at each place."""

    def __init__(self, tokens: Sequence[int], match_length: int = 2) -> None:
        self.tokens, self.match_length = list(tokens), match_length

    def propose(self, history: TokenHistory, most: int) -> Draft | None:
        return Draft(self.tokens[:most], PROMPT_LOOKUP, self.match_length) if self.tokens else None

    def rewind(self, history: TokenHistory) -> None:
        pass


def make_drafter(*sources: FixedSource, costs: PassCosts = FLAT, **options: object) -> Drafter:
    return Drafter([1, 2], list(sources), costs, Acceptance(), {0}, **options)  # type: ignore[arg-type]


def test_untried_tokens_are_compared_with_what_came() -> None:
    source = FixedSource([7] * 9)
    drafter, tokens = make_drafter(source, costs=STEEP), [1, 2]
    assert drafter.propose(tokens, (), 9, is_next_drawn=True) is None, "not worth its time yet"
    for _ in range(40):
        tokens.append(7)
        draft = drafter.propose(tokens, (), 9, is_next_drawn=True)
    assert draft is not None and draft.tokens[0] == 7, "it was right each time"
    for token in range(100, 140):
        tokens.append(token)
        draft = drafter.propose(tokens, (), 9, is_next_drawn=True)
        if draft is not None:
            drafter.record(draft, 0)
    assert draft is None


def test_drafts_have_no_end_tokens_and_nothing_that_the_grammar_forbids() -> None:
    assert make_drafter(FixedSource([0, 5])).propose([1], (2,), 9, is_next_drawn=False) is None
    draft = make_drafter(FixedSource([5, 6, 0, 7], 32)).propose([1], (2,), 9, is_next_drawn=False)
    assert draft is not None and draft.tokens == [5, 6]
    drafter = make_drafter(FixedSource([5, 6, 7], 32), count_valid=lambda tokens: tokens.index(6))
    draft = drafter.propose([1], (2,), 9, is_next_drawn=False)
    assert draft is not None and draft.tokens == [5]
    assert drafter.propose([1], (2,), 9, is_next_drawn=True) is None, "a guess of the next token alone drafts nothing"


def test_later_source_that_agrees_and_goes_further_is_taken() -> None:
    first, agreeing, other = FixedSource([5], 32), FixedSource([5, 6, 7], 32), FixedSource([8, 9], 32)
    drafts = [make_drafter(first, second).propose([1], (2,), 9, is_next_drawn=False) for second in (agreeing, other)]
    assert [draft.tokens for draft in drafts if draft is not None] == [[5, 6, 7], [5]]
