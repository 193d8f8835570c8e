"""Responses API responses from chat's chunks: events in order, and the object that they describe."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from support.proxy.calls import read_call
from support.proxy.responses import make_chunks, make_delta
from warmline_common.protocol.messages import encode
from warmline_common.protocol.sse import SseParser
from warmline_proxy.api.base import ResponseStart
from warmline_proxy.api.responses.adapter import ResponsesApi
from warmline_proxy.api.responses.items import decode_reasoning
from warmline_proxy.errors import bad_gateway, bad_request

START = ResponseStart(request_id="abc", model="served", prompt_tokens=9, cached_tokens=4)
TOOLS = [
    {"type": "function", "name": "look", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "agents", "description": "", "tools": [{"type": "function", "name": "spawn"}]},
]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
# Of the specification; the SDK's type allows some of them to be absent.
REQUIRED_FIELDS = frozenset(
    {"id", "object", "created_at", "error", "incomplete_details", "instructions", "model", "tools", "output"}
    | {"parallel_tool_calls", "metadata", "tool_choice", "temperature", "top_p"}
)
ENTRY = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}


def make_call_delta(index: int, name: str | None, arguments: str, call_id: str | None = None) -> dict[str, Any]:
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    return make_delta(tool_calls=[{"index": index, "id": call_id, "type": "function", "function": function}])


class EncodedResponse:
    """One answer, streamed and as JSON."""

    def __init__(self, parts: list[dict[str, Any]], **fields: Any) -> None:
        body = {"model": "m", "input": "Hi.", "tools": TOOLS, **fields}
        stream, whole = (self._encoder({**body, "stream": stream}) for stream in (True, False))
        sent = b"".join(stream.encode_chunk({}, encode(chunk)) for chunk in parts) + stream.encode_done()
        self.raw = list(SseParser().feed(sent))
        self.events = [json.loads(event.data) for event in self.raw]
        assert not any(whole.encode_chunk({}, encode(chunk)) for chunk in parts)
        self.whole = json.loads(whole.encode_json())

    @staticmethod
    def _encoder(body: dict[str, Any]) -> Any:
        api = ResponsesApi()
        return api.create_encoder(read_call(api, json.dumps(body).encode(), {}), START)

    @property
    def names(self) -> list[str]:
        return [event["type"].removeprefix("response.") for event in self.events]

    @property
    def last(self) -> Any:
        return self.events[-1]["response"]

    def deltas(self, name: str) -> str:
        return "".join(event["delta"] for event in self.events if event["type"] == f"response.{name}.delta")


def check_response(answer: EncodedResponse) -> None:
    """Check what holds for every answer."""
    assert [event["sequence_number"] for event in answer.events] == list(range(len(answer.events)))
    assert [event.name.decode() for event in answer.raw] == [event["type"] for event in answer.events]
    assert answer.names[:2] == ["created", "in_progress"] and answer.events[0]["response"]["output"] == []
    done = [event for event in answer.events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == answer.last["output"]
    assert [event["output_index"] for event in done] == list(range(len(done)))
    added = [event for event in answer.events if event["type"] == "response.output_item.added"]
    assert [event["item"]["id"] for event in added] == [item["id"] for item in answer.last["output"]]
    assert len({item["id"] for item in answer.last["output"]}) == len(done)
    times = {"created_at": 0, "completed_at": 0}
    assert {**answer.last, **times} == {**answer.whole, **times}
    arguments = [event for event in answer.events if event["type"] == "response.function_call_arguments.done"]
    called = [item for item in answer.last["output"] if item["type"] == "function_call"]
    assert [event["name"] for event in arguments] == [item["name"] for item in called]
    assert answer.whole.keys() >= REQUIRED_FIELDS
    Response.model_validate(answer.whole, strict=True)
    for event in answer.events:
        EVENTS.validate_python(event, strict=True)


def test_text_response_and_events() -> None:
    answer = EncodedResponse(make_chunks(make_delta(content="Par"), make_delta(content="is.")))
    check_response(answer)
    assert answer.names[2:] == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    (item,) = answer.whole["output"]
    assert item == {
        "id": "msg_abc_0",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Paris.", "annotations": [], "logprobs": []}],
    }
    assert answer.deltas("output_text") == "Paris." and answer.events[6]["text"] == "Paris."
    assert (answer.whole["id"], answer.whole["model"], answer.whole["status"]) == ("resp_abc", "m", "completed")
    assert answer.whole["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 14,
    }


def test_output_items_are_in_order() -> None:
    parts = make_chunks(
        make_delta(reasoning_content="Hm", reasoning="Hm"),
        make_delta(reasoning="."),
        make_delta(content="Looking."),
        make_call_delta(0, "look", '{"a": 1}', "call_1"),
        make_call_delta(1, "agents__spawn", "{}", "call_2"),
        make_call_delta(2, "made_up", "{}", "call_3"),
        make_delta(content="More."),
        finish="tool_calls",
    )
    answer = EncodedResponse(parts)
    check_response(answer)
    kinds = [item["type"] for item in answer.whole["output"]]
    assert kinds == ["reasoning", "message", *["function_call"] * 3, "message"]
    reasoning, _, look, spawn, made_up, _ = answer.whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}] and reasoning["summary"] == []
    assert answer.deltas("reasoning_text") == "Hm." and "encrypted_content" not in reasoning
    assert (look["id"], look["call_id"], look["name"]) == ("fc_abc_2", "call_1", "look")
    assert (look["arguments"], look["status"]) == ('{"a": 1}', "completed") and "namespace" not in look
    assert (spawn["name"], spawn["namespace"]) == ("spawn", "agents")
    assert (made_up["name"], made_up["call_id"]) == ("made_up", "call_3")
    assert answer.whole["status"] == "completed"


def test_tool_arguments_in_parts_are_joined() -> None:
    parts = make_chunks(
        make_call_delta(0, "look", "", "call_1"),
        make_call_delta(0, None, '{"a":'),
        make_call_delta(0, None, " 1}"),
        finish="tool_calls",
    )
    answer = EncodedResponse(parts)
    check_response(answer)
    assert answer.deltas("function_call_arguments") == answer.whole["output"][0]["arguments"] == '{"a": 1}'
    assert answer.names.count("function_call_arguments.delta") == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"input": "a\\n\\"b\\""}', 'a\n"b"'), ('{"patch": "x"}', '{"patch": "x"}'), ("*** Begin", "*** Begin")],
)
def test_custom_tool_call_has_plain_input(arguments: str, text: str) -> None:
    half = len(arguments) // 2
    parts = make_chunks(
        make_call_delta(0, "patch", arguments[:half], "call_1"),
        make_call_delta(0, None, arguments[half:]),
        finish="tool_calls",
    )
    answer = EncodedResponse(parts)
    check_response(answer)
    (item,) = answer.whole["output"]
    assert item["type"] == "custom_tool_call" and item["id"] == "ctc_abc_0" and item["call_id"] == "call_1"
    assert item["input"] == answer.deltas("custom_tool_call_input") == text
    assert (
        answer.events[-3] | {"input": text} == answer.events[-3] and answer.names[-3] == "custom_tool_call_input.done"
    )


def test_reasoning_as_summary_and_encrypted_content() -> None:
    parts = make_chunks(make_delta(reasoning_content="Hm."), make_delta(content="Yes."))
    answer = EncodedResponse(parts, reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"])
    check_response(answer)
    assert answer.names[2:8] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    reasoning = answer.whole["output"][0]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "Hm."}] and "content" not in reasoning
    assert decode_reasoning(reasoning["encrypted_content"]) == "Hm."
    assert all(event["summary_index"] == 0 for event in answer.events[3:7])


@pytest.mark.parametrize("part", [make_delta(content="Par"), make_delta(reasoning_content="Hm")])
def test_length_finish_is_incomplete(part: dict[str, Any]) -> None:
    answer = EncodedResponse(make_chunks(part, finish="length"))
    check_response(answer)
    assert answer.names[-1] == "incomplete" and answer.whole["status"] == "incomplete"
    assert (
        answer.whole["incomplete_details"] == {"reason": "max_output_tokens"} and answer.whole["completed_at"] is None
    )
    assert [item["status"] for item in answer.whole["output"]] == ["incomplete"]


def test_failed_schema_is_explained_in_incomplete_details() -> None:
    words = "the answer can't be held to its schema: /a: is odd"
    answer = EncodedResponse(make_chunks(make_delta(content="Par"), finish="length", stop_reason=words))
    check_response(answer)
    assert answer.whole["incomplete_details"] == {"reason": "max_output_tokens", "message": words}
    for read in (Response.construct(**answer.whole), Response.model_validate(answer.last)):
        assert read.incomplete_details is not None
        assert read.incomplete_details.to_dict() == answer.whole["incomplete_details"]


def test_stop_word_is_no_incomplete_detail() -> None:
    answer = EncodedResponse(make_chunks(make_delta(content="Par"), stop_reason="END"))
    assert (answer.whole["status"], answer.whole["incomplete_details"]) == ("completed", None)


def test_tool_calls_are_completed_in_incomplete_response() -> None:
    answer = EncodedResponse(make_chunks(make_call_delta(0, "look", "{}", "call_1"), finish="length"))
    check_response(answer)
    assert answer.whole["status"] == "incomplete" and answer.whole["output"][0]["status"] == "completed"


@pytest.mark.parametrize("parts", [(), (make_delta(reasoning_content="Hm."),)])
def test_empty_answer_has_empty_message(parts: tuple[dict[str, Any], ...]) -> None:
    answer = EncodedResponse(make_chunks(*parts))
    check_response(answer)
    assert answer.whole["output"][-1]["content"][0]["text"] == ""


def test_logprobs_only_when_included() -> None:
    chunk = make_delta(content="Hi")
    chunk["choices"][0]["logprobs"] = {"content": [ENTRY], "refusal": None}
    answer = EncodedResponse(make_chunks(chunk), include=["message.output_text.logprobs"])
    check_response(answer)
    assert answer.whole["output"][0]["content"][0]["logprobs"] == [ENTRY] == answer.events[4]["logprobs"]
    assert EncodedResponse(make_chunks(chunk)).whole["output"][0]["content"][0]["logprobs"] == []


def test_request_fields_are_echoed() -> None:
    fields: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 7,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "reasoning": {"effort": "low", "summary": "auto"},
        "temperature": 0.5,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
        "tool_choice": {"type": "function", "name": "look"},
        "tools": TOOLS,
        "top_p": 0.9,
        "user": "me",
    }
    answer = EncodedResponse(make_chunks(make_delta(content="{}")), **fields, store=True, truncation="auto")
    check_response(answer)
    assert {name: answer.whole[name] for name in fields} == fields
    assert answer.whole["store"] is False and answer.whole["truncation"] == "disabled" and answer.whole["error"] is None


def test_missing_usage_counts_prompt_tokens() -> None:
    answer = EncodedResponse(make_chunks(make_delta(content="Hi"))[:-1])
    assert answer.whole["usage"]["input_tokens"] == answer.whole["usage"]["total_tokens"] == 9


def test_failure_after_content_is_response_failed() -> None:
    api = ResponsesApi()
    encoder = api.create_encoder(read_call(api, b'{"model": "m", "input": "Hi.", "stream": true}', {}), START)
    sent = encoder.encode_chunk({}, encode(make_delta(content="Par"))) + encoder.encode_stream_error(
        bad_gateway("It broke.")
    )
    events = [json.loads(event.data) for event in SseParser().feed(sent)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed" and events[-1]["response"]["usage"] is None
    assert events[-1]["response"]["error"] == {"code": "backend_failed", "message": "It broke."}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("max_completion_tokens", "max_output_tokens"),
        ("reasoning_effort", "reasoning.effort"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("messages", "input"),
        ("top_p", "top_p"),
    ],
)
def test_refusal_names_client_field(theirs: str, ours: str) -> None:
    refusal = json.loads(ResponsesApi().encode_error(bad_request(f"'{theirs}' must be another", param=theirs)))["error"]
    assert (refusal["message"], refusal["param"]) == (f"'{ours}' must be another", ours)
    assert refusal["type"] == "invalid_request_error"


def test_failure_before_response_is_error_event() -> None:
    (event,) = SseParser().feed(
        ResponsesApi().encode_stream_error(bad_request("Too long.", code="context_length_exceeded"))
    )
    answer = json.loads(event.data)
    assert event.name == b"error" and answer["type"] == "error" and answer["sequence_number"] == 0
    assert answer["code"] == answer["error"]["code"] == "context_length_exceeded" and answer["message"] == "Too long."


def test_failure_before_first_chunk_is_response_failed() -> None:
    api = ResponsesApi()
    encoder = api.create_encoder(read_call(api, b'{"input": "Hi.", "stream": true}', {}), START)
    events = [
        json.loads(event.data) for event in SseParser().feed(encoder.encode_stream_error(bad_gateway("It broke.")))
    ]
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[0]["response"]["model"] == "served"
