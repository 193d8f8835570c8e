"""Comparison functions of the gates."""

import json
import math
from typing import Any

import pytest

from warmline_proxy.audit.comparison import TOLERANCES
from warmline_run.smoke import judge
from warmline_run.smoke.checks.concurrent import parse_progress
from warmline_run.smoke.checks.tools import SCHEMA
from warmline_run.smoke.judge import (
    find_argument_flaw,
    find_disagreement,
    find_markup,
    infer_tolerance,
    is_collapsed,
    logprob_difference,
)
from warmline_run.smoke.responses import (
    ChatCompletion,
    MalformedAnswerError,
    StreamFold,
    TokenChoice,
    format_error_body,
    parse_completion,
)
from warmline_run.smoke.transcript import render_turn

A, B = math.log(0.4), math.log(0.4) - 5e-4  # as near as float32 promises


def make_answer(*tokens: tuple[str, dict[str, float]], finish: str = "length", text: str = "") -> ChatCompletion:
    choices = tuple(TokenChoice(token, top[token], top) for token, top in tokens)
    content = text or " ".join(token for token, _ in tokens)
    return ChatCompletion(
        text=content, reasoning="", tool_calls=(), finish_reason=finish, model="m", usage={}, tokens=choices
    )


def test_near_ties_agree_and_other_differences_do_not() -> None:
    one, other = make_answer(("x", {"x": A, "y": B})), make_answer(("y", {"y": A, "x": B}))
    assert find_disagreement(one, other) == ""
    assert "token 1" in find_disagreement(one, other, tolerance=1e-4)
    sure = make_answer(("y", {"y": A, "x": B - 1}))
    assert (
        find_disagreement(one, sure).startswith("they part at token 1")
        and find_disagreement(one, sure, tolerance=2) == ""
    )
    assert "nowhere near" in find_disagreement(make_answer(("x", {"x": A})), other)
    assert (
        find_disagreement(one, make_answer(("x", {"x": math.nan}), text="else"))
        == "the same tokens became different text"
    )


def test_shorter_answer_needs_likely_end() -> None:
    short = make_answer(("x", {"x": A}), finish="stop")
    assert find_disagreement(short, make_answer(("x", {"x": A}), ("y", {"y": A, "<end>": B}))) == ""
    assert "token 2" in find_disagreement(short, make_answer(("x", {"x": A}), ("y", {"y": A, "z": B - 1})))


def test_texts_are_compared_without_logprobs() -> None:
    one, other = (ChatCompletion(text, "", (), "stop", "m", {}) for text in ("all is well", "all is bad"))
    assert "character 7" in find_disagreement(one, other) and find_disagreement(one, one) == ""


@pytest.mark.parametrize(
    ("values", "tolerance"), [((-0.5, -1.25), 2.0), ((-0.5, -1.0009765625), 0.125), ((-0.1, -2.3), 1e-3), ((), 1e-3)]
)
def test_tolerance_follows_number_type(values: tuple[float, ...], tolerance: float) -> None:
    assert infer_tolerance(TokenChoice("x", value, {"x": value}) for value in values) == tolerance


def test_tolerances_equal_audit_tolerances() -> None:
    """The gates import nothing of the proxy, so both have a table."""
    floats = {
        "float32": judge.TOLERANCE_FLOAT32,
        "float16": judge.TOLERANCE_FLOAT16,
        "bfloat16": judge.TOLERANCE_BFLOAT16,
    }
    assert floats | {f"q{bits}": nats for bits, nats in judge.TOLERANCES_KV_BITS.items()} == TOLERANCES


def test_gap_is_between_chosen_tokens() -> None:
    one = make_answer(("x", {"x": -0.5}), ("y", {"y": -1.0}))
    assert logprob_difference(one, make_answer(("x", {"x": -0.75}), ("z", {"z": -9.0}))) == 0.25


