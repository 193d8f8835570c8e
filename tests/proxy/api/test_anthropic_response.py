"""Anthropic's responses from the backend's chunks; the SDK's accumulator gives a stream's message."""

import json
from typing import Any

import msgspec
import pytest
from anthropic import types
from anthropic.lib.streaming._messages import accumulate_event

from warmline_common.protocol.sse import SseParser
from warmline_proxy.api.anthropic.adapter import MessagesApi
from warmline_proxy.api.anthropic.response import MessageOptions
from warmline_proxy.api.base import ApiCall, Chunk, ResponseStart
from warmline_proxy.errors import (
    ClientError,
    bad_gateway,
    bad_request,
    encode_error_body,
    gateway_timeout,
    service_unavailable,
    too_many_requests,
)

START = ResponseStart("0123456789abcdef01234567", "served", 20, 16)
CALL = {"id": "call_00112233445566778899aabb", "type": "function"}


def make_chunk(finish: str | None = None, stop_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "stop_reason": stop_reason}],
        "usage": None,
    }


def make_call_chunks(index: int, name: str, *arguments: str, call_id: str = CALL["id"]) -> list[dict[str, Any]]:
    """Chunks of a tool call, one for each part of its arguments."""
    first = {"index": index, **CALL, "id": call_id, "function": {"name": name, "arguments": arguments[0]}}
    more = [{"index": index, "function": {"arguments": part}} for part in arguments[1:]]
    return [make_chunk(tool_calls=[call]) for call in [first, *more]]


def make_usage_chunk(prompt: int, completion: int, cached: int, **details: Any) -> dict[str, Any]:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return {"choices": [], "usage": {**usage, **details}}


def make_encoder(stream: bool, max_tokens: int = 50, model: str | None = "theirs") -> Any:
    api = MessagesApi()
    return api.create_encoder(ApiCall(api, {}, model, stream, "", api_options=MessageOptions(max_tokens)), START)


