"""Lookups: the longest repeat, the place that is followed, the client's prediction."""

import numpy as np
import pytest

from warmline_backend.speculation.draft import HISTORY_ROOM, Draft, TokenHistory
from warmline_backend.speculation.lookup import Match, PredictionLookup, PromptLookup, TokenIds, find_match


def make_ids(text: str) -> TokenIds:
    return np.array(list(text.encode()), np.uint32)


def make_history(text: bytes) -> TokenHistory:
    return TokenHistory(list(text))


def update(history: TokenHistory, text: bytes) -> None:
    history.update(list(text), ())


def read_draft(draft: Draft | None) -> str | None:
    return None if draft is None else bytes(draft.tokens).decode()


@pytest.mark.parametrize(
    ("text", "recent", "near", "found"),
    [
        ("the cat sat. the c", "the c", 99, (5, 5)),
        ("abcX abcY zbc!", "abc", 0, (3, 3)),
        ("abcX abcY zbc!", "abc", 4, (8, 3)),  # the first place from there on
        ("abcX abcY zbc!", "abc", 99, (8, 3)),  # else the last one
        ("abcX abcY zbc!", "zbc", 0, (13, 3)),  # the longer match goes first
        ("abc", "b", 0, None),
        ("abc", "xc", 0, None),  # one token is none
        ("abcab", "ab", 99, (2, 2)),  # never the end itself
        ("ab", "ab", 0, None),
        ("", "ab", 0, None),
    ],
)
def test_longest_repeat_is_found(text: str, recent: str, near: int, found: tuple[int, int] | None) -> None:
    match = find_match(make_ids(text), make_ids(recent), near)
    assert (match and (match.end, match.length)) == found


def test_match_of_random_texts_equals_a_search_by_hand() -> None:
    chance = np.random.default_rng(5)
    for _ in range(300):
        text = chance.integers(0, 3, chance.integers(1, 60)).astype(np.uint32)
        by_length = {
            end: next(n for n in range(33) if n == min(32, end) or text[end - 1 - n] != text[len(text) - 1 - n])
            for end in range(1, len(text))
        }
        longest = max(by_length.values(), default=0)
        places = [end for end, length in by_length.items() if length == longest]
        found = find_match(text, text, len(text))
        assert found == (Match(max(places), longest) if longest >= 2 else None)


def test_prompt_lookup_follows_a_text_that_is_written_again() -> None:
    history, lookup = make_history(b"one two three. one two four. Again: one"), PromptLookup()
    draft = lookup.propose(history, 9)
    assert read_draft(draft) == " two four" and draft and draft.match_length == 4
    history.update([*history.ids.tolist(), *b" two t"], ())
    assert read_draft(lookup.propose(history, 5)) == "hree."  # found anew where it parted
    history.update([*history.ids.tolist(), *b"hree"], ())
    draft = lookup.propose(history, 5)
    assert read_draft(draft) == ". one" and draft and draft.match_length > 9, "followed without a search"


def test_repeated_end_is_drafted_as_going_on() -> None:
    assert read_draft(PromptLookup().propose(make_history(b"x abab"), 7)) == "abababa"


def test_nothing_is_drafted_for_a_text_without_repeats() -> None:
    assert PromptLookup().propose(make_history(b"abcdefg"), 5) is None
    assert PromptLookup().propose(make_history(b""), 5) is None


def test_prediction_is_drafted_from_its_start_and_after_a_change() -> None:
    history, lookup = make_history(b"prompt"), PredictionLookup(list(b"def f(x):\n  return x\n"))
    said = b""

    def say(more: bytes) -> Draft | None:
        nonlocal said
        said += more
        update(history, b"prompt" + said)
        return lookup.propose(history, 6)

    assert read_draft(say(b"")) == "def f("
    assert read_draft(say(b"def f(")) == "x):\n  "
    assert say(b"long_name") is None
    assert read_draft(say(b"):\n")) == "  retu", "it is found again where both agree"
    assert say(b"  return x\n") is None, "all of it is written"
    assert lookup.count_agreed(history) == len("def f(") + len("  return x\n")


def test_rewound_history_is_looked_up_anew() -> None:
    history, prompt, prediction = make_history(b"abcd. "), PromptLookup(), PredictionLookup(list(b"abcdef"))
    update(history, b"abcd. ab")
    assert read_draft(prompt.propose(history, 2)) == "cd" and read_draft(prediction.propose(history, 2)) == "cd"
    history.truncate(6)
    prompt.rewind(history)
    prediction.rewind(history)
    update(history, b"abcd. d. ")
    assert read_draft(prompt.propose(history, 2)) == "d."
    assert prediction.propose(history, 2) is None


def test_history_grows_and_keeps_what_it_has() -> None:
    history, tokens = TokenHistory(range(5)), list(range(5))
    for n in range(3 * HISTORY_ROOM):
        following = [n, n + 1][: n % 3]
        history.update(tokens, following)
        assert history.ids.tolist()[-4:] == [*tokens, *following][-4:] and history.prompt_length == 5
        tokens += following
    assert history.ids.tolist() == tokens
