"""Malformed calls of a model, as agents send them back: rendered by templates of every kind."""

import json
from typing import Any

import pytest

from support.backend.template_rendering import MakeRenderer, cache_renderers, render_text
from warmline_backend.prompt.messages import decode_arguments

USER = {"role": "user", "content": "hello"}
ID, OTHER_ID = "call_0123456789abcdef01234567", "call_76543210fedcba9876543210"

TURNS = "{% for m in messages %}{{ m.role }}:{{ m.content }}CALLS;{% endfor %}"
LOOP = "{% for c in m.tool_calls or [] %}[ARGUMENTS]{% endfor %}"
CALLS = TURNS.replace("CALLS", LOOP)
AS_JSON = CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
AS_ITEMS = CALLS.replace(
    "ARGUMENTS", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{% endfor %}"
)
# Text as it is, an object item by item.
AS_EITHER = CALLS.replace(
    "ARGUMENTS",
    "{% set a = c.function.arguments %}{% if a is string %}{{ a }}"
    "{% else %}{% for k, v in a.items() %}{{ k }}={{ v | tojson }}{% endfor %}{% endif %}",
)
AS_TEXT = CALLS.replace("ARGUMENTS", "{{ c.function.arguments + '' }}")
HIDING = CALLS.replace(
    "ARGUMENTS", "{% if c.function.arguments is mapping %}{{ c.function.arguments | tojson }}{% endif %}"
)
SINGLE = CALLS.replace(LOOP, "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}" + LOOP)
SINGLE = SINGLE.replace("ARGUMENTS", "{{ c.id[5:8] }}{{ c.function.arguments | tojson }}")
FIRST_ONLY = AS_JSON.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> MakeRenderer:
    return cache_renderers(tmp_path_factory.mktemp("models"))


def make_call(arguments: Any, call_id: str = ID) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def make_exchange(arguments: Any) -> list[Any]:
    calling = {"role": "assistant", "content": None, "tool_calls": [make_call(arguments)]}
    return [USER, calling, {"role": "tool", "tool_call_id": ID, "content": "no"}, USER]


WHOLE = '{"a": "b"}'
TEXTS = {"cut": '{"a": "b', "plain": "ls -la", "two objects": WHOLE + WHOLE, "quoted": '"ls'}
VALUES: dict[str, Any] = {"list": '["ls"]', "number": "5", "boolean": "true", "string": '"ls"'}
OBJECTS: dict[str, tuple[Any, Any]] = {
    "whole": (WHOLE, {"a": "b"}),
    "an object": ({"a": "b"}, {"a": "b"}),
    "encoded twice": (json.dumps(WHOLE), {"a": "b"}),
    "encoded thrice": (json.dumps(json.dumps(WHOLE)), {"a": "b"}),
    "empty": ("", {}),
    "blank": (" \n", {}),
    "null text": ("null", {}),
    "null": (None, {}),
    "null encoded twice": ('"null"', {}),
    "encoded inside": ('{"a": "{}"}', {"a": "{}"}),
}


@pytest.mark.parametrize(("arguments", "expected"), OBJECTS.values(), ids=OBJECTS)
def test_objects_are_recovered(make: MakeRenderer, arguments: Any, expected: Any) -> None:
    items = "".join(f"{key}={json.dumps(value)}" for key, value in expected.items())
    for template, shown in (
        (AS_JSON, json.dumps(expected)),
        (AS_ITEMS, items),
        (AS_EITHER, items),
        (AS_TEXT, json.dumps(expected)),
        (HIDING, json.dumps(expected)),
    ):
        text = render_text(make(template), *make_exchange(arguments))
        assert text == f"user:hello;assistant:[{shown}];tool:no;user:hello;"


@pytest.mark.parametrize("arguments", TEXTS.values(), ids=TEXTS)
def test_other_text_is_shown(make: MakeRenderer, arguments: str) -> None:
    for template, shown in (
        (AS_JSON, json.dumps(arguments)),
        (AS_ITEMS, f"arguments={json.dumps(arguments)}"),
        (AS_EITHER, arguments),
        (AS_TEXT, arguments),
        (HIDING, json.dumps({"arguments": arguments})),
    ):
        text = render_text(make(template), *make_exchange(arguments))
        assert text == f"user:hello;assistant:[{shown}];tool:no;user:hello;"


@pytest.mark.parametrize("arguments", VALUES.values(), ids=VALUES)
def test_other_values_are_shown(make: MakeRenderer, arguments: str) -> None:
    plain = arguments.strip('"')
    for template, shown in (
        (AS_JSON, arguments),
        (AS_ITEMS, f"arguments={json.dumps(plain)}"),
        (AS_EITHER, plain),
        (AS_TEXT, plain),
    ):
        text = render_text(make(template), *make_exchange(arguments))
        assert text == f"user:hello;assistant:[{shown}];tool:no;user:hello;"


@pytest.mark.parametrize("levels", [128, 129, 5_000, 100_000])
@pytest.mark.parametrize("brackets", ["[]", ['{"a": ', "}"]])
def test_deeply_nested_arguments_stay_text(make: MakeRenderer, levels: int, brackets: Any) -> None:
    """The bound is a number of ours, not one of Python's."""
    begin, end = brackets
    arguments = '{"a": ' + begin * (levels - 1) + "1" + end * (levels - 1) + "}"
    decoded = decode_arguments(arguments)
    assert isinstance(decoded, dict) if levels <= 128 else decoded == arguments
    assert "1" in render_text(make(AS_JSON), *make_exchange(arguments))


def test_deeply_encoded_arguments_are_bounded() -> None:
    arguments = WHOLE
    for _ in range(5):
        arguments = json.dumps(arguments)
    assert decode_arguments(arguments) == json.loads(arguments)
    assert decode_arguments('{"a":' * 20_000) == '{"a":' * 20_000


def test_several_calls_become_single_ones(make: MakeRenderer) -> None:
    calls = [make_call('{"a": 1}'), make_call('{"a": 2}', OTHER_ID)]
    calling = {"role": "assistant", "content": "Both.", "tool_calls": calls, "reasoning_content": "hm"}
    results = [{"role": "tool", "tool_call_id": call_id, "content": call_id[5:8]} for call_id in (OTHER_ID, ID)]
    text = render_text(make(SINGLE), USER, calling, *results, USER)
    assert text == ('user:hello;assistant:Both.[012{"a": 1}];tool:012;assistant:[765{"a": 2}];tool:765;user:hello;')
    nameless = [{"role": "tool", "content": "x"}, {"role": "tool", "content": "y"}]
    text = render_text(make(FIRST_ONLY), USER, calling, *nameless)
    assert text == 'user:hello;assistant:Both.[{"a": 1}];assistant:[{"a": 2}];tool:x;tool:y;'
    assert render_text(make(AS_JSON), USER, calling).endswith('Both.[{"a": 1}][{"a": 2}];'), "as it is elsewhere"