def encode_stream(chunks: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    encoder = make_encoder(True, **options)
    sent = b"".join([_encode(encoder, chunk) for chunk in chunks] + [encoder.encode_done()])
    parsed = list(SseParser().feed(sent))
    events = [json.loads(event.data) for event in parsed]
    assert [event.name.decode() for event in parsed] == [event["type"] for event in events]
    return events


def _encode(encoder: Any, chunk: dict[str, Any]) -> bytes:
    raw = json.dumps(chunk).encode()
    return bytes(encoder.encode_chunk(msgspec.json.decode(raw, type=Chunk), raw))


def encode_json(chunks: list[dict[str, Any]], **options: Any) -> Any:
    encoder = make_encoder(False, **options)
    assert all(_encode(encoder, chunk) == b"" for chunk in chunks)
    return json.loads(encoder.encode_json())


def accumulate(events: list[dict[str, Any]]) -> types.Message:
    snapshot, buffers = None, dict[int, bytes]()
    for event in events:
        built: Any = msgspec.convert(event, dict)
        snapshot = accumulate_event(event=built, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    return snapshot


def make_message(chunks: list[dict[str, Any]], **options: Any) -> Any:
    """Make the message; its streamed and JSON forms must be the same for the SDK."""
    whole = encode_json(chunks, **options)
    streamed = accumulate(encode_stream(chunks, **options))
    assert streamed.to_dict() == types.Message.construct(**whole).to_dict()
    types.Message.model_validate({**whole, "stop_details": None})  # its only type for the SDK is "refusal"
    return whole


ALL = [
    make_chunk(role="assistant", content=""),
    make_chunk(reasoning_content="I sh", reasoning="I sh"),
    make_chunk(reasoning="ould."),
    make_chunk(content="Let "),
    make_chunk(content="me."),
    *make_call_chunks(0, "look", '{"at": "ü"}'),
    *make_call_chunks(1, "wait", "{}", call_id="functions.wait:0"),
    make_chunk("tool_calls"),
    make_usage_chunk(20, 9, 12, completion_tokens_details={"reasoning_tokens": 4}),
]


def test_message_has_thinking_text_and_tool_calls() -> None:
    assert make_message(ALL) == {
        "id": "msg_0123456789abcdef01234567",
        "type": "message",
        "role": "assistant",
        "model": "theirs",
        "content": [
            {"type": "thinking", "thinking": "I should.", "signature": "d2FybWxpbmU="},
            {"type": "text", "text": "Let me."},
            {"type": "tool_use", "id": "toolu_00112233445566778899aabb", "name": "look", "input": {"at": "ü"}},
            {"type": "tool_use", "id": "functions.wait:0", "name": "wait", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            "input_tokens": 8,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 12,
            "output_tokens": 9,
            "output_tokens_details": {"thinking_tokens": 4},
        },
    }


def test_stream_events_are_in_order() -> None:
    events = encode_stream(ALL)
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 16  # as planned, before the measured value
    shown = [(event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in events]
    assert shown == [
        ("message_start", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("content_block_start", 3, None),
        ("content_block_delta", 3, "input_json_delta"),
        ("content_block_stop", 3, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]


def test_each_chunk_is_encoded_at_once() -> None:
    encoder = make_encoder(True)
    assert _encode(encoder, make_chunk(role="assistant", content="")).startswith(b"event: message_start\n")
    assert b'"text":"Par"' in _encode(encoder, make_chunk(content="Par"))
    assert b'"text":"is"' in _encode(encoder, make_chunk(content="is"))


@pytest.mark.parametrize(
    ("finish", "word", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
        ("tool_calls", None, ("tool_use", None)),
    ],
)
def test_stop_reasons_are_converted(finish: str, word: str | None, expected: tuple[str, str | None]) -> None:
    message = make_message([make_chunk(content="x"), make_chunk(finish, word), make_usage_chunk(20, 1, 0)])
    assert (message["stop_reason"], message["stop_sequence"], message["stop_details"]) == (*expected, None)


def test_failed_schema_is_explained_in_stop_details() -> None:
    """The SDK reads the details of a whole answer, and of a stream."""
    words = "the answer can't be held to its schema: /a: is odd"
    chunks = [make_chunk(content="x"), make_chunk("length", words), make_usage_chunk(20, 1, 0)]
    message = make_message(chunks)
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    assert message["stop_details"] == {"type": "schema", "explanation": words}
    for read in (types.Message.construct(**message), accumulate(encode_stream(chunks))):
        assert read.stop_details is not None and read.stop_details.explanation == words


def test_alternating_content_opens_new_blocks() -> None:
    chunks = [
        make_chunk(content="a"),
        *make_call_chunks(0, "look", "{}"),
        make_chunk(content="b"),
        make_chunk(reasoning_content="c"),
        make_chunk("stop"),
    ]
    assert [block["type"] for block in make_message(chunks)["content"]] == ["text", "tool_use", "text", "thinking"]


def test_tool_arguments_in_parts_are_joined() -> None:
    chunks = [
        *make_call_chunks(0, "look", '{"a"', ": [1,", " null]}"),
        *make_call_chunks(1, "look", ""),
        make_chunk("tool_calls"),
    ]
    assert [block["input"] for block in make_message(chunks)["content"]] == [{"a": [1, None]}, {}]


@pytest.mark.parametrize(("arguments", "expected"), [("[1]", [1]), ('"ls"', "ls"), ('{"a": ', '{"a": ')])
def test_non_object_arguments_are_wrapped(arguments: str, expected: Any) -> None:
    assert make_message([*make_call_chunks(0, "look", arguments), make_chunk("tool_calls")])["content"][0]["input"] == {
        "arguments": expected
    }


def test_empty_answer_has_no_content() -> None:
    message = make_message([make_chunk(role="assistant", content=""), make_chunk("stop"), make_usage_chunk(20, 0, 0)])
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")


def test_answer_without_chunks_is_a_message() -> None:
    message = make_message([])
    assert (message["role"], message["content"], message["usage"]["input_tokens"]) == ("assistant", [], 4)


def test_zero_max_tokens_gives_empty_content() -> None:
    """A prompt is prefilled only."""
    message = make_message(
        [
            make_chunk(role="assistant", content=""),
            make_chunk(content="x"),
            make_chunk("length"),
            make_usage_chunk(20, 1, 0),
        ],
        max_tokens=0,
    )
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], "max_tokens", 0)


def test_missing_model_gives_served_name() -> None:
    assert make_message([make_chunk("stop")], model=None)["model"] == "served"


def test_stream_error_is_an_error_event() -> None:
    error = bad_gateway("The backend ended its answer early.")
    sent = [MessagesApi().encode_stream_error(error), make_encoder(True).encode_stream_error(error)]
    events = [event for each in sent for event in SseParser().feed(each)]
    assert [event.name for event in events] == [b"error", b"error"]
    expected = {"type": "error", "error": {"type": "api_error", "message": "The backend ended its answer early."}}
    assert [json.loads(event.data) for event in events] == [expected, expected]


def test_unreadable_chunk_returns_502() -> None:
    with pytest.raises(ClientError, match="502: The backend sent an unreadable chunk"):
        make_encoder(True).encode_chunk({}, b'{"choices": 5}')


OVERFLOW = (
    "This model's maximum context length is 4096 tokens. However, your prompt has 5000 tokens, which leaves no room."
)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (bad_request("x", status=404), "not_found_error", "x"),
        (bad_request("x", status=405), "invalid_request_error", "x"),
        (bad_request("x", status=408), "timeout_error", "x"),
        (bad_request("x", status=413), "request_too_large", "x"),
        (bad_request("x", status=403), "permission_error", "x"),
        (ClientError(401, encode_error_body("x", "authentication_error")), "authentication_error", "x"),
        (ClientError(507, b"disk"), "api_error", "disk"),
        (too_many_requests("x", 3), "rate_limit_error", "x"),
        (service_unavailable("x"), "overloaded_error", "x"),
        (gateway_timeout("x", "c"), "timeout_error", "The request was ended: x.  What was computed is kept."),
        (bad_request("'stop' must be short", param="stop"), "invalid_request_error", "'stop_sequences' must be short"),
        (
            bad_request("'response_format.json_schema.schema' is odd", param="response_format.json_schema.schema"),
            "invalid_request_error",
            "'output_config.format.schema' is odd",
        ),
        (
            bad_request(OVERFLOW, code="context_length_exceeded"),
            "invalid_request_error",
            "prompt is too long: 5000 tokens > 4096 maximum",
        ),
        (
            bad_request(OVERFLOW.replace("5000", "more than 9000"), code="context_length_exceeded"),
            "invalid_request_error",
            "prompt is too long: 9000 tokens > 4096 maximum",
        ),
        (bad_request("9 MB", code="kv_memory_exceeded"), "invalid_request_error", "prompt is too long: 9 MB"),
    ],
)
def test_errors_have_anthropic_envelope(error: ClientError, kind: str, message: str) -> None:
    assert json.loads(MessagesApi().encode_error(error)) == {
        "type": "error",
        "error": {"type": kind, "message": message},
    }
