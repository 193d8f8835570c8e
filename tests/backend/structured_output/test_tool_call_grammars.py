"""Calls sampled under a family's grammar parse as such, with arguments that their schemas allow."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from support.backend.grammar_cases import (
    EOS,
    MARKERS,
    is_accepted,
    make_compiler,
    make_family_tokenizer,
    make_tokenizer,
    sample_tokens,
)
from support.backend.tool_families import BY_NAME, CALLS, HARMONY
from support.backend.tool_families import TOOLS as THEIRS
from warmline_backend.output.parser import parse_turn
from warmline_backend.request.params import BadRequestError
from warmline_backend.structured_output.compiler import GrammarCompiler

STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in THEIRS]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 6, "pattern": "^[a-zöß]{1,6}$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
}
NESTED = {
    "type": "object",
    "properties": {
        "point": {"$ref": "#/$defs/point"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["tags"],
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "y": {"type": "null"}},
            "required": ["x", "y"],
            "additionalProperties": False,
        }
    },
}


def make_function(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


NAMES = [*BY_NAME, *MARKERS]
TOOLS = [make_function("get_weather", WEATHER), make_function("now"), make_function("draw", NESTED)]
FLAT = TOOLS[:2]  # FunctionGemma's notation knows no nesting that can be read back
SCHEMAS = {"get_weather": WEATHER, "now": {"type": "object", "maxProperties": 0}, "draw": NESTED}


def get_thought_end(family: str) -> str:
    """Get the end of a prompt after which no reasoning begins."""
    return "".join(BY_NAME[family].think) if family in BY_NAME else ""


def make_tools(family: str) -> list[dict[str, Any]]:
    return FLAT if family == "function_gemma" else TOOLS


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[TokenizerWrapper, GrammarCompiler]]:
    root = tmp_path_factory.mktemp("tokenizers")
    made = {name: make_family_tokenizer(name, root) for name in NAMES}
    return {name: (tokenizer, make_compiler(tokenizer)) for name, tokenizer in made.items()}


@pytest.mark.parametrize("family", NAMES)
def test_required_calls_parse_with_valid_arguments(family: str, families: dict[str, Any]) -> None:
    tokenizer, grammars = families[family]
    tools = make_tools(family)
    body = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    constraint = grammars.build_constraint("chat", body, tools, get_thought_end(family))
    called = set()
    for seed in range(12):
        tokens = sample_tokens(grammars.create_matcher(constraint), seed)
        content, calls = parse_turn(tokens, tokenizer, tools)
        assert not content.strip() and len(calls) == 1, tokenizer.decode(tokens)
        name, arguments = calls[0]
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        called.add(name)
    assert called == {tool["function"]["name"] for tool in tools}


@pytest.mark.parametrize("family", NAMES)
def test_parallel_calls_are_allowed(family: str, families: dict[str, Any]) -> None:
    tokenizer, grammars = families[family]
    tools = make_tools(family)
    constraint = grammars.build_constraint(
        "chat", {"tools": tools, "tool_choice": "required"}, tools, get_thought_end(family)
    )
    counts = set()
    for seed in range(12):
        tokens = sample_tokens(grammars.create_matcher(constraint), seed, 6000)
        content, calls = parse_turn(tokens, tokenizer, tools)
        assert not content.strip(), tokenizer.decode(tokens)
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        counts.add(len(calls))
    assert max(counts) > 1


@pytest.mark.parametrize("family", NAMES)
def test_named_tool_is_called_once(family: str, families: dict[str, Any]) -> None:
    """One call ends the answer, also where several calls are allowed."""
    tokenizer, grammars = families[family]
    body = {"tools": FLAT, "tool_choice": {"type": "function", "function": {"name": "now"}}}
    for parallel in (None, True, False):
        constraint = grammars.build_constraint(
            "chat", {**body, "parallel_tool_calls": parallel}, FLAT, get_thought_end(family)
        )
        answers = [sample_tokens(grammars.create_matcher(constraint), seed) for seed in range(6)]
        calls = {tuple(parse_turn(answer, tokenizer, FLAT)[1]) for answer in answers}
        assert calls == {(("now", "{}"),)}


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
POINT = {"type": "object", "properties": {"x": DIGIT}, "required": ["x"], "additionalProperties": False}


def make_exact_schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


AWKWARD = {
    "references into properties": make_exact_schema(a=POINT, b={"$ref": "#/properties/a"}, c={"enum": [7]}),
    "a reference to all of it": {**make_exact_schema(v=DIGIT), "properties": {"v": DIGIT, "next": {"$ref": "#"}}},
    "one branch of all": {**make_exact_schema(a={"allOf": [{"$ref": "#/definitions/p"}]}), "definitions": {"p": POINT}},
    "all of two": make_exact_schema(a={"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 6}]}),
    "or null": make_exact_schema(
        a={"anyOf": [DIGIT, {"type": "null"}]},
        b={"anyOf": [{"type": "string", "enum": ["x", "null "]}, {"type": "null"}], "title": "B"},
        c={"type": ["string", "null"], "pattern": "^[a-c]{2}$"},
        d={"type": ["string", "null"], "enum": ["z", None]},
    ),
    "words and numbers": make_exact_schema(a={"enum": [1, 2.5, "x", None, True]}, b={"anyOf": [{"const": "q"}, DIGIT]}),
    "one item at most": make_exact_schema(a={"type": "array", "items": DIGIT, "maxItems": 1}),
    "a tuple": make_exact_schema(
        a={"type": "array", "prefixItems": [DIGIT, {"const": "s"}], "items": False, "minItems": 1}
    ),
}


@pytest.mark.parametrize("family", NAMES)
def test_complex_schemas_are_followed(family: str, families: dict[str, Any]) -> None:
    tokenizer, grammars = families[family]
    for name, schema in AWKWARD.items():
        tools = [make_function("f", schema, strict=True)]
        body = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
        constraint = grammars.build_constraint("chat", body, tools, get_thought_end(family))
        for seed in range(4):
            tokens = sample_tokens(grammars.create_matcher(constraint), seed)
            calls = parse_turn(tokens, tokenizer, tools)[1]
            assert [called for called, _ in calls] == ["f"], (name, tokenizer.decode(tokens))
            jsonschema.validate(json.loads(calls[0][1]), schema)


WRITTEN = {
    "json_tools": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "köln", "days": 2}}\n</tool_call>',
    "glm47": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>köln</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
    "laguna": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>köln</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "mistral list": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "köln", "days": 2}}]',
    "muse_spark": '<atem:function_calls>\n<atem:invoke name="get_weather">\n'
    '<atem:parameter name="city">köln</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>",
    "function_gemma": "<start_function_call>call:get_weather{city:<escape>köln<escape>,days:2}<end_function_call>",
}
MINE = [make_function("get_weather", {**WEATHER, "additionalProperties": False}, strict=True), FLAT[1]]


@pytest.mark.parametrize("family", NAMES)
def test_grammar_accepts_calls_of_family(family: str, families: dict[str, Any]) -> None:
    tokenizer, grammars = families[family]
    theirs = BY_NAME.get(family)
    written, tools = (WRITTEN[family], MINE) if theirs is None else (theirs.calls, STRICT)
    tokens = tokenizer.encode(written + EOS, add_special_tokens=False)
    for choice in ("required", "auto"):
        constraint = grammars.build_constraint("chat", {"tools": tools, "tool_choice": choice}, tools, "")
        matcher = grammars.create_matcher(constraint)
        assert is_accepted(matcher, tokens), (choice, written)
        assert matcher.is_complete or matcher.state == "free"
    if theirs is not None:
        read = [(name, json.loads(arguments)) for name, arguments in parse_turn(tokens[:-1], tokenizer, tools)[1]]
        assert read == CALLS


def test_strict_tools_constrain_calls_only(families: dict[str, Any]) -> None:
    tokenizer, grammars = families["json_tools"]
    strict = [make_function("get_weather", {**WEATHER, "additionalProperties": False}, strict=True)]
    constraint = grammars.build_constraint("chat", {"tools": strict}, strict, "")

    def tokens(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    matcher, call = grammars.create_matcher(constraint), WRITTEN["json_tools"]
    assert is_accepted(matcher, tokens("Let me look. " + call + " and " + call)) and matcher.state == "free"
    assert not is_accepted(grammars.create_matcher(constraint), tokens("Well: " + call.replace("city", "town")))
    assert not is_accepted(grammars.create_matcher(constraint), tokens(call.replace("2", "99")))
    single = {"tools": strict, "parallel_tool_calls": False}
    once = grammars.create_matcher(grammars.build_constraint("chat", single, strict, ""))
    assert is_accepted(once, tokens("Well. " + call)) and count_allowed(once) == 1


def test_allowed_tools_limit_calls(families: dict[str, Any]) -> None:
    tokenizer, grammars = families["json_tools"]
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    body = {"tools": FLAT, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    constraint = grammars.build_constraint("chat", body, FLAT, "")
    for written, fits in ((WRITTEN["json_tools"], False), (WRITTEN["json_tools"].replace("get_weather", "now"), False)):
        assert (
            is_accepted(grammars.create_matcher(constraint), tokenizer.encode(written, add_special_tokens=False))
            == fits
        )
    now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert is_accepted(grammars.create_matcher(constraint), tokenizer.encode("So: " + now, add_special_tokens=False))


def count_allowed(matcher: Any) -> int:
    return int(matcher.compute_allowed().sum())


def test_harmony_allows_reasoning_and_one_call(tmp_path: Path) -> None:
    tokenizer = HARMONY.tokenizer(tmp_path)
    grammars = make_compiler(tokenizer)
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "köln", "days": 2}'
    final = "<|channel|>final<|message|>It rains."
    for choice, tools in (("required", FLAT), ("auto", MINE)):
        constraint = grammars.build_constraint(
            "chat", {"tools": tools, "tool_choice": choice}, tools, "<|start|>assistant"
        )
        for written, fits in (
            (thought + call, True),
            ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + call, True),
            (call, True),
            (call.replace("2", "99"), False),
            (final, choice == "auto"),
        ):
            matcher = grammars.create_matcher(constraint)
            tokens = tokenizer.encode(written + EOS, add_special_tokens=False)
            assert is_accepted(matcher, tokens) == matcher.is_complete == fits, (choice, written)
    tokens = tokenizer.encode(call, add_special_tokens=False)
    assert parse_turn(tokens, tokenizer, FLAT)[1] == [("get_weather", '{"city": "köln", "days": 2}')]


def test_family_without_syntax_refuses_constraints(tmp_path: Path) -> None:
    grammars = make_compiler(make_tokenizer(tmp_path, ()))
    strict = [make_function("f", {"type": "object", "properties": {}}, strict=True)]
    with pytest.raises(BadRequestError, match="way of calling tools has no grammar") as caught:
        grammars.build_constraint("chat", {"tools": FLAT, "tool_choice": "required"}, FLAT, "")
    assert caught.value.param == "tool_choice"
    with pytest.raises(BadRequestError, match="leave 'strict' out"):
        grammars.build_constraint("chat", {"tools": strict}, strict, "")
    assert grammars.build_constraint("chat", {"tools": FLAT}, FLAT, "") is None
    assert grammars.build_constraint("chat", {"tools": FLAT, "tool_choice": "none"}, FLAT, "") is None


def test_tool_choice_none_forbids_call_marker(families: dict[str, Any]) -> None:
    tokenizer, grammars = families["glm47"]
    constraint = grammars.build_constraint("chat", {"tools": FLAT, "tool_choice": "none"}, FLAT, "")
    assert constraint.forbidden_tokens == tuple(tokenizer.encode("<tool_call>", add_special_tokens=False))
    assert not constraint.grammar


@pytest.mark.parametrize("family", ["pythonic", "gemma4"])
def test_unwritable_names_are_refused(family: str, families: dict[str, Any]) -> None:
    _, grammars = families[family]
    tools = [make_function("f", {"type": "object", "properties": {"a-b": {}}, "required": ["a-b"]})]
    with pytest.raises(BadRequestError, match=r"can't name the argument \"a-b\""):
        grammars.build_constraint("chat", {"tools": tools, "tool_choice": "required"}, tools, "")


def test_odd_argument_leaves_the_types_of_the_others(families: dict[str, Any]) -> None:
    tokenizer, grammars = families["json_tools"]
    properties = {"a": {"type": "string", "pattern": "^(?!x)"}, "b": {"$ref": "elsewhere"}, "n": {"enum": [1, 2]}}
    odd = {"type": "object", "properties": properties, "required": ["a", "n"], "additionalProperties": False}
    tools = [make_function("f", odd)]
    constraint = grammars.build_constraint("chat", {"tools": tools, "tool_choice": "required"}, tools, "")
    for arguments, fits in (
        ('{"a": "y", "n": 1}', True),
        ('{"a": "y", "b": [], "n": 1}', True),
        ('{"a": [1], "n": 1}', False),
        ('{"a": "y", "n": 3}', False),
        ('{"a": "y", "n": 1, "z": 1}', False),
    ):
        written = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>{EOS}'
        tokens = tokenizer.encode(written, add_special_tokens=False)
        assert is_accepted(grammars.create_matcher(constraint), tokens) == fits, arguments


@pytest.mark.parametrize(
    "odd", [{"type": "object", "allOf": 5}, {"type": "object", "properties": {"a": {"$ref": "x"}}}]
)
def test_unreadable_schema_is_refused_only_for_strict_tools(families: dict[str, Any], odd: dict[str, Any]) -> None:
    grammars = families["json_tools"][1]
    loose, strict = [make_function("f", odd)], [make_function("f", odd, strict=True)]
    assert grammars.build_constraint("chat", {"tools": loose, "tool_choice": "required"}, loose, "")
    with pytest.raises(BadRequestError, match=r"'tools\[0\].function.parameters' at ") as caught:
        grammars.build_constraint("chat", {"tools": strict, "tool_choice": "required"}, strict, "")
    assert caught.value.param == "tools[0].function.parameters"


def test_names_of_an_unusable_schema_stay(families: dict[str, Any]) -> None:
    tokenizer, grammars = families["json_tools"]
    parameters = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"], "additionalProperties": False}
    tools = [make_function("f", {**parameters, "allOf": [{"not": {}}]})]
    constraint = grammars.build_constraint("chat", {"tools": tools, "tool_choice": "required"}, tools, "")
    for arguments, fits in (('{"a": [1]}', True), ('{"b": 1}', False), ('{"a": 1, "c": 1}', False)):
        written = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>{EOS}'
        tokens = tokenizer.encode(written, add_special_tokens=False)
        assert is_accepted(grammars.create_matcher(constraint), tokens) == fits, arguments


def test_calls_and_form_are_alternatives(families: dict[str, Any]) -> None:
    tokenizer, grammars = families["json_tools"]
    form = {"response_format": {"type": "json_object", "schema": {"const": {"a": 1}}}}
    either = grammars.build_constraint("chat", {**form, "tools": FLAT}, FLAT, "")
    calls = grammars.build_constraint("chat", {**form, "tools": FLAT, "tool_choice": "required"}, FLAT, "")
    text = grammars.build_constraint("chat", {**form, "tools": FLAT, "tool_choice": "none"}, FLAT, "")
    for constraint, call_fits, form_fits in ((either, True, True), (calls, True, False), (text, False, True)):
        for written, fits in ((WRITTEN["json_tools"], call_fits), ('{"a": 1}', form_fits)):
            tokens = tokenizer.encode(written + EOS, add_special_tokens=False)
            assert is_accepted(grammars.create_matcher(constraint), tokens) == fits, (written, constraint.grammar)
