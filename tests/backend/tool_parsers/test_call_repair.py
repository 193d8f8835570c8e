"""Faulty calls: repaired where they are unambiguous, else text."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from support.backend.parsed_output import join_content, list_calls, parse_output
from support.backend.tool_families import BY_NAME, CALLS, FAMILIES, Family, make_tool
from warmline_backend.output.dialect import detect_dialect
from warmline_backend.tool_parsers.argument_types import BareText, convert_arguments
from warmline_backend.tool_parsers.lenient_json import ToolCallParseError, parse_lenient_json
from warmline_backend.tool_parsers.xml_style import BROKEN_MAX

F = make_tool("f", a={"type": "string"}, n={"type": "integer"})


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> TokenizerWrapper:
    return BY_NAME["json_tools"].tokenizer(tmp_path_factory.mktemp("repair"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


REPAIRED = {
    "a bracket is missing": '{"name": "f", "arguments": {"a": "x"}',
    "all brackets are missing": '{"name": "f", "arguments": {"a": "x"',
    "a bracket is left over": '{"name": "f", "arguments": {"a": "x"}}}',
    "trailing commas": '{"name": "f", "arguments": {"a": "x",},}',
    "Python's quotes": "{'name': 'f', 'arguments': {'a': 'x'}}",
    "bare keys": '{name: "f", arguments: {a: "x"}}',
    "arguments as a string": r'{"name": "f", "arguments": "{\"a\": \"x\"}"}',
    "parameters": '{"name": "f", "parameters": {"a": "x"}}',
    "a function's name under function": '{"function": "f", "arguments": {"a": "x"}}',
    "a function object": '{"type": "function", "function": {"name": "f", "arguments": {"a": "x"}}}',
    "a function object beside its arguments": '{"function": {"name": "f"}, "arguments": {"a": "x"}}',
    "a code fence": '```json\n{"name": "f", "arguments": {"a": "x"}}\n```',
    "a list of one": '[{"name": "f", "arguments": {"a": "x"}}]',
    "a name space": '{"name": "functions.f", "arguments": {"a": "x"}}',
    "as it should be": '{"name": "f", "arguments": {"a": "x"}}',
}
UNREADABLE = {
    "nothing": "",
    "words": "call f with x",
    "no name": '{"arguments": {"a": "x"}}',
    "an empty name": '{"name": " ", "arguments": {"a": "x"}}',
    "no arguments, but fields": '{"name": "f", "a": "x"}',
    "arguments that are a list": '{"name": "f", "arguments": ["x"]}',
    "arguments that are words": '{"name": "f", "arguments": "x"}',
    "a quote within": '{"name": "f", "arguments": {"a": "say "x" now"}}',
    "no comma": '{"name": "f" "arguments": {"a": "x"}}',
    "no number": '{"name": "f", "arguments": {"n": NaN}}',
    "a list of lists": '[["f"]]',
    "a number": "5",
    "without end": "[" * 3000,
    "text behind it": '{"name": "f", "arguments": {}} and then',
}


@pytest.mark.parametrize("text", REPAIRED.values(), ids=REPAIRED)
def test_unambiguous_calls_are_repaired(hermes: TokenizerWrapper, text: str) -> None:
    parts = parse_output(hermes, f"<tool_call>\n{text}\n</tool_call>", tools=[F])
    assert (list_calls(parts), join_content(parts)) == ([("f", {"a": "x"})], "")


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("natural", [True, False])
def test_ambiguous_calls_stay_text(hermes: TokenizerWrapper, text: str, natural: bool) -> None:
    written = f"So:\n<tool_call>\n{text}\n</tool_call>"
    parts = parse_output(hermes, written, tools=[F], natural=natural)
    assert (list_calls(parts), join_content(parts)) == ([], written)


def test_missing_end_marker_is_accepted_at_natural_end(hermes: TokenizerWrapper) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}'
    assert list_calls(parse_output(hermes, text, tools=[F])) == [("f", {"a": "x"})]
    assert join_content(parse_output(hermes, text, tools=[F], natural=False)) == text


def test_cut_value_is_never_completed(hermes: TokenizerWrapper) -> None:
    for text in ('{"name": "f", "arguments": {"a": "x', '{"name": "f", "arguments": {"a":', '{"name": "f", "argum'):
        assert join_content(parse_output(hermes, "<tool_call>" + text, tools=[F])) == "<tool_call>" + text


def test_markers_within_strings_are_text(hermes: TokenizerWrapper) -> None:
    inner = "<tool_call>{}</tool_call> <think>"
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": "{inner}"}}}}</tool_call>'
    assert list_calls(parse_output(hermes, text, tools=[F])) == [("f", {"a": inner})]


def test_unterminated_string_leaves_next_call(hermes: TokenizerWrapper) -> None:
    broken, good = (
        '<tool_call>{"name": "f", "arguments": {"a": "x}}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
    )
    parts = parse_output(hermes, f"{broken}\n{good}", tools=[F])
    assert (list_calls(parts), join_content(parts).strip()) == ([("f", {})], broken)


def test_call_of_unknown_tool_is_passed_on(hermes: TokenizerWrapper) -> None:
    text = '<tool_call>{"name": "g", "arguments": {"a": 5}}</tool_call>'
    assert list_calls(parse_output(hermes, text, tools=[F])) == [("g", {"a": 5})]


def test_lone_surrogate_becomes_a_replacement_character(hermes: TokenizerWrapper) -> None:
    text = r'<tool_call>{"name": "f", "arguments": {"a": "x\ud83d", "\ude00": "\ud83d\ude00"}}</tool_call>'
    (call,) = parse_output(hermes, text, tools=[F])
    assert list_calls([call]) == [("f", {"a": "x\ufffd", "\ufffd": "\U0001f600"})]


# ---- where text, calls and reasoning meet


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'


def test_text_around_calls_keeps_its_place(hermes: TokenizerWrapper) -> None:
    parts = parse_output(hermes, f"One.\n{CALL}\nTwo.\n{CALL}\nThree.\n", tools=[F])
    assert (join_content(parts), len(list_calls(parts))) == ("One.\n\nTwo.\n\nThree.", 2)
    kinds = [type(part).__name__ for part in parts]
    assert kinds.index("ToolCall") == len("One.") and len(kinds) - 1 - kinds[::-1].index("ToolCall") < len(kinds) - 5


def test_white_space_around_calls_is_dropped(hermes: TokenizerWrapper) -> None:
    parts = parse_output(hermes, f"<think>\nHm.\n</think>\n\n{CALL}\n\n{CALL}\n", tools=[F])
    assert (join_content(parts), len(list_calls(parts))) == ("", 2)


def test_trailing_white_space_without_calls_is_kept(hermes: TokenizerWrapper) -> None:
    assert join_content(parse_output(hermes, " Yes. \n", tools=[F])) == " Yes. \n"


def test_call_within_reasoning_is_reasoning(hermes: TokenizerWrapper) -> None:
    parts = parse_output(hermes, f"I could write {CALL}, or not.\n</think>\n\nNo.", tools=[F], tail="<think>\n")
    assert (list_calls(parts), join_content(parts)) == ([], "No.")
    parts = parse_output(hermes, f"I could write {CALL}\n</think>\n\nNo.", tools=[F], tail="<think>\n")
    assert (list_calls(parts), join_content(parts)) == ([], "No.")


def test_call_ends_open_reasoning(hermes: TokenizerWrapper) -> None:
    parts = parse_output(hermes, f"I call.\n{CALL}\n{CALL}", tools=[F], tail="<think>\n")
    assert (len(list_calls(parts)), join_content(parts)) == (2, "")
    cut = parse_output(hermes, f"I call.\n{CALL}\n{CALL}", tools=[F], tail="<think>\n", natural=False)
    assert not list_calls(cut)


def test_stray_end_markers_are_dropped(hermes: TokenizerWrapper) -> None:
    assert join_content(parse_output(hermes, "Hm.\n</think>\n\nYes.", tools=[F])) == "Hm.\nYes."
    assert join_content(parse_output(hermes, f"{CALL}\n</tool_call>\nYes.", tools=[F])) == "Yes."


# ---- other families' ways to go wrong


def test_qwen_call_without_start_marker(folder: Path) -> None:
    tokenizer = BY_NAME["qwen3_coder"].tokenizer(folder)
    text = "Look:\n<function=run>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
    parts = parse_output(tokenizer, text)
    assert (list_calls(parts), join_content(parts)) == ([("run", {"command": "ls"})], "Look:")


def test_qwen_call_without_closing_tags(folder: Path) -> None:
    tokenizer = BY_NAME["qwen3_coder"].tokenizer(folder)
    text = "<tool_call>\n<function=run>\n<parameter=command>\nls\n<parameter=dry>\nTrue\n</parameter>\n</tool_call>"
    assert list_calls(parse_output(tokenizer, text)) == [("run", {"command": "ls", "dry": True})]
    cut = "<tool_call>\n<function=run>\n<parameter=command>\nrm -r build"
    assert join_content(parse_output(tokenizer, cut)) == cut, "who knows what would have followed"


def test_value_may_contain_its_closing_tag(folder: Path) -> None:
    tokenizer = BY_NAME["qwen3_coder"].tokenizer(folder)
    command = "echo '<parameter=x>1</parameter>' </tool_call>"
    text = f"<tool_call>\n<function=run>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>"
    assert list_calls(parse_output(tokenizer, text)) == [("run", {"command": command})]


def test_tagged_families_accept_json(folder: Path) -> None:
    for family in ("glm47", "qwen3_coder"):
        text = '<tool_call>\n{"name": "get_weather", "arguments": {"days": 2}}\n</tool_call>'
        assert list_calls(parse_output(BY_NAME[family].tokenizer(folder), text)) == [("get_weather", {"days": 2})]


def test_call_without_arguments(folder: Path) -> None:
    for family, text in {
        "glm47": "<tool_call>now\n</tool_call>",
        "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "pythonic": "<|tool_call_start|>[now()]<|tool_call_end|>",
        "llama3": '{"name": "now", "parameters": {}}',
        "mistral": "[TOOL_CALLS]now[ARGS]{}",
        "gemma4": "<|tool_call>call:now{}<tool_call|>",
    }.items():
        assert list_calls(parse_output(BY_NAME[family].tokenizer(folder), text)) == [("now", {})], family


def test_broken_call_beside_valid_one_is_text(folder: Path) -> None:
    tokenizer = BY_NAME["minimax_m2"].tokenizer(folder)
    text = '<minimax:tool_call>\nHm.\n<invoke name="now">\n</invoke>\n</minimax:tool_call>'
    parts = parse_output(tokenizer, text)
    assert (list_calls(parts), join_content(parts).strip()) == ([("now", {})], "Hm.")


@pytest.mark.parametrize(
    ("family", "broken"),
    [
        ("minimax_m2", '<invoke name="run">\nls\n</invoke>'),
        ("kimi_k2", "<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>ls<|tool_call_end|>"),
    ],
)
def test_broken_call_in_section_leaves_others(folder: Path, family: str, broken: str) -> None:
    known = BY_NAME[family]
    tokenizer = known.tokenizer(folder)
    start = tokenizer.tool_call_start
    text = known.calls.replace(start, start + broken)
    parts = parse_output(tokenizer, text)
    assert (list_calls(parts), join_content(parts).strip()) == (CALLS, broken)


def test_names_with_spaces_or_missing_quote(folder: Path) -> None:
    tokenizer = BY_NAME["minimax_m2"].tokenizer(folder)
    spaced = make_tool("f", **{"a b": {"type": "integer"}})
    for name in ('"a b"', "'a b'", '"a b'):
        call = f'<invoke name="f"><parameter name={name}>1</parameter></invoke>'
        parts = parse_output(tokenizer, f"<minimax:tool_call>{call}</minimax:tool_call>", tools=[spaced])
        assert list_calls(parts) == [("f", {"a b": 1})]


def test_mistral_list_followed_by_text(folder: Path) -> None:
    text = '[TOOL_CALLS] [{"name": "now", "arguments": {}}] Done.'
    parts = parse_output(BY_NAME["mistral"].tokenizer(folder), text)
    assert (list_calls(parts), join_content(parts).strip()) == ([("now", {})], "Done.")


def test_deepseek_arguments_in_code_fence(folder: Path) -> None:
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
    call = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>run\n```json\n{"command": "ls"}\n```<｜tool▁call▁end｜>'  # noqa: RUF001
    text = begin + call + end
    assert list_calls(parse_output(BY_NAME["deepseek_v3"].tokenizer(folder), text)) == [("run", {"command": "ls"})]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "now", "parameters": {}}', [("now", {})]),
        ('\n{"type": "function", "name": "run", "parameters": {"dry": "true"}}', [("run", {"dry": True})]),
        ('<|python_tag|>{"name": "now", "parameters": {}}<|eom_id|>', [("now", {})]),
        ('<|python_tag|>web.call(query="llamas")', [("web", {"query": "llamas"})]),
        ('{"name": "Ann", "age": 5}', []),
        ('{"city": "Rome"}', []),
        ('{"name": "now", "parameters": {', []),
        ("{", []),
        ("Look: {}", []),
    ],
)
def test_llama_answer_is_call_or_text(folder: Path, text: str, expected: list[Any]) -> None:
    parts = parse_output(BY_NAME["llama3"].tokenizer(folder), text, natural=bool(expected))
    assert (list_calls(parts), join_content(parts)) == (expected, "" if expected else text)


# ---- types


def make_schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "$defs": {"tag": {"type": "string"}}}


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ({"type": "string"}, "123", "123"),
        ({"type": "string"}, 123, "123"),
        ({"type": "string"}, True, "true"),
        ({"type": "string"}, {"a": 1}, {"a": 1}),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, 5.0, 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "0.5", 0.5),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, 1, 1),
        ({"type": "array", "items": {"type": "integer"}}, '["1", 2]', [1, 2]),
        ({"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "integer"}}, [1, "2"], ["1", 2]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"x": "1"}, {"x": 1}),
        ({"type": "object", "properties": {"b": {"type": "boolean"}}}, '{"b": "true"}', {"b": True}),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["integer", "string"]}, "5", "5"),
        ({"type": ["integer", "string"]}, 5, 5),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]}, ["1"], [1]),
        ({"anyOf": [{"type": "object"}, {"type": "object", "properties": {}}]}, {"a": "1"}, {"a": "1"}),
        ({"enum": ["1", "2"]}, 1, "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"$ref": "#/$defs/tag"}, 1, "1"),
        ({"$ref": "#/nowhere"}, "1", "1"),
        ({"type": "str"}, "1", "1"),
        ({}, "1", "1"),
        (None, 1, 1),
        ([], 1, 1),
        ({"type": "string"}, BareText("123"), "123"),
        ({"type": "string"}, BareText("null"), "null"),
        ({"type": "string"}, BareText(" x\n"), " x\n"),
        ({"type": ["string", "null"]}, BareText("null"), None),
        ({"type": ["string", "integer"]}, BareText("5"), "5"),
        ({"type": ["string", "array"]}, BareText('["a"]'), ["a"]),
        ({"enum": [1, "x", None]}, BareText("1"), 1),
        ({"enum": [1, "x", "1"]}, BareText("1"), "1"),
        ({"enum": ["x", " null"]}, BareText(" null"), " null"),
        ({"anyOf": [{"const": "q"}, {"type": "integer"}]}, BareText("5"), 5),
        ({"anyOf": [{"enum": ["a"]}, {"type": "null"}]}, BareText("null"), None),
        ({"anyOf": [{"enum": ["a"]}, {"type": "string"}, {"type": "integer"}]}, BareText("5"), "5"),
        ({"allOf": [{"enum": ["a", "5"]}, {"type": ["string", "integer"]}]}, BareText("5"), "5"),
        ({"type": "integer"}, BareText(" 5 "), 5),
        ({"type": "boolean"}, BareText("True"), True),
        ({"type": "object"}, BareText("{'a': None}"), {"a": None}),
        ({}, BareText('{"a": 1}'), {"a": 1}),
        ({}, BareText("words"), "words"),
    ],
)
def test_arguments_are_converted_to_schema_types(kind: Any, given: Any, expected: Any) -> None:
    got = convert_arguments({"x": given}, make_schema(x=kind))
    assert (got, type(got["x"]).__name__) == ({"x": expected}, type(expected).__name__)


def test_recursive_schemas_terminate() -> None:
    loop = {"$ref": "#/properties/x"}
    assert convert_arguments({"x": {"x": "1"}}, make_schema(x=loop)) == {"x": {"x": "1"}}
    tree = {"type": "object", "properties": {"n": {"type": "integer"}, "next": {"$ref": "#"}}}
    assert convert_arguments({"n": "1", "next": {"n": "2"}}, tree) == {"n": 1, "next": {"n": 2}}
    assert convert_arguments({"x": "1"}, make_schema(x={"$ref": "#an-anchor"})) == {"x": "1"}


def test_doubling_unions_are_visited_once() -> None:
    """The engine waits meanwhile: branch by branch, these would take years."""
    defs = {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(30)} | {"30": {"type": "integer"}}
    circle = {"anyOf": [{"$ref": "#/$defs/circle"}] * 2}
    parameters = {"properties": {"x": {"$ref": "#/$defs/0"}, "y": circle}, "$defs": {**defs, "circle": circle}}
    assert convert_arguments({"x": "5", "y": "5"}, parameters) == {"x": 5, "y": "5"}


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, True, "é\n"]}, [], "x", {"k": {}}])
def test_valid_json_is_parsed(value: Any) -> None:
    assert parse_lenient_json(json.dumps(value)) == (value, len(json.dumps(value)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{'a': 'it\\'s'}", {"a": "it's"}),
        (r'{"a": "\d+"' + ",}", {"a": r"\d+"}),
        ('{"a": "x\ny\t"}', {"a": "x\ny\t"}),
        (r'{"a": "\ud83d\ude00",}', {"a": "😀"}),
        ("[True, None, .5]", None),
        ("{'a': }", None),
        ("{'a'", None),
        ("[1, 2", [1, 2]),
        ("[1 2]", None),
        ("'", None),
    ],
)
def test_lenient_json_is_parsed_or_refused(text: str, expected: Any) -> None:
    if expected is None:
        with pytest.raises(ToolCallParseError):
            parse_lenient_json(text)
    else:
        assert parse_lenient_json(text)[0] == expected


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_parsing_takes_linear_time(family: Family, folder: Path) -> None:
    """The engine waits meanwhile.  A quadratic parser is not done within this test's time."""
    calls_of = detect_dialect(family.tokenizer(folder)).tool_format
    assert calls_of
    for piece in (
        " ",
        "f(",
        '{"a":',
        "<arg_key>",
        "<parameter=",
        "<invoke name=",
        "[TOOL_CALLS]",
        "<|tool_call_begin|>",
    ):
        for before in ("", '"', "```\n", "f", '{"name": "f", "arguments": {"a": "'):
            with suppress(ToolCallParseError):
                calls_of.parse(before + piece * 20_000, True)


def test_many_broken_calls_are_not_parsed(folder: Path) -> None:
    read = detect_dialect(BY_NAME["qwen3_coder"].tokenizer(folder)).tool_format
    broken, good = "<function=a><parameter=x>v</parameter>junk", "<function=a><parameter=x>v</parameter></function>"
    assert read and len(read.parse(broken * BROKEN_MAX + good, False)) == BROKEN_MAX + 1
    with pytest.raises(ToolCallParseError):
        read.parse(broken * 5_000 + good, False)
