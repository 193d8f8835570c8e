"""Calls of every family, parsed as they stream: names and arguments as written, in the schema's types."""

import json
from pathlib import Path

import pytest

from support.backend.parsed_output import encode_text, join_content, join_reasoning, list_calls, parse_output
from support.backend.tool_families import BY_NAME, CALLS, FAMILIES, TOOLS, Family
from warmline_backend.output.dialect import detect_dialect
from warmline_backend.output.events import ToolCall
from warmline_backend.output.parser import parse_turn

OURS = ("deepseek_v32", "deepseek_v3", "llama3", "seed_oss", "command_a", "phi4", "granite")  # unknown to mlx-lm
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=str)
WITH_REASONING = pytest.mark.parametrize("family", [family for family in FAMILIES if family.think[0]], ids=str)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@EVERY_FAMILY
def test_format_is_detected_by_template(family: Family, folder: Path) -> None:
    known = detect_dialect(family.tokenizer(folder))
    assert known.tool_format is not None and known.tool_format.name == family.name
    assert (known.think_start, known.think_end) == family.think


@EVERY_FAMILY
def test_calls_are_parsed_with_schema_types(family: Family, folder: Path) -> None:
    parts = parse_output(family.tokenizer(folder), family.calls)
    assert list_calls(parts) == CALLS and not join_content(parts)
    assert [list(json.loads(part.arguments)) for part in parts if isinstance(part, ToolCall)] == [
        list(arguments) for _, arguments in CALLS
    ], "the model's order"
    assert "São" in next(part.arguments for part in parts if isinstance(part, ToolCall))


@WITH_REASONING
def test_reasoning_and_text_beside_calls(family: Family, folder: Path) -> None:
    start, end = family.think
    text = f"{start}\nHm, 1 < 2.\n{end}\n\nLet me look.\n{family.calls}"
    parts = parse_output(family.tokenizer(folder), text)
    assert (join_reasoning(parts), join_content(parts), list_calls(parts)) == ("Hm, 1 < 2.", "Let me look.", CALLS)
    assert [type(part) for part in parts if isinstance(part, ToolCall)] == [type(part) for part in parts[-2:]]


@WITH_REASONING
def test_reasoning_opened_by_prompt(family: Family, folder: Path) -> None:
    tokenizer, (start, end) = family.tokenizer(folder), family.think
    assert (
        join_reasoning(parse_output(tokenizer, f"Hm.\n{end}\n\nYes.", tail=f"<|im_start|>assistant\n{start}\n"))
        == "Hm."
    )
    assert join_content(parse_output(tokenizer, "Yes.", tail=f"<|im_start|>assistant\n{start}\n\n{end}\n\n")) == "Yes."
    cut = parse_output(tokenizer, "Hm, I", tail=f"{start}\n", natural=False)
    assert (join_reasoning(cut), join_content(cut)) == ("Hm, I", "")


@EVERY_FAMILY
def test_calls_without_tools_stay_text(family: Family, folder: Path) -> None:
    parts = parse_output(family.tokenizer(folder), family.calls, tools=None)
    assert not list_calls(parts) and len(join_content(parts)) > len("get_weather run São Paulo")


@EVERY_FAMILY
def test_cut_call_is_text(family: Family, folder: Path) -> None:
    """Many beginnings of the answer: whole calls are emitted, the rest is content, and no character is lost."""
    tokenizer = family.tokenizer(folder)
    text = "So: " + family.calls if family.name != "llama3" else family.calls
    for length in range(1, len(text), 19):
        parts = parse_output(tokenizer, text[:length], natural=False)
        calls = list_calls(parts)
        assert calls == CALLS[: len(calls)]
        if not calls:
            assert join_content(parts) == text[:length]


@EVERY_FAMILY
def test_single_call_without_parallel_calls(family: Family, folder: Path) -> None:
    assert list_calls(parse_output(family.tokenizer(folder), family.calls + "\n\nDone.", parallel=False)) == CALLS[:1]


@EVERY_FAMILY
def test_parse_turn_returns_emitted_parts(family: Family, folder: Path) -> None:
    tokenizer, (start, end) = family.tokenizer(folder), family.think
    text = (f"{start}\nHm.\n{end}\n\nLet me look.\n" if start else "") + family.calls
    last = next(part for part in reversed(parse_output(tokenizer, text)) if isinstance(part, ToolCall))
    turn = encode_text(tokenizer, text)[last.start : last.end]
    content, calls = parse_turn(turn, tokenizer, TOOLS)
    assert content.strip() == ("Let me look." if start else "")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == CALLS


@EVERY_FAMILY
def test_unknown_special_tokens_are_no_text(family: Family, folder: Path) -> None:
    assert join_content(parse_output(family.tokenizer(folder), "a<|im_start|>b<|im_end|>", tools=None)) == "ab"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name not in OURS], ids=str)
def test_mlx_lm_parser_gives_same_calls(family: Family, folder: Path) -> None:
    """So these texts are what this family writes."""
    tokenizer = family.tokenizer(folder)
    pieces = family.calls.split(tokenizer.tool_call_start)[1:]
    texts = [piece.split(tokenizer.tool_call_end)[0] if tokenizer.tool_call_end else piece for piece in pieces]
    parsed = [tokenizer.tool_parser(text, TOOLS) for text in texts]
    flat = [call for one in parsed for call in (one if isinstance(one, list) else [one])]
    assert [call["name"] for call in flat] == [name for name, _ in CALLS]
    assert flat[0]["arguments"] == CALLS[0][1]


def test_unknown_family_uses_mlx_lm_parser(folder: Path) -> None:
    tokenizer = BY_NAME["json_tools"].tokenizer(folder / "new")
    tokenizer.init_kwargs["tool_parser_type"] = "of_tomorrow"
    known = detect_dialect(tokenizer)
    assert known.tool_format is not None and known.tool_format.special_tokens is None
    assert list_calls(parse_output(tokenizer, BY_NAME["json_tools"].calls)) == CALLS
    broken = "<tool_call>\nnothing\n</tool_call>"
    assert join_content(parse_output(tokenizer, broken)) == broken
