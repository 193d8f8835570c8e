"""Halves of surrogate pairs in a body, or in a call's arguments, are rendered as U+FFFD."""

from pathlib import Path
from typing import Any

import pytest

from support.backend.small_tokenizers import make_byte_level_tokenizer
from warmline_backend.prompt.renderer import TemplateRenderer

USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    folder: Path = tmp_path_factory.mktemp("halves")
    return TemplateRenderer(make_byte_level_tokenizer(folder))


@pytest.mark.parametrize(("half", "whole"), [("\ud800", "\ufffd"), ("a\ude00b", "a\ufffdb")])
def test_half_is_a_replacement_character(renderer: TemplateRenderer, half: str, whole: str) -> None:
    def render_all(text: str) -> list[Any]:
        chats = ([{"role": "user", "content": text}], [USER, {"role": "assistant", "content": text}, USER])
        rendered = [renderer.render("chat", {"messages": messages}) for messages in chats]
        return [*rendered, renderer.render("completion", {"prompt": text})]

    assert render_all(half) == render_all(whole)


def test_half_within_arguments_is_a_replacement_character(renderer: TemplateRenderer) -> None:
    """JSON in JSON: the body itself has no half."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": r'{"x": "cut \ud83d"}'}}
    calling, result = {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "x"}
    assert renderer.render("chat", {"messages": [USER, calling, result]}).tokens
