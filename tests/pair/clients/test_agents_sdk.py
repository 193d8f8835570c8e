"""Small agents on real SDKs before a model that calls tools: ask, run the calls, send the results."""

import json
from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from openai import OpenAI
from pydantic import BaseModel

from support.pair.pair import Pair

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "description": {"type": "string"}}}
BASH = {"type": "function", "function": {"name": "bash", "description": "Runs a command.", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "bash", "description": "Runs a command.", "parameters": SCHEMA, "strict": False}
USED = {"name": "bash", "description": "Runs a command.", "input_schema": SCHEMA}
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_")
LS = {"command": "ls -la", "description": "Run it"}
SHOWN = "README.md\n"
SAID = "The tool says: README.md."


class Location(BaseModel):
    city: str
    country: str


@pytest.fixture(scope="module")
def openai_sdk(agent_pair: Pair) -> OpenAI:
    return OpenAI(base_url=f"{agent_pair.url}/v1", api_key="x", max_retries=0)


Ask = Callable[..., Any]  # of messages and options, as `chat.completions.create` takes them; the whole answer


def ask_openai(openai_sdk: OpenAI, litellm: Any, pair: Pair) -> Ask:
    return lambda **request: openai_sdk.chat.completions.create(model="m", **request)


def stream_openai(openai_sdk: OpenAI, litellm: Any, pair: Pair) -> Ask:
    def ask(**request: Any) -> Any:
        with openai_sdk.chat.completions.stream(model="m", stream_options={"include_usage": True}, **request) as stream:
            for event in stream:
                if event.type == "content.delta":
                    assert not any(marker in event.delta for marker in MARKERS)
            return stream.get_final_completion()

    return ask


def ask_litellm(openai_sdk: OpenAI, litellm: Any, pair: Pair) -> Ask:
    request = {"model": "openai/m", "api_base": f"{pair.url}/v1", "api_key": "x", "num_retries": 0}
    return lambda **fields: litellm.completion(**request, **fields)


def stream_litellm(openai_sdk: OpenAI, litellm: Any, pair: Pair) -> Ask:
    def ask(**fields: Any) -> Any:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(ask_litellm(openai_sdk, litellm, pair)(**fields, **options))
        return litellm.stream_chunk_builder(chunks, messages=fields["messages"])

    return ask


@pytest.mark.parametrize("by", [ask_openai, stream_openai, ask_litellm, stream_litellm])
def test_chat_agent_loop(by: Any, openai_sdk: OpenAI, litellm: Any, agent_pair: Pair) -> None:
    """The call comes back as JSON that its client wrote anew, and what was sampled is found again, to the end."""
    ask: Ask = by(openai_sdk, litellm, agent_pair)
    messages: list[Any] = [{"role": "user", "content": f"I am {by.__name__}.\nUse bash: ls -la"}]
    strict = {**BASH, "function": {**BASH["function"], "strict": True}}  # type: ignore[dict-item]
    tools = [strict if by is stream_openai else BASH]  # that helper takes no others
    first = ask(messages=messages, tools=tools)
    (call,), choice = first.choices[0].message.tool_calls, first.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.reasoning_content == "I should look."
    assert (call.function.name, json.loads(call.function.arguments)) == ("bash", LS)
    agent_pair.settle()
    function = {"name": "bash", "arguments": json.dumps(LS, indent=2)}
    messages += [
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": choice.message.reasoning_content,
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.id, "content": SHOWN},
    ]
    second = ask(messages=messages, tools=tools)
    assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", SAID)
    assert second.choices[0].message.reasoning_content == "I have the result."
    held = first.usage.total_tokens - 1  # the last token has no row yet
    assert second.usage.prompt_tokens_details.cached_tokens >= held


