"""Streams equal whole answers: in each API the events add up to the object of the same request without a stream.

Each case says what is asked, and what must come of it; the SDKs' own code puts streams together.
"""

import json
from collections.abc import Sequence
from typing import Any

import anthropic
import pytest
from openai import OpenAI
from openai.lib.streaming._deltas import accumulate_delta
from openai.types.responses import Response

from support.pair.pair import Pair

COMMAND = {"type": "object", "properties": {"command": {"type": "string"}, "description": {"type": "string"}}}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CAPITAL = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}
FRANCE, LS, TWICE = "What is the capital of France?", "Use bash: ls", "Use bash twice."
WRONG, CUT = "Use bash wrongly.", "Use bash and stop."
CALLED = ("bash", {"command": "ls", "description": "Run it"})
BOTH = [CALLED, ("bash", {"command": "pwd", "description": "Run it"})]
NOT_JSON = "<tool_call>\nlet me run ls\n</tool_call>"
FORECAST = ("get_weather", {"city": "Paris", "days": 5})


Calls = Sequence[tuple[str, dict[str, Any]]]  # names and arguments


class Case:
    """Fields of a request; the expected text, calls, reasoning and end."""

    def __init__(
        self,
        name: str,
        ask: str,
        end: str,
        /,
        text: str = "",
        calls: Calls = (),
        thought: str = "",
        **fields: Any,
    ) -> None:
        self.name, self.ask, self.fields = name, ask, fields
        self.expected = {"end": end, "text": text, "calls": list(calls), "thought": thought}

    def __str__(self) -> str:
        return self.name


# ---- chat completions

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("bash", COMMAND), ("get_weather", WEATHER))
]
THINKS_NOT: dict[str, Any] = {"reasoning_effort": "none"}
WITH_TOOLS: dict[str, Any] = {"tools": TOOLS, **THINKS_NOT}
FORM = {"type": "json_schema", "json_schema": {"name": "capital", "strict": True, "schema": CAPITAL}}
ALONE: dict[str, Any] = {"parallel_tool_calls": False}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASKED_WEATHER = 'Call: get_weather: {"city": 7, "days": "3"}'

CHAT = [
    Case("reasoning", FRANCE, "stop", text="Paris.", thought="An easy one."),
    Case("no reasoning", FRANCE, "stop", text="Paris.", **THINKS_NOT),
    Case("cut reasoning", FRANCE, "length", thought="An easy", max_tokens=4),
    Case("stop word", "Say: one two three four", "stop", text="one two ", stop=["three"], **THINKS_NOT),
    Case(
        "stop words elsewhere",
        TWICE,
        "stop",
        text="Both ",
        thought="I should look.",
        stop=["should", "at"],
        tools=TOOLS,
    ),
    Case("logprobs", FRANCE, "stop", text="Paris.", thought="An easy one.", logprobs=True, top_logprobs=2),
    Case("two choices", FRANCE, "stop", text="Paris.", n=2, **THINKS_NOT),
    Case("call", LS, "tool_calls", calls=[CALLED], thought="I should look.", tools=TOOLS),
    Case("call with logprobs", LS, "tool_calls", calls=[CALLED], logprobs=True, **WITH_TOOLS),
    Case("two calls", TWICE, "tool_calls", text="Both at once.", calls=BOTH, **WITH_TOOLS),
    Case("one at a time", TWICE, "tool_calls", text="Both at once.", calls=[CALLED], **ALONE, **WITH_TOOLS),
    Case("types mended", ASKED_WEATHER, "tool_calls", calls=[("get_weather", {"city": "7", "days": 3})], **WITH_TOOLS),
    Case("bracket mended", "Use bash badly.", "tool_calls", calls=[("bash", {"command": "ls"})], **WITH_TOOLS),
    Case("written loosely", "Use bash loosely: ls", "tool_calls", calls=[("bash", {"command": "ls"})], **WITH_TOOLS),
    Case("no call", WRONG, "stop", text=NOT_JSON, **WITH_TOOLS),
    Case("no tools", WRONG, "stop", text=NOT_JSON, **THINKS_NOT),
    Case("half a call", CUT, "stop", text='<tool_call>\n{"name": "bash", "arguments": {"command": "ls -', **WITH_TOOLS),
    Case("cut call", LS, "length", text='<tool_call>\n{"name": ', max_tokens=8, **WITH_TOOLS),
    Case("call required", FRANCE, "tool_calls", calls=[CALLED], tool_choice="required", **WITH_TOOLS),
    Case("call named", FRANCE, "tool_calls", calls=[FORECAST], tool_choice=NAMED, **WITH_TOOLS),
    Case("call forbidden", FRANCE, "stop", text="Paris.", tool_choice="none", **WITH_TOOLS),
    Case("schema", FRANCE, "stop", text='{"city": "Paris", "large": true}', response_format=FORM, **THINKS_NOT),
]


