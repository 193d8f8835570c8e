"""OpenAI's chat: custom tools as functions and back, required fields of chunks and answers."""

import json
from typing import Any

import msgspec
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from support.proxy import calls
from warmline_common.protocol.sse import SseParser
from warmline_proxy.api.base import ApiCall, ResponseStart
from warmline_proxy.api.registry import CHAT, COMPLETION, RESPONSES
from warmline_proxy.errors import ClientError

GRAMMAR = {"definition": 'start: "a"', "syntax": "lark"}
SQL = {"type": "custom", "custom": {"name": "sql", "description": "Runs SQL."}}
PATCH = {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": GRAMMAR}}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [SQL, LOOK, PATCH]
USER = {"role": "user", "content": 'say "custom"'}
CALLED = {"id": "call_1", "type": "custom", "custom": {"name": "sql", "input": "SELECT 'é'\n"}}
START = ResponseStart("r", "served", 3, 0)


def read_call(**fields: Any) -> ApiCall:
    return calls.read_call(CHAT, json.dumps({"model": "m", "messages": [USER], **fields}).encode(), {})


def convert(**fields: Any) -> Any:
    """Fields for the backend, as JSON values."""
    return msgspec.json.decode(msgspec.json.encode(read_call(**fields).fields))


def make_chunk(**fields: Any) -> bytes:
    common = {"id": "chatcmpl-r", "object": "chat.completion.chunk", "created": 1, "model": "served"}
    return json.dumps(common | fields).encode()


def make_choice(finish: str | None = None, **delta: Any) -> bytes:
    return make_chunk(choices=[{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}])


USAGE = make_chunk(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5})


def encode(call: ApiCall, *chunks: bytes) -> list[Any]:
    """Chunks of the stream, or the one answer."""
    encoder = call.api.create_encoder(call, START)
    sent = b"".join(encoder.encode_chunk(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]), raw) for raw in chunks)
    if not call.stream:
        return [json.loads(encoder.encode_json())]
    return [json.loads(event.data) for event in SseParser().feed(sent)]


def make_call_delta(index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{index}", "type": "function", "function": function}


def test_custom_tools_are_functions_as_by_responses() -> None:
    flat = [
        {"type": "custom", "name": "sql", "description": "Runs SQL."},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", **GRAMMAR}},
    ]
    by_responses = calls.read_call(RESPONSES, json.dumps({"input": "x", "tools": flat}).encode(), {}).fields["tools"]
    converted = convert(tools=TOOLS)["tools"]
    assert [converted[0], converted[2]] == by_responses and converted[1] == LOOK
    assert 'start: "a"' in converted[2]["function"]["description"]


def test_custom_calls_and_choices_are_converted() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALLED, {**CALLED, "id": "call_2"}]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "1"}
    fields = convert(messages=[USER, called, result], tools=TOOLS, tool_choice={"type": "custom", **SQL})
    function = {"name": "sql", "arguments": json.dumps({"input": "SELECT 'é'\n"}, ensure_ascii=False)}
    assert fields["messages"][1]["tool_calls"][0] == {"id": "call_1", "type": "function", "function": function}
    assert [message["role"] for message in fields["messages"]] == ["user", "assistant", "tool"]
    assert fields["messages"][0] == USER and fields["messages"][2] == result
    assert fields["tool_choice"] == {"type": "function", "function": {"name": "sql"}}
    allowed = {"mode": "auto", "tools": [SQL, {"type": "function", "function": {"name": "look"}}]}
    choice = convert(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})["tool_choice"]
    assert [tool["function"]["name"] for tool in choice["allowed_tools"]["tools"]] == ["sql", "look"]


def test_bodies_without_custom_tools_stay_as_they_came() -> None:
    body = b'{"messages": [ {"role":"user", "content": "say \\"custom\\""} ], "tools": [ ], "n": 1.0}'
    call = calls.read_call(CHAT, body, {})
    assert bytes(call.fields["messages"]) == b'[ {"role":"user", "content": "say \\"custom\\""} ]'
    assert bytes(call.fields["tools"]) == b"[ ]" and call.api_options == frozenset()


@pytest.mark.parametrize("stream", [True, False])
def test_calls_of_custom_tools_are_custom(stream: bool) -> None:
    call = read_call(tools=TOOLS, stream=stream)
    deltas = [make_call_delta(0, "sql", '{"input": "SELECT 1"}'), make_call_delta(1, "look", "{}")]
    (answer, *_) = encode(call, make_choice(tool_calls=deltas), make_choice("tool_calls"), USAGE)
    choice = answer["choices"][0]
    calls = choice["delta" if stream else "message"]["tool_calls"]
    custom = {"id": "call_0", "type": "custom", "custom": {"name": "sql", "input": "SELECT 1"}}
    assert {**calls[0], "index": 0} == {"index": 0, **custom}
    assert calls[1]["function"] == {"name": "look", "arguments": "{}"} and calls[1]["type"] == "function"
    if not stream:
        ChatCompletion.model_validate(answer, strict=True)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [LOOK, {"type": "custom", "custom": {"name": 5}}]}, "tools[1].custom.name"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.custom"),
        ({"tool_choice": {"type": "custom", "custom": {}}}, "tool_choice.custom.name"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "a"}}]}]},
            "messages[1].tool_calls[0].custom.input",
        ),
    ],
)
def test_malformed_custom_tools_are_refused(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(ClientError) as caught:
        read_call(**fields)
    error = json.loads(caught.value.body)["error"]
    assert caught.value.status == 400 and error["param"] == where and f"'{where}'" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": {"type": "custom"}},
        {"tool_choice": "custom"},
        {"tool_choice": ["custom"]},
        {"messages": "custom"},
        {"messages": ["custom", {"role": "assistant", "tool_calls": "custom"}, {"tool_calls": ["custom"]}]},
    ],
)
def test_other_shapes_are_left_to_the_backend(fields: dict[str, Any]) -> None:
    assert convert(**fields) == {"model": "m", "messages": [USER], **fields}


@pytest.mark.parametrize("include", [True, False])
def test_usage_is_null_in_chunks_where_it_will_come(include: bool) -> None:
    call = read_call(stream=True, stream_options={"include_usage": include})
    chunks = encode(call, make_choice(role="assistant"), make_choice(content="x"), make_choice("stop"), USAGE)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert [chunk.get("usage", "absent") for chunk in chunks[:3]] == [None if include else "absent"] * 3
    assert [chunk["usage"]["total_tokens"] for chunk in chunks[3:]] == [5] * include


def test_answers_have_the_required_fields() -> None:
    entry = {"token": "x", "logprob": -1.0, "bytes": [120], "top_logprobs": []}
    with_logprobs = {"index": 0, "delta": {"content": "x"}, "logprobs": {"content": [entry], "refusal": None}}
    (answer,) = encode(read_call(), make_chunk(choices=[with_logprobs]), make_choice("stop"), USAGE)
    (choice,) = ChatCompletion.model_validate(answer, strict=True).choices
    assert answer["choices"][0].keys() >= {"index", "message", "logprobs", "finish_reason"}
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "x", "refusal": None}
    assert answer["choices"][0]["logprobs"] == {"content": [entry], "refusal": None} and choice.message.refusal is None


def test_completions_know_no_custom_tools() -> None:
    body = {"prompt": "x", "tools": TOOLS}
    fields = calls.read_call(COMPLETION, json.dumps(body).encode(), {}).fields
    assert msgspec.json.decode(msgspec.json.encode(fields)) == body