def test_collapse_is_relative_to_reference() -> None:
    text = "The build fails since the index is missing; look at the journal first."
    assert is_collapsed("!" * 60, text) and not is_collapsed("!" * 60, "?" * 60) and not is_collapsed(text, text)
    assert not is_collapsed("!!!!", text), "too short to say"


@pytest.mark.parametrize(
    "text", ["a<|im_end|>", "<think>", "</tool_call>", "[TOOL_CALLS]", "<\uff5cUser\uff5c>", "</s>", "<start_of_turn>"]
)
def test_markup_markers_are_found(text: str) -> None:
    assert find_markup(f"Well, {text} yes") and not find_markup("if (a<b || c|d>e) [1] </p> List<String>")


@pytest.mark.parametrize(
    ("arguments", "flaw"),
    [
        ({}, ""),
        ({"count": 10}, "'count' is 10"),
        ({"count": True}, "'count' is True"),
        ({"numbered": "no"}, "'numbered' is 'no'"),
        ({"path": "/etc/passwd"}, "'path' is"),
        ({"more": 1}, "'more' is no argument"),
    ],
)
def test_argument_flaws_by_schema(arguments: dict[str, Any], flaw: str) -> None:
    right = {"path": "/etc/hostname", "count": 9, "numbered": True}
    result = find_argument_flaw({**right, **arguments}, SCHEMA)
    assert (flaw and flaw in result) or result == flaw
    assert find_argument_flaw([], SCHEMA) and "missing" in find_argument_flaw({"count": 1}, SCHEMA)


@pytest.mark.parametrize(("comment", "tokens"), [(b"prefill 3/9", 3), (b"prefill 9/9", 0), (b"ping", 0), (b"", 0)])
def test_prefill_progress_is_read_from_comments(comment: bytes, tokens: int) -> None:
    assert parse_progress(comment) == tokens


def test_stream_is_folded() -> None:
    fold = StreamFold()
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm.", "reasoning": "Hm."},
        {"content": "Yes"},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
    ]
    spoke = [fold.add(json.dumps({"model": "m", "choices": [{"delta": delta}]}).encode()) for delta in deltas]
    assert spoke == [False, True, True, True, True]
    fold.add(json.dumps({"choices": [{"delta": {}, "finish_reason": "tool_calls"}], "usage": None}).encode())
    fold.add(json.dumps({"choices": [], "usage": {"prompt_tokens": 3}}).encode())
    assert not fold.build().has_done_marker
    fold.add(b"[DONE]")
    whole = fold.build()
    assert (whole.text, whole.reasoning, whole.finish_reason, whole.prompt_tokens) == ("Yes", "Hm.", "tool_calls", 3)
    assert whole.tool_calls[0]["function"] == {"name": "f", "arguments": "{}"} and whole.has_done_marker


@pytest.mark.parametrize("data", ['{"error": {"message": "gone"}}', "nothing", "[]", '{"choices": [7]}'])
def test_malformed_stream_is_refused(data: str) -> None:
    with pytest.raises(MalformedAnswerError):
        StreamFold().add(data.encode())


@pytest.mark.parametrize("data", [None, {}, {"choices": []}, {"choices": [{"message": {"content": 7}}]}])
def test_malformed_answer_is_refused(data: Any) -> None:
    with pytest.raises(MalformedAnswerError):
        parse_completion(data)


def test_refusal_is_one_line() -> None:
    assert format_error_body(b'{"error": {"message": "too\\nlong"}}') == "too long"
    assert format_error_body(b'{"error": "no"}') == "no" and format_error_body(b"<html>") == "<html>"


def test_transcript_is_determined_by_seed() -> None:
    assert render_turn("a", 3, 3000) == render_turn("a", 3, 3000) != render_turn("b", 3, 3000)
    turns = [render_turn("a", turn, 3000) for turn in range(1, 8)]
    assert all(2500 < len(turn) < 4000 for turn in turns) and len(set(turns)) == 7
