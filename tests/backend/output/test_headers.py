"""Answers of messages with headers, as gpt-oss and Muse write them."""

from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from support.backend.parsed_output import encode_text, join_content, join_reasoning, list_calls, parse_output
from support.backend.small_tokenizers import make_marked_tokenizer
from support.backend.tool_families import CALLS, HARMONY, TOOLS
from warmline_backend.output.events import ToolCall
from warmline_backend.output.parser import parse_turn

TAIL = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>They ask, so I look.<|end|>"
WEATHER = '{"city": "São Paulo", "days": 3, "zip": "01310"}'
CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{WEATHER}"


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> TokenizerWrapper:
    return HARMONY.tokenizer(tmp_path_factory.mktemp("harmony"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>Sunny.<|return|>", ("", "Sunny.", [])),
        (f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>Sunny.", ("They ask, so I look.", "Sunny.", [])),
        (f"{THOUGHT}<|start|>assistant{CALL}<|call|>", ("They ask, so I look.", "", CALLS[:1])),
        (CALL, ("", "", CALLS[:1])),
        (
            f" to=functions.get_weather<|channel|>commentary json<|message|>{WEATHER}<|call|>",
            ("", "", CALLS[:1]),
        ),
        (
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}<|call|>",
            ("", "I look.", CALLS[:1]),
        ),
        ("<|channel|>analysis<|message|>Hm", ("Hm", "", [])),
        ("<|channel|>analysis to=python<|message|>{}<|call|>", ("", "", [("python", {})])),
        ("<|channel|>final", ("", "", [])),
        ("Just words.", ("", "Just words.", [])),
        ("Sunny.<|end|>", ("", "Sunny.", [])),
    ],
)
def test_message_kind_follows_header(
    harmony: TokenizerWrapper, text: str, expected: tuple[str, str, list[object]]
) -> None:
    parts = parse_output(harmony, text, tail=TAIL)
    assert (join_reasoning(parts), join_content(parts), list_calls(parts)) == expected


def test_cut_or_invalid_call_is_text(harmony: TokenizerWrapper) -> None:
    assert join_content(parse_output(harmony, CALL, tail=TAIL, natural=False)) == CALL
    broken = CALL.replace('"city"', "city is") + "<|call|>"
    assert join_content(parse_output(harmony, broken, tail=TAIL)) == broken


def test_call_without_tools_is_text(harmony: TokenizerWrapper) -> None:
    parts = parse_output(harmony, CALL, tail=TAIL, tools=None)
    assert (join_content(parts), list_calls(parts)) == (WEATHER, [])


def test_message_begun_in_prompt_continues(harmony: TokenizerWrapper) -> None:
    parts = parse_output(harmony, " day.<|return|>", tail=f"{TAIL}<|channel|>final<|message|>A sunny")
    assert (join_reasoning(parts), join_content(parts)) == ("", " day.")
    assert join_reasoning(parse_output(harmony, " so.", tail=f"{TAIL}<|channel|>analysis<|message|>Hm,")) == " so."


def test_parse_turn_excludes_reasoning(harmony: TokenizerWrapper) -> None:
    text = f"{THOUGHT}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}<|call|>"
    (call,) = (part for part in parse_output(harmony, text, tail=TAIL) if isinstance(part, ToolCall))
    tokens = encode_text(harmony, text)
    assert harmony.decode(tokens[: call.start]) == THOUGHT and harmony.decode(tokens[call.end :]) == "<|call|>"
    content, calls = parse_turn(tokens[call.start : call.end], harmony, TOOLS)
    assert (content, [name for name, _ in calls]) == ("I look.", ["get_weather"])


def test_muse_calls_within_messages_are_parsed(tmp_path: Path) -> None:
    markers = ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"]
    tokenizer = make_marked_tokenizer(tmp_path, markers, "<atem:function_calls>", chat_template_type="muse_spark")
    call = (
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">São Paulo</atem:parameter>\n'
        '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
    )
    text = (
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=commentary<|message|>I look.<|eom|>"
        f"<|start|>assistant to=get_weather<|message|>{call}"
    )
    parts = parse_output(tokenizer, text, tail="<|start|>assistant")
    assert (join_reasoning(parts), join_content(parts)) == ("Hm.", "I look.")
    assert list_calls(parts) == [("get_weather", {"city": "São Paulo", "days": 3})]
    assert (
        join_content(parse_output(tokenizer, " to=user<|message|>Sunny.<|eot|>", tail="<|start|>assistant")) == "Sunny."
    )
