"""Fields of other servers: refused with a hint, unless they are off; misspelt ones are logged once."""

import logging

import pytest

from warmline_backend.request import fields as field_names
from warmline_backend.request.fields import (
    IGNORED_FIELDS,
    SUPPORTED_FIELDS,
    UNSUPPORTED_FIELDS,
    UNSUPPORTED_FIELDS_BY_ENDPOINT,
    TypoNotices,
    find_unsupported_field,
    suggest_field,
)

CASES = [
    (endpoint, name)
    for endpoint in ("chat", "completion")
    for name in sorted(UNSUPPORTED_FIELDS.keys() | UNSUPPORTED_FIELDS_BY_ENDPOINT[endpoint])
]
ON: dict[str, object] = {"add_special_tokens": None, "skip_special_tokens": False}  # None: by the endpoint
ELSEWHERE = {"prompt", "messages", "tools", "echo", "top_logprobs"}  # served by the other endpoint


@pytest.mark.parametrize(("endpoint", "name"), CASES)
def test_unsupported_fields_are_refused_with_hint(endpoint: str, name: str) -> None:
    on = ON.get(name, 5)
    on = endpoint == "chat" if on is None else on
    refused = find_unsupported_field(endpoint, {"temperature": 1, name: on})
    assert refused is not None and refused[0] == name
    assert "send" in refused[1] or "leave it out" in refused[1] or "belong into the body" in refused[1]


OFF = {
    "think": [None],
    "add_special_tokens": [None],
    "skip_special_tokens": [None, True],
    "modalities": [None, [], ["text"]],
    "function_call": [None, "none", "auto"],
    "best_of": [None, 1],
    "repeat_penalty": [None, 0, 1, 1.0],
    "typical_p": [None, 1.0],
    "n_predict": [None, -1],
    "top_n_sigma": [None, -1],
}
FALSY = [None, False, 0, 0.0]


@pytest.mark.parametrize(("endpoint", "name"), CASES)
def test_unsupported_fields_that_are_off_are_accepted(endpoint: str, name: str) -> None:
    for value in OFF.get(name, FALSY):
        assert find_unsupported_field(endpoint, {name: value}) is None, value


@pytest.mark.parametrize("name", ["options", "extra_body", "suffix", "bad_words", "lora", "functions"])
@pytest.mark.parametrize("empty", ["", [], {}])
def test_empty_unsupported_fields_are_accepted(name: str, empty: object) -> None:
    assert find_unsupported_field("chat", {name: empty}) is None


def test_true_is_not_one() -> None:
    assert find_unsupported_field("chat", {"best_of": True}) is not None
    assert find_unsupported_field("chat", {"best_of": 2}) == ("best_of", UNSUPPORTED_FIELDS["best_of"].hint)


def test_field_tables_are_disjoint() -> None:
    foreign = (
        UNSUPPORTED_FIELDS.keys()
        | UNSUPPORTED_FIELDS_BY_ENDPOINT["chat"].keys()
        | UNSUPPORTED_FIELDS_BY_ENDPOINT["completion"].keys()
    )
    assert not SUPPORTED_FIELDS & IGNORED_FIELDS and not foreign & IGNORED_FIELDS
    assert foreign & SUPPORTED_FIELDS == ELSEWHERE


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("top-p", "top_p"),
        ("frequencyPenalty", "frequency_penalty"),
        ("response_fromat", "response_format"),
        ("tool_choices", "tool_choice"),
        ("stops", "stop"),
        ("temperature", None),
        ("verbosity", None),
        ("reasoning_format", None),
        ("n_predict", None),
        ("num_ctx", None),
        ("client_metadata", None),
        ("max_tool_calls", None),
        ("", None),
        ("temp\nrature", None),
        ("тemperature", None),
    ],
)
def test_similar_names_are_suggested(name: str, meant: str | None) -> None:
    assert suggest_field(name) == meant


def test_typo_is_logged_once_without_value(caplog: pytest.LogCaptureFixture) -> None:
    slips = TypoNotices()
    with caplog.at_level(logging.WARNING, field_names.__name__):
        for _ in range(2):
            slips.log_typos({"messages": [], "temprature": "secret", "max_token": 5, "agent": 1, "t" * 41: 1})
    assert [record.getMessage() for record in caplog.records] == [
        "request field 'max_token' is not known and has no effect; did you mean 'max_tokens'?",
        "request field 'temprature' is not known and has no effect; did you mean 'temperature'?",
    ]


def test_typo_names_are_bounded(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(field_names, "NAMES_MAX", 3)
    slips = TypoNotices()
    with caplog.at_level(logging.WARNING, field_names.__name__):
        slips.log_typos({f"temperatur{letter}": 1 for letter in "abcd"})
        slips.log_typos({"temprature": 1})
    assert len(caplog.records) == 3
