"""Fields of other servers: refused with a hint, unless they are off; misspelt ones are logged once."""

import logging

import pytest

from warmline_backend.request import field_names
from warmline_backend.request.field_names import (
    IGNORED_FIELDS,
    SUPPORTED_FIELDS,
    UNSUPPORTED_FIELDS,
    UNSUPPORTED_FIELDS_BY_ENDPOINT,
    TypoNotices,
    explain_missing_field,
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


def test_unsupported_fields_are_refused_with_hint() -> None:
    for endpoint, name in CASES:
        on = ON.get(name, 5)
        on = endpoint == "chat" if on is None else on
        refused = find_unsupported_field(endpoint, {"temperature": 1, name: on})
        assert refused is not None and refused[0] == name, (endpoint, name)
        assert any(word in refused[1] for word in ("send", "leave it out", "belong into the body")), (endpoint, refused)


OFF = {
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


def test_unsupported_fields_that_are_off_are_accepted() -> None:
    for endpoint, name in CASES:
        for value in OFF.get(name, FALSY):
            assert find_unsupported_field(endpoint, {name: value}) is None, (endpoint, name, value)


def test_empty_unsupported_fields_are_accepted() -> None:
    for name in ("options", "extra_body", "suffix", "bad_words", "lora", "functions"):
        for empty in ("", [], {}):
            assert find_unsupported_field("chat", {name: empty}) is None, (name, empty)


def test_true_is_not_one() -> None:
    assert find_unsupported_field("chat", {"best_of": True}) is not None
    assert find_unsupported_field("chat", {"best_of": 2}) == ("best_of", UNSUPPORTED_FIELDS["best_of"].hint)


def test_field_tables_are_disjoint() -> None:
    unsupported = set(UNSUPPORTED_FIELDS).union(*UNSUPPORTED_FIELDS_BY_ENDPOINT.values())
    assert not SUPPORTED_FIELDS & IGNORED_FIELDS and not unsupported & IGNORED_FIELDS
    assert unsupported & SUPPORTED_FIELDS == ELSEWHERE


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
    notices = TypoNotices()
    with caplog.at_level(logging.WARNING, field_names.__name__):
        for _ in range(2):
            notices.log_typos({"messages": [], "temprature": "secret", "max_token": 5, "agent": 1, "t" * 41: 1})
    assert [record.getMessage() for record in caplog.records] == [
        "request field 'max_token' is not known and has no effect; did you mean 'max_tokens'?",
        "request field 'temprature' is not known and has no effect; did you mean 'temperature'?",
    ]


def test_typo_names_are_bounded(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(field_names, "NAMES_MAX", 3)
    notices = TypoNotices()
    with caplog.at_level(logging.WARNING, field_names.__name__):
        notices.log_typos({f"temperatur{letter}": 1 for letter in "abcd"})
        notices.log_typos({"temprature": 1})
    assert len(caplog.records) == 3


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("messages", {"prompt": "x"}, "this body has 'prompt': send it to /v1/completions"),
        ("messages", {"input": "x", "message": []}, "this body has 'input': send it to /v1/responses"),
        ("messages", {"model": "m", "message": []}, "this body has 'message': write it 'messages'"),
        ("messages", {"Messages": []}, "write it 'messages'"),
        ("prompt", {"messages": []}, "send it to /v1/chat/completions"),
        ("prompt", {"promt": ""}, "write it 'prompt'"),
    ],
)
def test_missing_field_is_explained_by_another(name: str, body: dict[str, object], words: str) -> None:
    assert words in (explain_missing_field(name, body) or "")


def test_missing_field_without_another_is_not_explained() -> None:
    for body in ({}, {"model": "m"}, {"prompt": None}, {f"x{i}": 1 for i in range(1000)} | {"message": []}):
        assert explain_missing_field("messages", body) is None
