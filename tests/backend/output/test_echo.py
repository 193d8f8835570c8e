"""Completions with `echo`: allowed parameters, and the echoed text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from support.backend.live_backend import LiveBackend, with_backend
from warmline_backend.output.detokenizer import render_echo
from warmline_backend.request.params import BadRequestError, GenerationParams, parse_params

FolderOf = Callable[..., Path]


def parse_body(endpoint: str = "completion", **body: Any) -> GenerationParams:
    return parse_params(endpoint, body, context_tokens_max=100, prompt_tokens=10, vocabulary_size=300)


def test_echo_with_zero_tokens_generates_nothing() -> None:
    assert (parse_body(echo=True, max_tokens=0).max_tokens, parse_body(echo=True).max_tokens) == (0, 16)
    assert parse_body(echo=True).echo and not parse_body(echo=False).echo and not parse_body(echo=None).echo
    assert not parse_body("chat", echo=False).echo


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        ("completion", {"max_tokens": 0}, "max_tokens"),
        ("completion", {"max_tokens": 0, "echo": False}, "max_tokens"),
        ("completion", {"max_tokens": -2, "echo": True}, "max_tokens"),
        ("chat", {"max_tokens": 0}, "max_tokens"),
        ("chat", {"echo": True}, "echo"),
        ("completion", {"echo": True, "logprobs": 0}, "echo"),
        ("completion", {"echo": 1}, "echo"),
        ("chat", {"function_call": {"name": "f"}}, "function_call"),
        ("chat", {"modalities": ["audio"]}, "modalities"),
        ("chat", {"audio": {}}, "audio"),
    ],
)
def test_invalid_echo_is_refused(endpoint: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        parse_body(endpoint, **body)
    assert refused.value.param == param and f"'{param}'" in refused.value.message


def test_echo_is_prompt_as_sent(tiny_folder: FolderOf) -> None:
    tokenizer = load_tokenizer(tiny_folder("llama"))
    text = "Two  spaces, “quotes” "
    ids = tokenizer.encode(text, add_special_tokens=False)
    for prompt in (text, [text], ids, [ids]):
        assert render_echo({"prompt": prompt}, ids, tokenizer) == text


def test_backend_echoes_without_engine(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        body = {"prompt": "Say this", "echo": True, "max_tokens": 0}
        status, answer = await backend.request_json("POST", "/v1/completions", body)
        assert status == 200 and answer["choices"][0]["text"] == "Say this"
        assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 0
        status, model = await backend.request_json("GET", "/v1/models/any/name")
        assert status == 200 and model["id"] == "any/name" and model["created"] > 1_600_000_000
        assert model["root"] == (await backend.request_json("GET", "/v1/models"))[1]["data"][0]["id"]

    with_backend(tiny_folder("llama"), tmp_path, work)
