"""Length of drafts: costs of passes, acceptance by source and match, what is learned at no cost."""

from collections.abc import Sequence

import pytest

from warmline_backend.speculation.acceptance import Acceptance
from warmline_backend.speculation.draft import GRAMMAR, PROMPT_LOOKUP, Draft, DraftClass, TokenHistory
from warmline_backend.speculation.drafter import Drafter
from warmline_backend.speculation.pass_costs import (
    BATCH_TOKENS_MAX,
    NOMINAL_COSTS,
    PASS_TOKENS_MAX,
    DraftOffer,
    PassCosts,
    StepCosts,
)

FLAT = PassCosts({1: 1.0, 32: 1.1})  # a dense model whose weights take the time
STEEP = PassCosts({1: 1.0, 2: 1.5, 4: 2.6, 8: 4.6})  # each token wakes further experts


def classify(source: str, match_length: int) -> DraftClass:
    return Draft([], source, match_length).draft_class


def expected_tokens(length: int, acceptance: float) -> float:
    return sum(acceptance**n for n in range(length + 1))


@pytest.mark.parametrize("costs", [FLAT, STEEP, NOMINAL_COSTS], ids=["flat", "steep", "nominal"])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 0.95, 1.0])
def test_draft_has_the_best_length_for_its_time(costs: PassCosts, acceptance: float) -> None:
    gains = [expected_tokens(n, acceptance) / costs.cost(1 + n) for n in range(PASS_TOKENS_MAX)]
    length = costs.choose_length(1, [DraftOffer(100, acceptance)])
    assert gains[length] == pytest.approx(max(gains)) or (length == 0 and max(gains) <= 1.1)
    assert costs.choose_length(1, [DraftOffer(3, acceptance)]) <= 3
    assert costs.choose_length(1, [DraftOffer(100, acceptance, is_last_guessed=True)]) <= length
    assert costs.choose_length(PASS_TOKENS_MAX, [DraftOffer(100, acceptance)]) == 0
    assert costs.choose_length(1, []) == 0


@pytest.mark.parametrize("costs", [FLAT, STEEP], ids=["flat", "steep"])
@pytest.mark.parametrize("others", [[], [DraftOffer(4, 0.6)], [DraftOffer(31, 0.95), DraftOffer(2, 0.5, True)]])
def test_drafts_of_a_batch_have_the_best_width_together(costs: PassCosts, others: list[DraftOffer]) -> None:
    """Each sequence is computed as wide as the one with the longest draft; some have none."""
    offers, count = [DraftOffer(20, 0.9), *others], 4

    def expect(offer: DraftOffer, length: int) -> float:
        first = offer.acceptance if offer.is_last_guessed else 1.0
        return first * (expected_tokens(min(length, offer.length), offer.acceptance) - 1)

    gains = [
        (count + sum(expect(offer, n) for offer in offers)) / (costs.cost(count * (1 + n)) if n else 1.2)
        for n in range(PASS_TOKENS_MAX)
    ]
    length = costs.choose_length(1, offers, count, step_cost=1.2)
    assert gains[length] == pytest.approx(max(gains)) or (length == 0 and max(gains) <= 1.1 * gains[0])
    assert costs.choose_length(1, offers, 64, step_cost=1.2) <= 1, "no pass has more tokens than were measured"


def record_steps(costs: StepCosts, sequences: int, seconds: float, count: int = 80) -> None:
    for _ in range(count):
        costs.record_step(sequences, seconds)


def record_passes(costs: StepCosts, sequences: int, width: int, slowdown: float, count: int) -> None:
    cost = FLAT.cost(sequences * width)
    for _ in range(count):
        costs.record_pass(sequences, width, cost, slowdown * cost)


def test_duration_of_a_step_is_what_was_seen_of_late() -> None:
    costs = StepCosts(FLAT)
    record_steps(costs, 1, 1.0)
    assert costs.cost(4) == FLAT.cost(4)
    for seconds in (2.0, 1.5):
        for _ in range(80):
            costs.record_step(4, seconds)
            costs.record_step(1, 1.0)
        assert costs.cost(4) == pytest.approx(seconds, rel=0.05)
    record_steps(costs, 1, 0.5)
    assert costs.cost(4) > 2.5, "in single steps"
    record_steps(costs, 1, 0.5, 5000)
    assert costs.cost(4) == pytest.approx(FLAT.cost(4), rel=0.02), "what is not seen any more is forgotten"


