"""Checks of calls: arguments of each family's calls, where a redraw begins, and required calls that are none."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from support.backend.parsed_output import encode_text
from support.backend.tool_families import BY_NAME, CALLS, FAMILIES, HARMONY, TOOLS, Family
from warmline_backend.output.expected import ExpectedOutput
from warmline_backend.output.parser import OutputParser
from warmline_backend.structured_output.checks import answer_check
from warmline_backend.structured_output.checks.answer_check import (
    AnswerCheck,
    AnswerChecks,
    ContentCheck,
    ToolCheck,
    Violation,
)

WEATHER, RUN = (name for name, _ in CALLS)
EVEN_DAYS = {"properties": {"days": {"multipleOf": 2}}}
ANYTHING: dict[str, Any] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def make_check(tokenizer: TokenizerWrapper, schemas: Mapping[str, Any], **fields: Any) -> AnswerCheck:
    expected = ExpectedOutput(has_parts=True, tools=TOOLS, tail=fields.pop("tail", ""))
    checks = AnswerChecks(tools={name: ToolCheck(schema) for name, schema in schemas.items()}, **fields)
    return checks.create(lambda: OutputParser(tokenizer, expected=expected))


def add_all(check: AnswerCheck, tokenizer: TokenizerWrapper, text: str) -> tuple[Violation | None, list[int]]:
    """Add a text's tokens up to a violation, and the end; returns it, and the counts of sound tokens after each."""
    counts: list[int] = []
    tokens = encode_text(tokenizer, text)
    for token in [*tokens, tokenizer.eos_token_id]:
        violation = check.add(token, len(counts) == len(tokens))
        counts.append(check.sound_count)
        if violation:
            return violation, counts
    return None, counts


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_calls_of_each_family(folder: Path, family: Family) -> None:
    tokenizer = family.tokenizer(folder)
    count = len(encode_text(tokenizer, family.calls))
    for schemas in ({}, {"other": {"not": {}}}, {WEATHER: {"properties": {"days": {"const": 3}}}, RUN: ANYTHING}):
        violation, counts = add_all(make_check(tokenizer, schemas, requires_call=True), tokenizer, family.calls)
        assert violation is None and counts[-1] == count + 1
    violation, counts = add_all(make_check(tokenizer, {WEATHER: EVEN_DAYS}), tokenizer, family.calls)
    reason = "get_weather: /days: is no multiple of the required number (multipleOf)"
    assert violation == Violation(0, reason) and set(counts) == {0}
    violation, counts = add_all(make_check(tokenizer, {RUN: {"required": ["flagz"]}}), tokenizer, family.calls)
    assert violation is not None and violation.reason.startswith("run: ") and not violation.is_incomplete
    ends = [index + 1 for index, sound in enumerate(counts) if sound > 0]
    assert violation.start == counts[-1] == (counts[ends[0] - 1] if ends else 0)
    if ends:  # else one marker ends both calls
        first = tokenizer.decode(encode_text(tokenizer, family.calls)[: violation.start])
        assert "get_weather" in first and "run" not in first


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_rewound_calls(folder: Path, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_check, "SNAPSHOT_TOKENS", 7)
    tokenizer = family.tokenizer(folder)
    check = make_check(tokenizer, {WEATHER: EVEN_DAYS, RUN: ANYTHING})
    violation, counts = add_all(check, tokenizer, family.calls)
    assert violation is not None
    tokens, even = encode_text(tokenizer, family.calls), family.calls.replace("3", "4")
    for length in (len(counts) - 1, len(counts) // 2, 1, 0):
        check.rewind(length)
        assert check.sound_count == (counts[length - 1] if length else 0)
        assert add_all(check, tokenizer, tokenizer.decode(tokens[length:])) == (violation, counts[length:])
    assert even != family.calls
    check.rewind(0)
    assert add_all(check, tokenizer, even)[0] is None


def test_calls_in_text_are_held(folder: Path) -> None:
    tokenizer = BY_NAME["json_tools"].tokenizer(folder)
    head, call = "so: ", BY_NAME["json_tools"].calls
    violation, counts = add_all(make_check(tokenizer, {WEATHER: EVEN_DAYS}), tokenizer, f"{head}{call}")
    assert (
        violation is not None and violation.start == counts[-1] == len(head) - 1
    )  # space before a call may be its own
    assert counts[:5] == [1, 2, 3, 3, 3]
    text = f"{head}<tool_call>none</tool_call> and more"
    violation, counts = add_all(make_check(tokenizer, {WEATHER: EVEN_DAYS}), tokenizer, text)
    assert violation is None and counts[-1] == len(encode_text(tokenizer, text)) + 1


def test_call_in_reasoning(folder: Path) -> None:
    tokenizer = BY_NAME["json_tools"].tokenizer(folder)
    check = make_check(tokenizer, {WEATHER: EVEN_DAYS}, tail="<think>")
    violation, counts = add_all(check, tokenizer, f"hm{BY_NAME['json_tools'].calls}")
    assert violation is not None and violation.start == counts[-1] == 2
    assert counts[0] == 1 and counts[-2] == 2


def test_arguments_that_are_no_object(folder: Path) -> None:
    tokenizer = BY_NAME["json_tools"].tokenizer(folder)
    text = '<tool_call>\n{"name": "run", "arguments": %s}\n</tool_call>'
    for arguments in ("[1]", '{"limit": 1e999}', '"x"'):
        violation, _ = add_all(make_check(tokenizer, {}, requires_call=True), tokenizer, text % arguments)
        assert violation == Violation(0, "a call of a tool is required, and this is none that can be read"), arguments


def test_required_calls(folder: Path) -> None:
    tokenizer = BY_NAME["json_tools"].tokenizer(folder)
    call = BY_NAME["json_tools"].calls.splitlines()[1]
    good = f"<tool_call>\n{call}\n</tool_call>"
    bad = "<tool_call>\n{}\n</tool_call>"
    for text, start in ((good, None), (f"{good}\n{good}", None), (bad, 0), ("no", 0), ("", 0)):
        violation, _ = add_all(make_check(tokenizer, {}, requires_call=True), tokenizer, text)
        assert (None if violation is None else violation.start) == start, text
    violation, _ = add_all(make_check(tokenizer, {}, requires_call=True), tokenizer, f"{good}\n{bad}")
    assert violation is not None and violation.start in range(len(encode_text(tokenizer, good)), 10_000)
    thought = "<think>hm</think>"
    violation, _ = add_all(make_check(tokenizer, {}, requires_call=True), tokenizer, thought + bad)
    assert violation is not None and violation.start == len(encode_text(tokenizer, thought))


def test_required_calls_behind_comments(folder: Path) -> None:
    tokenizer = HARMONY.tokenizer(folder)
    comment = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.run <|constrain|>json<|message|>"
    tail = "<|start|>assistant"
    for arguments, reason in (
        ('{"limit": 2}', ""),
        ('{"limit": 3}', "run: /limit: is no multiple of the required number (multipleOf)"),
        ('{"limit": 1e999}', "a call of a tool is required, and this is none that can be read"),
    ):
        schemas = {RUN: {"properties": {"limit": {"multipleOf": 2}}}}
        check = make_check(tokenizer, schemas, requires_call=True, may_comment=True, tail=tail)
        violation, _ = add_all(check, tokenizer, f"{comment}{call}{arguments}")
        assert (violation.reason if violation else "") == reason
        if violation:
            assert len(encode_text(tokenizer, comment)) >= violation.start > comment.count("<")


def test_form_or_calls(folder: Path) -> None:
    tokenizer = BY_NAME["json_tools"].tokenizer(folder)
    expected = ExpectedOutput(has_parts=True, tools=TOOLS, is_constrained=True)
    checks = AnswerChecks(ContentCheck({"maxProperties": 1}, [""]), {WEATHER: ToolCheck(EVEN_DAYS)})
    for text, reason in (
        (json.dumps({"a": 1}), ""),
        (json.dumps({"a": 1, "b": 2}), "has too many properties (maxProperties)"),
        (BY_NAME["json_tools"].calls.replace("3", "2"), ""),
        (BY_NAME["json_tools"].calls, "get_weather: /days: is no multiple of the required number (multipleOf)"),
        ("<tool_call>{}</tool_call>", "can't be read: "),
    ):
        check = checks.create(lambda: OutputParser(tokenizer, expected=expected))
        violation, _ = add_all(check, tokenizer, text)
        assert (violation is None) == (not reason) and (violation is None or violation.reason.startswith(reason)), text