def test_loosely_written_call_is_replayed(openai_sdk: OpenAI, agent_pair: Pair) -> None:
    """In another order and with other spaces than the template's; with other arguments it is not what was sampled."""
    messages: list[Any] = [{"role": "user", "content": "Use bash loosely: make"}]
    request: dict[str, Any] = {"model": "m", "tools": [BASH]}
    first = openai_sdk.chat.completions.create(messages=messages, **request)
    message = first.choices[0].message.model_dump(exclude_none=True)
    agent_pair.settle()
    call = message["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"command": "make"} and first.usage
    result = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
    again = openai_sdk.chat.completions.create(messages=[*messages, message, result], **request)
    assert get_cached_tokens(again) >= first.usage.total_tokens - 1
    call["function"]["arguments"] = '{"command": "make test"}'
    changed = openai_sdk.chat.completions.create(messages=[*messages, message, result], **request)
    assert first.usage.prompt_tokens <= get_cached_tokens(changed) < first.usage.total_tokens - 1
    assert again.choices[0].message.content == changed.choices[0].message.content == "The tool says: ok."


def get_cached_tokens(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def test_two_tool_results(openai_sdk: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Use bash twice."}]
    first = openai_sdk.chat.completions.create(model="m", messages=messages, tools=[BASH])  # type: ignore[list-item]
    message = first.choices[0].message.model_dump(exclude_none=True)
    assert message["content"] == "Both at once." and len(message["tool_calls"]) == 2 and first.usage
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": text}
        for call, text in zip(message["tool_calls"], ("README.md", "/home"), strict=True)
    ]
    second: Any = openai_sdk.chat.completions.create(model="m", messages=[*messages, message, *results], tools=[BASH])  # type: ignore[list-item]
    assert second.choices[0].message.content == "The tool says: /home."
    assert get_cached_tokens(second) >= first.usage.total_tokens - 1


def test_chat_structured_answer(openai_sdk: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Describe Italy as JSON."}]
    parsed = openai_sdk.chat.completions.parse(model="m", messages=messages, response_format=Location)
    assert parsed.choices[0].message.parsed == Location(city="Rome", country="Italy")
    response = openai_sdk.responses.parse(model="m", input="Describe Japan as JSON.", text_format=Location)
    assert response.output_parsed == Location(city="Tokyo", country="Japan")


def test_messages_agent_loop(agent_pair: Pair) -> None:
    client = anthropic.Anthropic(base_url=agent_pair.url, api_key="x", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "I speak Messages.\nUse bash: ls -la"}]
    request: dict[str, Any] = {"model": "m", "max_tokens": 200, "tools": [USED]}
    first = client.messages.create(messages=messages, **request)
    thought, call = first.content
    assert first.stop_reason == "tool_use" and (thought.type, call.type) == ("thinking", "tool_use")
    assert (getattr(thought, "thinking", ""), getattr(call, "input", {})) == ("I should look.", LS)
    agent_pair.settle()
    result = {"type": "tool_result", "tool_use_id": getattr(call, "id", ""), "content": SHOWN}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(messages=messages, **request)
    assert [block.type for block in second.content] == ["thinking", "text"] and second.stop_reason == "end_turn"
    assert getattr(second.content[1], "text", "") == SAID
    prompt_tokens = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
    assert (second.usage.cache_read_input_tokens or 0) >= prompt_tokens + first.usage.output_tokens - 1


def test_responses_agent_loop(openai_sdk: OpenAI, agent_pair: Pair) -> None:
    items: list[Any] = [{"role": "user", "content": "I speak Responses.\nUse bash: ls -la"}]
    request: dict[str, Any] = {"model": "m", "tools": [FLAT], "store": False}
    first = openai_sdk.responses.create(input=items, **request)
    thought, call = first.output
    assert (thought.type, call.type) == ("reasoning", "function_call")
    assert json.loads(getattr(call, "arguments", "")) == LS
    agent_pair.settle()
    result = {"type": "function_call_output", "call_id": getattr(call, "call_id", ""), "output": SHOWN}
    second = openai_sdk.responses.create(input=[*items, *first.output, result], **request)
    assert second.output_text == SAID and second.usage and first.usage
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