def test_steps_of_other_numbers_of_sequences_are_expected_to_be_as_slow() -> None:
    """Long contexts slow all of them; else the number that was seen would look slower than those that were not."""
    costs = StepCosts(FLAT)
    record_steps(costs, 4, 3.0)
    for count in (1, 2, 3, 5, 64):
        assert costs.cost(count) == pytest.approx(FLAT.cost(count))
    assert costs.pass_cost(4, 16) == pytest.approx(FLAT.cost(16), rel=0.02), "passes, too"
    record_steps(costs, 1, 1.0)
    assert [costs.cost(n) / FLAT.cost(n) for n in (2, 3)] == pytest.approx([1.0, 2.8], rel=0.1), (
        "the nearest one counts"
    )


def test_pass_of_several_sequences_is_to_a_step_of_theirs_as_a_measured_one_is() -> None:
    """A pass of any width takes longer than a step that is sent ahead, if launching kernels takes the time."""
    launches = PassCosts({1: 1.0, 2: 1.4, 128: 1.4})
    costs = StepCosts(launches)
    record_steps(costs, 1, 1.0)
    assert costs.pass_cost(4, 16) == pytest.approx(1.4)
    record_steps(costs, 4, 1.7)
    assert costs.pass_cost(4, 16) == pytest.approx(1.4 * 1.7, rel=0.05)
    linear = StepCosts(PassCosts({1: 1.0, 2: 2.0, 128: 128.0}))
    record_steps(linear, 1, 1.0)
    record_steps(linear, 4, 4.0)
    assert linear.pass_cost(4, 16) == pytest.approx(16.0)


def test_first_step_and_pass_of_a_shape_say_nothing() -> None:
    """They compile kernels: sequences would be kept apart, and drafts left out, for what takes long once."""
    costs = StepCosts(FLAT)
    costs.record_step(4, 500.0)
    costs.record_step(1, 500.0)
    for width in range(2, 20):
        costs.record_pass(4, width, 1.0, 500.0)
    assert costs.expect_yield(4).speed > (costs.expect_yield(3) + costs.expect_yield(1)).speed
    assert [costs.cost(4), costs.pass_cost(4, 20)] == [FLAT.cost(4), FLAT.cost(20)]


def test_one_slow_step_is_forgotten() -> None:
    costs = StepCosts(FLAT)
    record_steps(costs, 1, 1.0, 2)
    costs.record_step(1, 500.0)
    record_passes(costs, 1, 3, 1.0, 3000)  # drafts look good beside such a step, and nothing else is seen
    assert costs.pass_cost(1, 3) == pytest.approx(FLAT.cost(3), rel=0.02)


def test_passes_that_take_longer_than_measured_are_left_out_for_a_while() -> None:
    costs, offers = StepCosts(FLAT), [DraftOffer(4, 0.5)] * 4
    assert costs.choose_length(1, offers, 4)
    record_passes(costs, 4, 5, 2.0, 2)
    assert costs.pass_cost(4, 20) == pytest.approx(1.5 * FLAT.cost(20)), "what was predicted counts as one pass"
    record_passes(costs, 4, 5, 2.0, 20)
    assert costs.pass_cost(4, 20) == pytest.approx(2.0 * FLAT.cost(20), rel=0.05)
    assert not costs.choose_length(1, offers, 4) and costs.choose_length(1, [DraftOffer(30, 0.95)] * 4, 4)
    assert costs.choose_length(1, [DraftOffer(4, 0.5)], 1), "so many sequences are what was seen"
    steps = 0
    while not costs.choose_length(1, offers, 4):
        costs.record_step(4, FLAT.cost(4))
        steps += 1
    assert 100 < steps < 2000, "it is tried again"
    costs.record_pass(4, 5, 1.0, 1000.0)
    assert costs.pass_cost(4, 20) < 3 * FLAT.cost(20), "one pass that compiles kernels says little"
    exact = StepCosts(FLAT, learns=False)
    record_steps(exact, 4, 9.0)
    record_passes(exact, 4, 5, 9.0, 5)
    assert exact.cost(4) == FLAT.cost(4) and exact.pass_cost(4, 20) == FLAT.cost(20)