@pytest.fixture(scope="module")
def openai_sdk(agent_pair: Pair) -> OpenAI:
    return OpenAI(base_url=f"{agent_pair.url}/v1", api_key="x", max_retries=0)


@pytest.mark.parametrize("case", CHAT, ids=str)
def test_chat(case: Case, openai_sdk: OpenAI) -> None:
    request: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": case.ask}], **case.fields}
    whole = openai_sdk.chat.completions.create(**request).model_dump(exclude_unset=True)
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [
        chunk.model_dump(exclude_unset=True) for chunk in openai_sdk.chat.completions.create(**request, **options)
    ]
    streamed = accumulate_chunks(chunks)
    assert streamed == {
        "choices": [normalize_choice(choice) for choice in whole["choices"]],
        "usage": normalize_usage(whole["usage"]),
    }
    for choice in whole["choices"]:
        assert describe_choice(choice) == case.expected
        logprobs = (choice["logprobs"] or {}).get("content") or []
        covered = b"".join(bytes(entry["bytes"]) for entry in logprobs).decode()
        assert covered == (case.expected["text"] if case.fields.get("logprobs") else "")


def accumulate_chunks(chunks: list[Any]) -> dict[str, Any]:
    """Accumulate chunks into an answer, by the SDK's own rules."""
    choices: dict[int, Any] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices.setdefault(
                piece["index"], {"message": {}, "logprobs": {"content": []}, "finish_reason": None, "stop_reason": None}
            )
            choice["message"] = accumulate_delta(choice["message"], piece["delta"])
            choice["logprobs"]["content"] += (piece.get("logprobs") or {}).get("content") or []
            for name in ("finish_reason", "stop_reason"):
                choice[name] = piece.get(name) or choice[name]
    (usage,) = (chunk["usage"] for chunk in chunks if chunk.get("usage"))
    return {
        "choices": [normalize_choice(choices[number]) for number in sorted(choices)],
        "usage": normalize_usage(usage),
    }


def normalize_choice(choice: Any) -> dict[str, Any]:
    """Remove ids, and fields that streams leave out."""
    message = {"content": None, **choice["message"]}
    calls = [{"type": call["type"], "function": call["function"]} for call in message.pop("tool_calls", [])]
    assert all(call["id"].startswith("call_") for call in choice["message"].get("tool_calls", []))
    logprobs = (choice.get("logprobs") or {}).get("content") or []
    end = choice["finish_reason"], choice.get("stop_reason")
    return {"message": message, "calls": calls, "logprobs": logprobs, "end": end}


def normalize_usage(usage: Any) -> dict[str, Any]:
    """Remove the tokens that the second answer reuses of the first."""
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


def describe_choice(choice: Any) -> dict[str, Any]:
    message = choice["message"]
    assert message.get("reasoning_content") == message.get("reasoning")
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return {
        "end": choice["finish_reason"],
        "text": message.get("content") or "",
        "calls": [(call["name"], json.loads(call["arguments"])) for call in calls],
        "thought": message.get("reasoning_content") or "",
    }


