"""Turns of a conversation rendered one after the other: as each would be by itself, and with little work."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backend.small_tokenizers import CHATML, make_byte_level_tokenizer
from support.tool_templates import TOOL_TEMPLATE
from warmline_backend.prompt.message_ends import TextHasher, describe_text, hash_messages
from warmline_backend.prompt.renderer import RenderedPrompt, TemplateRenderer
from warmline_backend.prompt.tokenization import text_cache

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "hello 😀"}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": json.dumps({"path": "/"})}}
LOOKS = {"role": "assistant", "content": "", "reasoning_content": "let me look", "tool_calls": [CALL]}
SEEN = {"role": "tool", "content": "bin etc <|im_", "tool_call_id": "1"}
SAYS = {"role": "assistant", "content": "<think>\nnow I know\n</think>\n\nTwo folders."}
STEPS = [[USER], [LOOKS, SEEN], [SAYS, USER], [{**USER, "content": "start|> and <|im_end|>"}], [SAYS, USER, SAYS, USER]]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
TEMPLATES = {
    "plain": CHATML,
    "with tools": TOOL_TEMPLATE,
    # Earlier answers are rewritten once the user has spoken again.
    "rewriting": CHATML.replace("{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else 'x' }}"),
    "refusing": "{% if messages[-1].role == 'system' %}{{ raise_exception('No user') }}{% endif %}" + CHATML,
    "closing": CHATML + "{% if not add_generation_prompt %}<|im_end|>{% endif %}",
}


@pytest.fixture(scope="module", params=TEMPLATES)
def renderers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TemplateRenderer, ...]:
    tokenizer = make_byte_level_tokenizer(tmp_path_factory.mktemp("model"), TEMPLATES[request.param])
    return TemplateRenderer(tokenizer), TemplateRenderer(tokenizer)


def render(renderer: TemplateRenderer, messages: list[Any], root: bytes = b"", **fields: Any) -> RenderedPrompt:
    return renderer.render("chat", {"messages": messages, **fields}, root=root)


@settings(max_examples=20)
@given(st.lists(st.sampled_from(STEPS), min_size=2, max_size=8), st.booleans())
def test_turns_are_rendered_as_by_themselves(
    renderers: tuple[TemplateRenderer, ...], steps: list[list[Any]], with_tools: bool
) -> None:
    warm, cold = renderers
    messages, fields = [SYSTEM], {"tools": [TOOL]} if with_tools else {}
    warm.clear_cache()
    with patch.multiple(text_cache, TEXT_CHARS_MIN=1, BLOCK_CHARS=3):
        for step in steps:
            messages = [*messages, *step]
            cold.clear_cache()
            expected = render(cold, messages, **fields)
            assert render(warm, messages, **fields) == expected
            assert render(warm, messages, **fields) == expected
            edited = [*messages[:-1], {**messages[-1], "content": "another"}]
            cold.clear_cache()
            assert render(warm, edited, **fields) == render(cold, edited, **fields)


def count_template_calls(renderer: TemplateRenderer, messages: list[Any], **options: Any) -> int:
    tokenizer = renderer._wrapper._tokenizer
    with patch.object(tokenizer, "apply_chat_template", side_effect=tokenizer.apply_chat_template) as apply:
        render(renderer, messages, **options)
    return apply.call_count


def test_next_turn_applies_template_to_new_messages_alone(tmp_path: Path) -> None:
    renderer = TemplateRenderer(make_byte_level_tokenizer(tmp_path))
    messages = [SYSTEM, USER, *[SAYS, USER] * 20]
    first = count_template_calls(renderer, messages)
    assert first > 10
    later = [*messages, {**SAYS, "content": "new"}, USER]
    assert count_template_calls(renderer, later) == 4, "the whole, the turn's end, the answer's, the system message"
    assert count_template_calls(renderer, later) == 3
    assert count_template_calls(renderer, later, chat_template_kwargs={"x": 1}) == first
    assert count_template_calls(renderer, later, root=b"another") == first
    renderer.clear_cache()
    assert count_template_calls(renderer, later) == first


# ---- hashes


def test_messages_are_known_by_all_before_them() -> None:
    keys = hash_messages(b"", None, [SYSTEM, USER])
    assert len(set(keys)) == 3
    assert hash_messages(b"", None, [SYSTEM, USER, SAYS])[:3] == keys
    assert hash_messages(b"", None, [dict(SYSTEM), json.loads(json.dumps(USER))]) == keys, "equal, if not the same"
    for other in (hash_messages(b"r", None, [SYSTEM]), hash_messages(b"", {"x": 1}, [SYSTEM])):
        assert not set(other) & set(keys)
    assert hash_messages(b"", None, [USER, SYSTEM])[1:] != keys[1:]


def test_text_begins_with_what_it_begins_with() -> None:
    text = "漢字 and a😀b"
    hasher = TextHasher(text)
    for cut in (*range(len(text) + 1), 3, 0, len(text)):
        assert hasher.begins_with(describe_text(text[:cut]))
        assert not hasher.begins_with(describe_text(text[:cut] + "?"))
