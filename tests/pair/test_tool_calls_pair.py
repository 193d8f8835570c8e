"""A trained model calls tools, well and badly, through a real pair: streamed and whole answers are the same object."""

import json
import re
from typing import Any

import pytest

from pair import Pair
from warmline_wire.stream import ChunkFold, EventParser

BASH = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "string"}}},
    },
}
Told = tuple[str | None, list[tuple[str, dict[str, Any]]], str]  # content, calls, finish_reason


def asked(pair: Pair, text: str, **fields: Any) -> dict[str, Any]:
    """The whole answer; the streamed one is the same, but for names and times."""
    options = {"tools": [BASH, WEATHER], "max_tokens": 120, **fields}
    messages = [{"role": "system", "content": "You call tools."}, {"role": "user", "content": text}]
    reply = pair.chat(messages, **options)
    assert reply.status == 200, reply.raw
    streamed = pair.chat(messages, **options, stream=True, stream_options={"include_usage": True})
    fold = ChunkFold()
    for event in EventParser().feed(streamed.raw):
        if event.data.startswith(b"{"):
            fold.add(json.loads(event.data))
    assert _comparable(fold.result()) == _comparable(reply.json)
    answer = reply.json["choices"][0]
    assert isinstance(answer, dict)
    return answer


def _comparable(answer: dict[str, Any]) -> str:
    usage = {**answer["usage"], "prompt_tokens_details": None}
    return re.sub("call_[0-9a-f]{24}", "call", json.dumps([answer["choices"], usage, answer["object"]]))


def told(answer: dict[str, Any]) -> Told:
    message = answer["message"]
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    return message["content"], calls, answer["finish_reason"]


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        ("Use bash: ls -la", {}, (None, ["ls -la"], "tool_calls")),
        ("Use bash twice.", {}, ("Both at once.", ["ls", "pwd"], "tool_calls")),
        ("Use bash twice.", {"parallel_tool_calls": False}, ("Both at once.", ["ls"], "tool_calls")),
        ("Use bash loosely: ls", {}, (None, ["ls"], "tool_calls")),
        ("Use bash badly.", {}, (None, ["ls"], "tool_calls")),
        ("Use bash wrongly.", {}, ("<tool_call>\nlet me run ls\n</tool_call>", [], "stop")),
        ("Say: pong", {}, ("pong", [], "stop")),
        ("Use bash: ls -la", {"reasoning_effort": "none"}, (None, ["ls -la"], "tool_calls")),
        ("Use bash: ls -la", {"logprobs": True, "top_logprobs": 1}, (None, ["ls -la"], "tool_calls")),
    ],
)
def test_answers_are_reasoning_text_and_calls(
    agent_pair: Pair, text: str, fields: dict[str, Any], expected: tuple[str | None, list[str], str]
) -> None:
    answer = asked(agent_pair, text, **fields)
    content, calls, finish = told(answer)
    assert (content, [arguments["command"] for _, arguments in calls], finish) == expected
    assert all(name == "bash" for name, _ in calls)
    reasoning = answer["message"].get("reasoning_content", "")
    assert bool(reasoning) == ("reasoning_effort" not in fields) and "think>" not in reasoning


def test_a_cut_call_is_text_with_its_true_finish(agent_pair: Pair) -> None:
    content, calls, finish = told(asked(agent_pair, "Use bash and stop."))
    assert content and content.startswith("<tool_call>") and (calls, finish) == ([], "stop")
    content, calls, finish = told(asked(agent_pair, "Use bash: ls -la", max_tokens=30))
    assert content and content.startswith("<tool_call>") and (calls, finish) == ([], "length")


def test_arguments_have_their_schemas_types(agent_pair: Pair) -> None:
    """The model writes 3, its tool wants a string."""
    _, calls, _ = told(asked(agent_pair, 'Call: get_weather: {"city": "Paris", "days": 3}'))
    assert calls == [("get_weather", {"city": "Paris", "days": "3"})]


def test_without_tools_a_call_is_text(agent_pair: Pair) -> None:
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        content, calls, finish = told(asked(agent_pair, "Use bash wrongly.", **fields))
        assert content and (calls, finish) == ([], "stop")


def test_stop_words_are_not_looked_for_in_reasoning_and_calls(agent_pair: Pair) -> None:
    answer = asked(agent_pair, "Use bash twice.", stop=["should", "command", "at"])
    assert (told(answer)[:2], answer["stop_reason"]) == (("Both ", []), "at")
    assert "should" in answer["message"]["reasoning"]
