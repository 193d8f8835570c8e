"""Places that an answer goes back to: decisions, bans, bounds."""

from dataclasses import dataclass

import pytest

from warmline_backend.structured_output import redraw
from warmline_backend.structured_output.redraw import RedrawPolicy


@dataclass(frozen=True)
class Found:
    start: int = 0
    reason: str = "wrong"
    is_incomplete: bool = False
    is_final: bool = False


TOKENS = [10, 11, 12, 13, 14, 15, 16, 17]
FREE = [5] * 8


def test_violations_of_one_value_go_back_further_each_time() -> None:
    policy = RedrawPolicy()
    places = [policy.choose_position(TOKENS, FREE, 0, Found(start=2)) for _ in range(5)]
    assert places == [7, 6, 4, 2, 2], "a decision, two, four, eight; never before the value"
    assert policy.get_bans(2) == {12} and not policy.get_bans(4) and not policy.get_bans(7)
    assert policy.redraw_count == 5 and policy.redrawn_tokens == 1 + 2 + 4 + 6 + 6


def test_forced_tokens_are_no_decisions() -> None:
    allowed = [5, 5, 1, 3, 1, 2, 1, 1]
    policy = RedrawPolicy()
    assert [policy.choose_position(TOKENS, allowed, 0, Found()) for _ in range(3)] == [5, 3, 0]


def test_incomplete_value_and_dead_end_go_back_one_decision() -> None:
    policy = RedrawPolicy()
    for violation in (Found(is_incomplete=True), Found(is_incomplete=True), None):
        assert policy.choose_position(TOKENS, FREE, 0, violation) == 7
    assert policy.choose_position(TOKENS, [5] * 7 + [1], 0, None) == 6


def test_value_without_decision_is_changed_before_it() -> None:
    policy = RedrawPolicy()
    assert policy.choose_position(TOKENS, [5, 5, 5, 5, 1, 1, 1, 1], 1, Found(start=4)) == 3
    assert policy.choose_position(TOKENS, [5, 1, 1, 1, 1, 1, 1, 1], 1, Found(start=4)) is None, "sent tokens stay"


def test_bans_add_up_at_a_place_and_end_behind_it() -> None:
    policy, tokens = RedrawPolicy(), list(TOKENS)
    assert policy.choose_position(tokens, FREE, 0, None) == 7
    tokens[7] = 99
    assert policy.choose_position(tokens, FREE, 0, None) == 7
    assert policy.get_bans(7) == {17, 99}
    assert policy.choose_position(tokens[:7], FREE, 0, None) == 6
    assert policy.get_bans(6) == {16} and not policy.get_bans(7)


def test_new_value_at_a_later_place_counts_anew() -> None:
    policy = RedrawPolicy()
    assert [policy.choose_position(TOKENS, FREE, 0, Found(start=4)) for _ in range(2)] == [7, 6]
    assert policy.choose_position(TOKENS, FREE, 0, Found(start=0)) == 7
    assert policy.choose_position(TOKENS, FREE, 0, Found(start=0)) == 6
    assert policy.choose_position(TOKENS, FREE, 0, Found(start=0)) == 4
    assert policy.choose_position(TOKENS, FREE, 0, Found(start=0)) == 0, "the inner value is another now"
    assert policy.choose_position(TOKENS, FREE, 0, Found(start=4)) == 7


@pytest.mark.parametrize("length", [3, 8, 2000])
def test_redraws_are_bounded(length: int) -> None:
    policy, tokens = RedrawPolicy(), list(range(length))
    count, position = 0, policy.choose_position(tokens, [5] * length, 0, Found())
    while position is not None:
        count, position = count + 1, policy.choose_position(tokens, [5] * length, 0, Found())
    assert count == redraw.REDRAW_COUNT_MAX if length == 3 else 0 < count <= 2 * redraw.REDRAW_COUNT_MAX
    assert policy.redrawn_tokens <= 4 * max(64, length)


def test_sent_tokens_allow_further_redraws() -> None:
    policy = RedrawPolicy()
    for _ in range(redraw.REDRAW_COUNT_MAX):
        assert policy.choose_position(TOKENS, FREE, 0, None) is not None
    assert policy.choose_position(TOKENS, FREE, 0, None) is None
    assert policy.choose_position(TOKENS, FREE, 1, None) == 7


@pytest.mark.parametrize("wanted", range(16))
def test_every_value_of_a_few_decisions_is_tried(wanted: int) -> None:
    """A model that always prefers 0 to 1, and a value of four such tokens, of which one is valid."""
    policy, tokens, allowed_counts = RedrawPolicy(), list[int](), list[int]()
    while True:
        while len(tokens) < 4:
            allowed = [token for token in (0, 1) if token not in policy.get_bans(len(tokens))]
            tokens.append(allowed[0])
            allowed_counts.append(len(allowed))
        if int("".join(map(str, tokens)), 2) == wanted:
            return
        position = policy.choose_position(tokens, allowed_counts, 0, Found())
        assert position is not None, "given up"
        del tokens[position:], allowed_counts[position:]


def test_schema_that_is_too_costly_ends_the_answer() -> None:
    policy = RedrawPolicy()
    assert policy.choose_position([0, 0], [2, 2], 0, Found(is_final=True)) is None
    assert policy.choose_position([0, 0], [2, 2], 0, Found()) == 1
