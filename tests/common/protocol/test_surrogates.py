"""Halves of surrogate pairs, in texts and as escapes of JSON."""

import itertools
import json

import pytest

from warmline_common.protocol.surrogates import replace_escaped_halves, replace_halves

PARTS = (r"\ud83d", r"\ude00", r"\uDBFF", r"\uDC00", r"\u0041", "x", r"\\", "\\\\ud83d", r"\n", "é", r"\"")


def replace_decoded_halves(text: str) -> str:
    """The right value: Python joins pairs when it decodes, and leaves halves."""
    return "".join("\ufffd" if "\ud800" <= letter <= "\udfff" else letter for letter in text)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_escaped_halves_are_replaced_in_any_place(length: int) -> None:
    for parts in itertools.product(PARTS, repeat=length):
        literal = f'"{"".join(parts)}"'
        replaced = replace_escaped_halves(literal.encode())
        expected = replace_decoded_halves(json.loads(literal))
        assert json.loads(replaced) == expected, literal
        assert replace_halves(json.loads(literal)) == expected, literal


def test_sound_data_stays_as_it_is() -> None:
    for text in ("", "plain", "smile \U0001f600", "\ufffd"):
        assert replace_halves(text) is text
        encoded = json.dumps({text: [text]}).encode()
        assert replace_escaped_halves(encoded) == encoded