# ---- messages

USED = [{"name": name, "input_schema": schema} for name, schema in (("bash", COMMAND), ("get_weather", WEATHER))]
SILENT: dict[str, Any] = {"thinking": {"type": "disabled"}}
USING: dict[str, Any] = {"tools": USED, **SILENT}
ONE_ONLY = {"type": "auto", "disable_parallel_tool_use": True}
THIS_ONE = {"type": "tool", "name": "get_weather"}

MESSAGES = [
    Case("thinking", FRANCE, "end_turn", text="Paris.", thought="An easy one."),
    Case("no thinking", FRANCE, "end_turn", text="Paris.", **SILENT),
    Case("cut thinking", FRANCE, "max_tokens", thought="An easy", max_tokens=4),
    Case("stop word", "Say: one two three four", "stop_sequence", text="one two ", stop_sequences=["three"], **SILENT),
    Case("tool use", LS, "tool_use", calls=[CALLED], thought="I should look.", tools=USED),
    Case("two at once", TWICE, "tool_use", text="Both at once.", calls=BOTH, **USING),
    Case("one at a time", TWICE, "tool_use", text="Both at once.", calls=[CALLED], tool_choice=ONE_ONLY, **USING),
    Case("no call", WRONG, "end_turn", text=NOT_JSON, **USING),
    Case("any tool", FRANCE, "tool_use", calls=[CALLED], tool_choice={"type": "any"}, **USING),
    Case("this tool", FRANCE, "tool_use", calls=[FORECAST], tool_choice=THIS_ONE, **USING),
    Case("no tool", FRANCE, "end_turn", text="Paris.", tool_choice={"type": "none"}, **USING),
]


@pytest.fixture(scope="module")
def anthropic_sdk(agent_pair: Pair) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=agent_pair.url, api_key="x", max_retries=0)


@pytest.mark.parametrize("case", MESSAGES, ids=str)
def test_messages(case: Case, anthropic_sdk: anthropic.Anthropic) -> None:
    fields = {"max_tokens": 120, **case.fields}
    request: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": case.ask}], **fields}
    whole = anthropic_sdk.messages.create(**request)
    with anthropic_sdk.messages.stream(**request) as stream:
        streamed = stream.get_final_message()
    assert normalize_message(streamed) == normalize_message(whole)
    blocks = {
        kind: [block for block in whole.content if block.type == kind] for kind in ("text", "tool_use", "thinking")
    }
    assert case.expected == {
        "end": whole.stop_reason,
        "text": "".join(getattr(block, "text", "") for block in blocks["text"]),
        "calls": [(getattr(block, "name", ""), getattr(block, "input", {})) for block in blocks["tool_use"]],
        "thought": "".join(getattr(block, "thinking", "") for block in blocks["thinking"]),
    }


def normalize_message(message: anthropic.types.Message) -> dict[str, Any]:
    fields: Any = message.to_dict()
    for item in (fields, *fields["content"]):
        item.pop("id", None)
    fields["usage"]["input_tokens"] += fields["usage"].pop("cache_read_input_tokens", 0)
    return dict(fields)


# ---- responses

FUNCTIONS = [
    {"type": "function", "name": name, "parameters": schema}
    for name, schema in (("bash", COMMAND), ("get_weather", WEATHER))
]
QUIET: dict[str, Any] = {"reasoning": {"effort": "none"}}
WITH_FUNCTIONS: dict[str, Any] = {"tools": FUNCTIONS, **QUIET}
TEXT_FORM = {"format": {"type": "json_schema", "name": "capital", "strict": True, "schema": CAPITAL}}
THIS_FUNCTION = {"type": "function", "name": "get_weather"}

