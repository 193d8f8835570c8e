"""Tools without their optional fields: completed for templates that fail without, and for no others."""

import json
from typing import Any

import pytest

from support.backend.template_rendering import MakeRenderer, cache_renderers, render_text
from warmline_backend.request.params import BadRequestError

USER = {"role": "user", "content": "hello"}
TURNS = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
PLAIN = "{% for t in tools or [] %}{{ t | tojson }};{% endfor %}" + TURNS
DESCRIBED = "{% for t in tools or [] %}{{ t.function.name + ' ' + t.function.description }};{% endfor %}" + TURNS
LISTED = (
    "{% for t in tools or [] %}{% set f = t.function %}{{ f.name }}"
    "{% for name, p in f.parameters.properties.items() %} {{ name }}"
    "{{ '!' if name in f.parameters.required | default([]) }}{% endfor %};{% endfor %}" + TURNS
)
DUMPED = "{% for t in tools or [] %}{{ t.function.name ~ (t.function.parameters | tojson) }};{% endfor %}" + TURNS
BOTH = DESCRIBED.removesuffix(TURNS) + LISTED
TYPED = (
    "{% for t in tools or [] %}{{ t.function.name }}"
    "{% for name, p in t.function.parameters.properties.items() %} {{ name + ' ' + p.type }}{% endfor %};{% endfor %}"
    + TURNS
)
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
PATH: dict[str, Any] = {"path": {"type": "string"}}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> MakeRenderer:
    return cache_renderers(tmp_path_factory.mktemp("models"))


def make_tool(name: str = "now", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


BARE: dict[str, dict[str, Any]] = {
    "name alone": {},
    "description null": {"description": None, "parameters": NOTHING},
    "no parameters": {"description": "d"},
    "parameters null": {"description": "d", "parameters": None},
    "parameters empty": {"description": "d", "parameters": {}},
    "no properties": {"description": "d", "parameters": {"type": "object"}},
    "properties null": {"description": "d", "parameters": {"type": "object", "properties": None, "required": None}},
}


@pytest.mark.parametrize("fields", BARE.values(), ids=BARE)
def test_optional_fields_may_be_absent(make: MakeRenderer, fields: dict[str, Any]) -> None:
    description = fields.get("description") or ""
    whole = make_tool("see", description="Sees.", parameters={"properties": PATH, "required": ["path"]})
    for template, first, second in (
        (DESCRIBED, f"now {description};", "see Sees.;"),
        (LISTED, "now;", "see path!;"),
        (BOTH, f"now {description};", "see Sees.;now;see path!;"),
    ):
        text = render_text(make(template), USER, tools=[make_tool(**fields), whole])
        assert text == first + second + "user:hello;"
        assert text == render_text(make(template), USER, tools=[make_tool(**fields), whole]), "the same each time"


@pytest.mark.parametrize("fields", [*BARE.values(), {"parameters": {"type": ["object", "null"]}}])
def test_tools_are_unchanged_where_the_template_renders_them(make: MakeRenderer, fields: dict[str, Any]) -> None:
    tool = make_tool(**fields)
    assert json.loads(render_text(make(PLAIN), USER, tools=[tool]).partition(";")[0]) == tool


def test_as_little_as_possible_is_added(make: MakeRenderer) -> None:
    parameters = {"properties": {"path": {"type": ["string", "null"]}}}
    text = render_text(make(DUMPED), USER, tools=[make_tool(), make_tool(parameters=parameters)])
    assert text == f"now{json.dumps(NOTHING)};now{json.dumps(parameters)};user:hello;"


def test_first_of_several_types_is_given(make: MakeRenderer) -> None:
    properties = {"a": {"type": ["null", "integer"]}, "b": {"type": "string"}, "c": {"type": ["null"]}}
    text = render_text(make(TYPED), USER, tools=[make_tool(parameters={"properties": properties})])
    assert text == "now a integer b string c null;user:hello;"


def test_refused_tool_is_named(make: MakeRenderer) -> None:
    template = "{% for t in tools or [] if t.function.name == 'bad' %}{{ raise_exception('no bad tools') }}{% endfor %}"
    renderer = make(template + PLAIN)
    tools = [make_tool("one"), make_tool("bad"), make_tool("two")]
    with pytest.raises(BadRequestError, match=r"'tools\[1\]' \(\"bad\"\) is refused .*: no bad tools") as refused:
        render_text(renderer, USER, tools=tools)
    assert refused.value.param == "tools[1]"
    with pytest.raises(BadRequestError, match=r"'tools\[0\].function.parameters' must be .*, in the tool \"now\""):
        render_text(renderer, USER, tools=[make_tool(parameters="none")])


def test_refused_messages_are_no_fault_of_the_tools(make: MakeRenderer) -> None:
    template = "{% if messages | length > 4 %}{{ raise_exception('too long') }}{% endif %}" + DESCRIBED
    with pytest.raises(BadRequestError, match="refuses these messages: too long") as refused:
        render_text(make(template), *[USER] * 5, tools=[make_tool()])
    assert refused.value.param == "messages"
    template = "{% if tone %}{{ raise_exception('no tone') }}{% endif %}" + DESCRIBED
    with pytest.raises(BadRequestError, match=r"with the arguments .*: no tone") as refused:
        render_text(make(template), USER, tools=[make_tool()], chat_template_kwargs={"tone": 1})
    assert refused.value.param == "messages"
