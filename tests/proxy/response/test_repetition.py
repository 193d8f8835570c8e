"""Texts that RepetitionDetector detects, and texts that it does not."""

from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmline_proxy.response.repetition import (
    CYCLE_TOKENS_MAX,
    DIGITS_MAX,
    REPEATED_TOKENS_MAX,
    RepetitionDetector,
    chunk_text,
)


def detect(*pieces: str) -> str:
    detector = RepetitionDetector()
    for piece in pieces:
        detector.feed(piece)
    return detector.reason


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        (["!"] * 65, "one token repeated over 65 tokens"),
        (["Well", ",", *["!"] * 65], "one token repeated over 65 tokens"),
        ([" the", " same"] * 33, "a cycle of 2 tokens repeated over 66 tokens"),
        ([str(n) + "," for n in range(8)] * 9, "a cycle of 8 tokens repeated over 72 tokens"),
        ([str(n % 7) + str(n % 10) for n in range(128)], "a run of 256 digits"),
        (["x1", *[str(n * n % 10) + str(n % 9) for n in range(200)]], "a run of 257 digits"),
    ],
)
def test_repetition_is_detected(pieces: list[str], reason: str) -> None:
    assert detect(*pieces) == reason


@pytest.mark.parametrize(
    "pieces",
    [
        ["!"] * 64,
        [*["!"] * 60, "?", *["!"] * 60],
        [" the", " same"] * 32,
        [f"{n}," for n in range(9)] * 20,
        [f"{n % 10}{n % 7}" for n in range(127)],
        [f"{n}.{n}\n" for n in range(1000)],
        ["", *[""] * 1000],
    ],
)
def test_ordinary_text_is_not_detected(pieces: list[str]) -> None:
    assert not detect(*pieces)


def test_first_reason_stays() -> None:
    assert detect(*["!"] * 65, *["?"] * 100) == "one token repeated over 65 tokens"


@given(st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=CYCLE_TOKENS_MAX), st.lists(st.text(max_size=3)))
def test_every_short_cycle_is_detected(cycled: list[str], before: list[str]) -> None:
    pieces = islice(cycle(cycled), REPEATED_TOKENS_MAX + len(cycled))
    assert detect(*before, *pieces)


@given(st.lists(st.text("0123456789", min_size=1, max_size=4)))
def test_digit_run_counts_digits(pieces: list[str]) -> None:
    detector = RepetitionDetector()
    for piece in pieces:
        detector.feed(piece)
    digits = sum(map(len, pieces))
    assert ("digits" in detector.reason) <= (digits >= DIGITS_MAX)


@pytest.mark.parametrize(
    ("chunk", "text"),
    [
        (b'{"choices": [{"index": 0, "delta": {"content": " a\\n", "role": "assistant"}, "logprobs": {}}]}', " a\n"),
        (b'{"choices": [{"index": 0, "text": " a", "finish_reason": null}]}', " a"),
        (b'{"choices": [{"delta": {"reasoning_content": " a", "reasoning": " a"}}]}', " a"),
        (b'{"choices": [{"delta": {"content": null}}]}', ""),
        (b'{"choices": [{"delta": {}}]}', ""),
        (b'{"choices": [], "usage": {}}', ""),
        (b'{"error": {"message": "no"}}', ""),
        (b'{"choices": 5}', ""),
        (b"not JSON", ""),
    ],
)
def test_chunk_text_of_each_form(chunk: bytes, text: str) -> None:
    assert chunk_text(chunk) == text