def test_only_allowed_widths_are_chosen() -> None:
    """On CUDA, each new shape of a pass takes long once."""
    widths = (1, 2, 4, 8, 32)
    few = PassCosts({1: 1.0, 32: 1.1}, allowed_widths=widths)
    for acceptance in (0.5, 0.8, 1.0):
        for length in range(1, 40):
            for known, sequences in ((1, 1), (1, 4), (3, 1)):
                offers = [DraftOffer(length, acceptance)] * sequences
                chosen = few.choose_length(known, offers, sequences)
                assert not chosen or known + chosen in widths
    assert few.choose_length(1, [DraftOffer(6, 1.0)]) == 3 and few.choose_length(1, [DraftOffer(7, 1.0)]) == 7


def test_wider_passes_are_never_cheaper_and_lie_on_a_line() -> None:
    """One that was measured to take longer than a wider one was held up by something else."""
    costs = PassCosts({1: 2.0, 2: 2.5, 3: 3.0, 4: 2.0, 6: 3.0})
    assert [costs.cost(width) for width in (1, 2, 3, 4, 5, 6)] == [1.0, 1.0, 1.0, 1.0, 1.25, 1.5]
    costs = PassCosts({1: 2.0, 2: 2.0, 4: 4.0})
    assert [costs.cost(width) for width in (1, 2, 3, 4, 6)] == [1.0, 1.0, 1.5, 2.0, 3.0]
    assert costs.cost(2 * BATCH_TOKENS_MAX) == 2 * costs.cost(BATCH_TOKENS_MAX)
    assert PassCosts({1: 1.0}).choose_length(1, [DraftOffer(30, 0.99)]) == 0, "nothing wider was measured"


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


class ChoosingDrafter(Drafter):
    """Drafter of a sequence that is alone."""

    costs: PassCosts

    def choose(self, computed: list[int], following: list[int], *, is_next_drawn: bool = False) -> Draft | None:
        proposed = self.propose(computed, following, 9, is_next_drawn=is_next_drawn)
        if proposed is None:
            return None
        length = self.costs.choose_length(len(following) + is_next_drawn, [proposed.offer])
        return proposed.cut(length) if length else None


def make_drafter(*sources: FixedSource, costs: PassCosts = FLAT, **options: object) -> ChoosingDrafter:
    drafter = ChoosingDrafter([1, 2], list(sources), Acceptance(), {0}, **options)  # type: ignore[arg-type]
    drafter.costs = costs
    return drafter


def test_untried_tokens_are_compared_with_what_came() -> None:
    source = FixedSource([7] * 9)
    drafter, tokens = make_drafter(source, costs=STEEP), [1, 2]
    assert drafter.choose(tokens, [], is_next_drawn=True) is None, "not worth its time yet"
    for _ in range(40):
        tokens.append(7)
        draft = drafter.choose(tokens, [], is_next_drawn=True)
    assert draft is not None and draft.tokens[0] == 7, "it was right each time"
    for token in range(100, 140):
        tokens.append(token)
        draft = drafter.choose(tokens, [], is_next_drawn=True)
        if draft is not None:
            drafter.record(draft, 0)
    assert draft is None


def test_drafts_have_no_end_tokens_and_nothing_that_the_grammar_forbids() -> None:
    assert make_drafter(FixedSource([0, 5])).choose([1], [2]) is None
    draft = make_drafter(FixedSource([5, 6, 0, 7], 32)).choose([1], [2])
    assert draft is not None and draft.tokens == [5, 6]
    drafter = make_drafter(FixedSource([5, 6, 7], 32), count_valid=lambda tokens: tokens.index(6))
    draft = drafter.choose([1], [2])
    assert draft is not None and draft.tokens == [5]
    assert drafter.choose([1], [2], is_next_drawn=True) is None, "a guess of the next token alone drafts nothing"


def test_later_source_that_agrees_and_goes_further_is_taken() -> None:
    first, agreeing, other = FixedSource([5], 32), FixedSource([5, 6, 7], 32), FixedSource([8, 9], 32)
    drafts = [make_drafter(first, second).choose([1], [2]) for second in (agreeing, other)]
    assert [draft.tokens for draft in drafts if draft is not None] == [[5, 6, 7], [5]]