RESPONSES = [
    Case("reasoning", FRANCE, "completed", text="Paris.", thought="An easy one."),
    Case("no reasoning", FRANCE, "completed", text="Paris.", **QUIET),
    Case("cut reasoning", FRANCE, "incomplete", thought="An easy", max_output_tokens=4),
    Case("call", LS, "completed", calls=[CALLED], thought="I should look.", tools=FUNCTIONS),
    Case("two calls", TWICE, "completed", text="Both at once.", calls=BOTH, **WITH_FUNCTIONS),
    Case("no call", WRONG, "completed", text=NOT_JSON, **WITH_FUNCTIONS),
    Case("call required", FRANCE, "completed", calls=[CALLED], tool_choice="required", **WITH_FUNCTIONS),
    Case("call named", FRANCE, "completed", calls=[FORECAST], tool_choice=THIS_FUNCTION, **WITH_FUNCTIONS),
    Case("call forbidden", FRANCE, "completed", text="Paris.", tool_choice="none", **WITH_FUNCTIONS),
    Case("schema", FRANCE, "completed", text='{"city": "Paris", "large": true}', text_format=TEXT_FORM, **QUIET),
]


@pytest.mark.parametrize("case", RESPONSES, ids=str)
def test_responses(case: Case, openai_sdk: OpenAI) -> None:
    fields = {"text" if name == "text_format" else name: value for name, value in case.fields.items()}
    request: dict[str, Any] = {"model": "m", "input": case.ask, "store": False, **fields}
    whole = openai_sdk.responses.create(**request)
    streamed = list(openai_sdk.responses.create(**request, stream=True))[-1].response
    assert normalize_response(streamed) == normalize_response(whole)
    calls = [item for item in whole.output if item.type == "function_call"]
    thoughts = [part.text for item in whole.output if item.type == "reasoning" for part in item.content or ()]
    assert case.expected == {
        "end": whole.status,
        "text": whole.output_text,
        "calls": [(call.name, json.loads(call.arguments)) for call in calls],
        "thought": "".join(thoughts),
    }


def normalize_response(response: Response) -> dict[str, Any]:
    fields: dict[str, Any] = response.model_dump()
    for name in ("id", "created_at", "completed_at"):
        fields.pop(name, None)
    fields["usage"].pop("input_tokens_details")
    for item in fields["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return fields


# ---- completions

ASKED_AS_TEXT = "<|im_start|>user\nSay: one two three four<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {},
    "stop word": {"stop": ["three"]},
    "cut": {"max_tokens": 2},
    "echo": {"echo": True},
    "logprobs": {"logprobs": 2},
    "two choices": {"n": 2},
    "choice": {"extra_body": {"structured_outputs": {"choice": ["one two three four", "five"]}}},
}


@pytest.mark.parametrize("fields", COMPLETIONS.values(), ids=COMPLETIONS)
def test_completions(fields: dict[str, Any], openai_sdk: OpenAI) -> None:
    request: dict[str, Any] = {"model": "m", "prompt": ASKED_AS_TEXT, **fields}
    whole = openai_sdk.completions.create(**request)
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(openai_sdk.completions.create(**request, **options))
    for choice in whole.choices:
        pieces = [piece for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
        assert choice.text == "".join(piece.text for piece in pieces)
        assert [choice.finish_reason] == [piece.finish_reason for piece in pieces if piece.finish_reason]
        logprobs = [piece.logprobs.model_dump() for piece in pieces if piece.logprobs]
        streamed = (
            {name: [value for one in logprobs for value in one[name]] for name in logprobs[0]} if logprobs else None
        )
        assert streamed == (choice.logprobs and choice.logprobs.model_dump())
    (usage,) = (chunk.usage for chunk in chunks if chunk.usage)
    assert whole.usage and normalize_usage(usage.model_dump()) == normalize_usage(whole.usage.model_dump())
    assert whole.choices[0].text in ("one two three four", "one two ", "one two", ASKED_AS_TEXT + "one two three four")
    assert bool(whole.choices[0].logprobs) == ("logprobs" in fields) and len(whole.choices) == fields.get("n", 1)
