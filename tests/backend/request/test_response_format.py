"""Formats that bodies ask for, and refusals with their messages."""

from typing import Any

import pytest

from warmline_backend.request.params import BadRequestError
from warmline_backend.request.response_format import (
    ResponseFormat,
    TextFormat,
    has_format_fields,
    parse_response_format,
)

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g", "strict": True}},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def parse_body(tools: list[dict[str, Any]] | None = None, endpoint: str = "chat", **body: Any) -> ResponseFormat:
    return parse_response_format(endpoint, body, tools)


def catch_refusal(tools: list[dict[str, Any]] | None = None, **body: Any) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        parse_body(tools, **body)
    assert len(caught.value.message) < 300
    return caught.value


def make_named_choice(name: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_most_bodies_are_unconstrained() -> None:
    nulls = dict.fromkeys(["response_format", "structured_outputs", "guided_json", "tool_choice", "tools"])
    for body in ({"response_format": {}}, {"response_format": {"type": None, "json_schema": None}}):
        assert parse_body(**body).is_unconstrained
    for body in ({}, nulls, {"response_format": {"type": "text"}}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        assert parse_body(**body).is_unconstrained
    assert parse_body(TOOLS[:1]).is_unconstrained and parse_body(TOOLS[:1], tool_choice="auto").is_unconstrained
    assert not has_format_fields(nulls)


@pytest.mark.parametrize(
    ("body", "form"),
    [
        (
            {"response_format": {"type": "json_object"}},
            TextFormat("json", {"type": "object"}, "response_format"),
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            TextFormat("json", SCHEMA, "response_format.schema"),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            TextFormat("json", SCHEMA, "response_format.json_schema.schema", strict=True),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            TextFormat("json", SCHEMA, "response_format.json_schema.schema"),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, TextFormat("json", SCHEMA, "structured_outputs.json")),
        (
            {"structured_outputs": {"json": '{"type": "null"}'}},
            TextFormat("json", {"type": "null"}, "structured_outputs.json"),
        ),
        (
            {"structured_outputs": {"json_object": True, "regex": None}},
            TextFormat("json", {"type": "object"}, "structured_outputs.json_object"),
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, TextFormat("choice", ["a", "b"], "structured_outputs.choice")),
        ({"guided_json": '{"type": "null"}'}, TextFormat("json", {"type": "null"}, "guided_json")),
        ({"guided_json": r'{"const": "a\ud83d"}'}, TextFormat("json", {"const": "a\ufffd"}, "guided_json")),
        ({"guided_json": r'{"const": "\ud83d\ude00"}'}, TextFormat("json", {"const": "😀"}, "guided_json")),
        ({"guided_regex": "a+"}, TextFormat("regex", "a+", "guided_regex")),
        ({"guided_choice": ["yes", "no"]}, TextFormat("choice", ["yes", "no"], "guided_choice")),
        ({"guided_grammar": 'start: "a"'}, TextFormat("grammar", 'start: "a"', "guided_grammar")),
        ({"grammar": 'root ::= "a"'}, TextFormat("grammar", 'root ::= "a"', "grammar")),
        ({"grammar": "", "json_schema": SCHEMA}, TextFormat("json", SCHEMA, "json_schema")),
        ({"json_schema": '{"type": "null"}'}, TextFormat("json", {"type": "null"}, "json_schema")),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_text_formats(endpoint: str, body: dict[str, Any], form: TextFormat) -> None:
    assert parse_body(None, endpoint, **body).text_format == form
    assert has_format_fields(body)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"response_format": "json_object"}, "response_format", "must be a JSON object"),
        ({"response_format": {"schema": {}}}, "response_format.type", '"text", "json_object" or "json_schema"'),
        ({"response_format": {"type": "xml"}}, "response_format.type", 'not "xml"'),
        ({"response_format": {"type": "json_object", "schema": [1]}}, "response_format.schema", "a JSON schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be a JSON object"),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            "response_format.json_schema",
            "send 'response_format.json_schema.schema'",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "must be a JSON schema (an object), not null",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}},
            "response_format.json_schema.name",
            "must be a string",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
            "response_format.json_schema.strict",
            "true or false",
        ),
        ({"structured_outputs": []}, "structured_outputs", "must be a JSON object"),
        ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", 'it has "jsn", which is none of them'),
        ({"structured_outputs": {"json": None}}, "structured_outputs", '"grammar"'),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs", "not supported"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "no JSON"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json", "no JSON"),
        ({"structured_outputs": {"json": "5"}}, "structured_outputs.json", "a JSON schema"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "list of strings"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice", "list of strings"),
        ({"guided_choice": ["a"] * 1001}, "guided_choice", "1001 choices"),
        ({"guided_choice": ["a" * (1 << 18), "b"]}, "guided_choice", "characters long"),
        ({"guided_regex": 5}, "guided_regex", "must be a string"),
        ({"guided_regex": ""}, "guided_regex", "must be a string"),
        ({"guided_grammar": "a" * (1 + (1 << 18))}, "guided_grammar", "characters long"),
        ({"json_schema": 5}, "json_schema", "a JSON schema"),
        ({"grammar": 5}, "grammar", "must be a string"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "json_schema", "both say"),
        ({"guided_regex": "a", "json_schema": {}}, "json_schema", "both say"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "both say what the answer must be"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "'response_format' and 'guided_regex' both",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
            "both say",
        ),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex", "both say"),
    ],
)
def test_wrong_text_formats_name_field(body: dict[str, Any], param: str, words: str) -> None:
    error = catch_refusal(**body)
    assert error.param == param and words in error.message, error.message


def test_tool_choices() -> None:
    assert [tool.name for tool in parse_body(TOOLS, tool_choice="required").tools] == ["f", "g"]
    one = parse_body(TOOLS, tool_choice=make_named_choice("g"), parallel_tool_calls=True)
    assert (one.tool_choice, [tool.name for tool in one.tools], one.parallel) == ("required", ["g"], False)
    for mode in ("auto", "required"):
        some = parse_body(
            TOOLS,
            tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [make_named_choice("f")]}},
        )
        assert (some.tool_choice, [tool.name for tool in some.tools]) == (mode, ["f"])
        assert some.has_restricted_tools and not some.is_unconstrained
    assert not parse_body(TOOLS).is_unconstrained, "one of them is strict"
    assert not parse_body(TOOLS, tool_choice="none").is_unconstrained
    assert parse_body(TOOLS, "completion", tool_choice="required").is_unconstrained


@pytest.mark.parametrize(
    ("tools", "choice", "param", "words"),
    [
        (None, "required", "tool_choice", "no 'tools'"),
        (None, make_named_choice("f"), "tool_choice", "no 'tools'"),
        (TOOLS, make_named_choice("h"), "tool_choice", 'names "h", which is not among'),
        (TOOLS, make_named_choice(None), "tool_choice", "must be the name of one of 'tools'"),
        (TOOLS, {"type": "function"}, "tool_choice", "must be the name of one of 'tools'"),
        (TOOLS, "sometimes", "tool_choice", 'not "sometimes"'),
        (TOOLS, {"type": "custom", "name": "f"}, "tool_choice", 'not "custom"'),
        (TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}, "tool_choice", "a list of functions"),
        (
            TOOLS,
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [make_named_choice("h")]}},
            "tool_choice",
            'names "h"',
        ),
        ([{"function": {"name": "f", "strict": 1}}], "auto", "tools[0]", "true or false"),
    ],
)
def test_wrong_tool_choices_are_refused(tools: Any, choice: object, param: str, words: str) -> None:
    error = catch_refusal(tools, tool_choice=choice)
    assert error.param == param and words in error.message, error.message
