"""Redaction: of a message's quoted texts only names of fields reach the log."""

import pytest

from warmline_common.process.redaction import is_field_name, quote_text, redact, redact_path, shorten_parser_message

KEPT = [
    "'temperature' must be a number from 0 to 2",
    "'messages[0].content[1].text' must be a string",
    "'tools' can't be used, and that's that",
    "Expected `str | null`, got `int` - at `$.messages[...].content`",
]
WITH_HIDDEN = [
    ("'n' must be an integer, not \"my secret\"", "'n' must be an integer, not \"…\""),
    ('not "a" secret "b", please', 'not "…", please'),
    ("cut 'off there", "cut '…'"),
    ('cut "off', 'cut "…"'),
    ("Object contains unknown field `secret`", "Object contains unknown field `…`"),
    ("'my secret' is not known", "'…' is not known"),
    ("no 'it's a secret' here, don't", "no '…' here, don't"),
    ("no 'my secret' and 'that' here", "no '…' here"),
    (f"not {chr(39)}a{chr(92)}{chr(39)} secret {chr(34)}x{chr(39)}.", "not '…'"),
    ("Invalid chunk: b'secret words'", "Invalid chunk: '…'"),
    ("seed 12345678901234567890 is too large", "seed … is too large"),
    (f"'{'a' * 41}' is not known", "'…' is not known"),
]


@pytest.mark.parametrize("text", KEPT)
def test_field_names_are_kept(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(("text", "expected"), WITH_HIDDEN)
def test_client_values_are_redacted(text: str, expected: str) -> None:
    assert redact(text) == expected


def test_library_quotes_are_redacted() -> None:
    assert redact("invalid literal for int(): 'secret'", keep_names=False) == "invalid literal for int(): '…'"


def test_message_is_one_bounded_line() -> None:
    assert redact("a\nb\r\n  c") == "a b c" and len(redact("word " * 1000)) <= 500


@pytest.mark.parametrize("text", ["my secret", "'it' is", 'so "it" is', "'\" it \"'", "\x1b[2K\n\udcff"])
def test_quoted_values_appear_nowhere(text: str) -> None:
    assert quote_text(text).isprintable() and redact(f"not {quote_text(text)}, please") == 'not "…", please'


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("messages[0].tool_calls", True), ("x-y", True), ("Once upon", False), ("é", False), ("", False)],
)
def test_is_field_name(name: str, is_one: bool) -> None:
    assert is_field_name(name) == is_one


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/requests/1a2b3c4d5e6f", "/v1/requests/…"),
        ("/v1/Secret", "/v1/…"),
        ("/v1/abc123/count_tokens", "/v1/…/count_tokens"),
        ("/v1/wl-abcdefghijklmnopqrstuvwxyz012345", "/v1/…"),
        ("/" + "a/" * 20, "/" + "a/" * 8 + "…"),
    ],
)
def test_redact_path_keeps_api_words(path: str, expected: str) -> None:
    assert redact_path(path) == expected


@pytest.mark.parametrize("quote", ["'", '"'])
def test_shorten_parser_message(quote: str) -> None:
    message = f"Invalid method encountered:\n\n  b{quote}SECRET{quote}\n    ^"
    assert shorten_parser_message(message) == "Invalid method encountered"
    assert shorten_parser_message("Data after `Connection: close`") == "Data after `Connection: close`"
    assert len(shorten_parser_message("x" * 1000)) == 120
