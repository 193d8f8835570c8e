"""OpenAI's Responses.  Nothing is stored: who goes on sends the whole conversation again, at a warm prefill's cost."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from warmline_common.protocol.messages import ErrorBody, ErrorReply
from warmline_common.protocol.sse import encode_event
from warmline_proxy.api.base import PASSTHROUGH_FIELDS, ApiCall, Chunk, Fields, ResponseStart
from warmline_proxy.api.chunks import decode_chunk
from warmline_proxy.api.responses.items import read_input
from warmline_proxy.api.responses.response import ResponseEvents, ResponseOptions
from warmline_proxy.api.responses.tools import JsonObject, Toolbox, read_tool_choice, read_tools
from warmline_proxy.errors import ClientError, bad_request, decode_error_body, rename_error_param
from warmline_proxy.http.body_fields import (
    check_nesting,
    find_session_hint,
    parse_model_name,
    parse_object,
    parse_retry_count,
)

RESPONSES_PASSTHROUGH_FIELDS = PASSTHROUGH_FIELDS | {"stop", "thinking"}  # to the backend as they came
LOGPROBS, ENCRYPTED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
SERVER_ERROR = "server_error"
# What a backend's refusal calls a field, and what it was in the client's body.
_FIELD_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
}


class ResponsesApi:
    """An apis.Api."""

    name = "responses"
    endpoint = "chat"

    def read_call(self, body: bytes, headers: Mapping[str, str]) -> ApiCall:
        raw = parse_object(body)
        fields = _decode_values(raw)
        check_nesting(fields)
        _reject_stored(fields)
        if not isinstance(stream := fields.get("stream", False), bool):
            raise bad_request("'stream' must be true or false.", param="stream")
        messages = read_input(fields.get("instructions"), fields.get("input"))
        toolbox = read_tools(_collect_tools(fields))
        choice, toolbox = read_tool_choice(fields.get("tool_choice"), toolbox)
        return ApiCall(
            api=self,
            fields={"messages": messages, **_build_tool_fields(fields, choice, toolbox), **_build_options(fields)},
            client_model=parse_model_name(fields.get("model")),
            stream=stream,
            session_hint=find_session_hint(raw, headers),
            retry_count=parse_retry_count(headers),
            api_options=_read_response_options(fields, toolbox),
        )

    def create_encoder(self, call: ApiCall, response_start: ResponseStart) -> "_ResponsesEncoder":
        model = response_start.model if call.client_model is None else call.client_model
        return _ResponsesEncoder(ResponseEvents(call.api_options, response_start, model), call.stream)

    def encode_error(self, error: ClientError) -> bytes:
        return msgspec.json.encode(ErrorReply(error=_translate_error(error)))

    def encode_stream_error(self, error: ClientError) -> bytes:
        """Told twice: OpenAI's SDK raises for `error`, others read the event's own fields."""
        body = _translate_error(error)
        fields = {"code": body.code or SERVER_ERROR, "message": body.message, "param": body.param}
        return _encode_events(
            [{"type": "error", "sequence_number": 0, **fields, "error": {"type": body.type, **fields}}]
        )


class _ResponsesEncoder:
    """An apis.Encoder."""

    def __init__(self, events: ResponseEvents, stream: bool) -> None:
        self._events, self._stream = events, stream

    def encode_chunk(self, chunk: Chunk, raw: bytes) -> bytes:
        return self._emit(self._events.add_chunk(decode_chunk(raw)))

    def encode_done(self) -> bytes:
        return self._emit(self._events.end())

    def encode_json(self) -> bytes:
        self._emit(self._events.end())
        return msgspec.json.encode(self._events.build_final_response())

    def encode_stream_error(self, error: ClientError) -> bytes:
        body = _translate_error(error)
        return _encode_events(self._events.fail(body.code or SERVER_ERROR, body.message))

    def _emit(self, events: Iterable[JsonObject]) -> bytes:
        return _encode_events(events) if self._stream else _drain_events(events)


def _translate_error(error: ClientError) -> ErrorBody:
    return rename_error_param(decode_error_body(error), _FIELD_NAMES)


def _drain_events(events: Iterable[JsonObject]) -> bytes:
    """What a stream would say, run through for what it leaves."""
    for _ in events:
        pass
    return b""


def _encode_events(events: Iterable[JsonObject]) -> bytes:
    return b"".join(encode_event(msgspec.json.encode(event), event["type"]) for event in events)


# ---- reading


def _decode_values(raw: Mapping[str, msgspec.Raw]) -> Fields:
    try:
        return {name: msgspec.json.decode(value) for name, value in raw.items()}
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(f"We could not parse the JSON body of your request: {error}") from None


def _reject_stored(fields: Fields) -> None:
    for name in ("previous_response_id", "conversation"):
        if fields.get(name) is not None:
            raise bad_request(
                f"'{name}' can't be used: no responses are stored here.  Send the whole conversation as 'input', with "
                "the items of earlier answers in it; what was computed of it is reused.",
                code="previous_response_not_found" if name == "previous_response_id" else "unsupported_parameter",
                param=name,
            )
    if fields.get("prompt") is not None:
        message = "'prompt' names a stored prompt; none are stored here.  Send it as 'instructions' and 'input'."
        raise bad_request(message, code="unsupported_parameter", param="prompt")
    if fields.get("background") is True:
        message = "'background' can't be true: answers are not stored, so nobody could ask for it later."
        raise bad_request(message, code="unsupported_parameter", param="background")


def _collect_tools(fields: Fields) -> object:
    """Those of the request, and those that items have added on the way."""
    tools, items = fields.get("tools"), fields.get("input")
    added = [
        tool
        for item in (items if isinstance(items, list) else ())
        if isinstance(item, dict) and item.get("type") == "additional_tools" and isinstance(item.get("tools"), list)
        for tool in item["tools"]
    ]
    return [*(tools or []), *added] if added and isinstance(tools, list | None) else tools


def _build_tool_fields(fields: Fields, choice: Any, toolbox: Toolbox) -> Fields:
    if toolbox.tools:
        tool_options = {"tool_choice": choice, "parallel_tool_calls": fields.get("parallel_tool_calls")}
        return {
            "tools": toolbox.chat_tools,
            **{name: value for name, value in tool_options.items() if value is not None},
        }
    if choice in (None, "auto", "none"):
        return {}
    raise bad_request("'tool_choice' needs a tool that can be called here; 'tools' has none.", param="tool_choice")


def _build_options(fields: Fields) -> Fields:
    options = {name: value for name, value in fields.items() if name in RESPONSES_PASSTHROUGH_FIELDS}
    if "max_output_tokens" in fields:
        options["max_completion_tokens"] = fields["max_output_tokens"]
    if (effort := _read_object(fields, "reasoning").get("effort")) is not None:
        options["reasoning_effort"] = effort
    if form := _convert_format(_read_object(fields, "text").get("format")):
        options["response_format"] = form
    if LOGPROBS in _read_include(fields):
        options |= {"logprobs": True, "top_logprobs": fields.get("top_logprobs", 0)}
    return options


def _convert_format(form: Any) -> JsonObject | None:
    """Chat nests what Responses has flat."""
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") not in ("text", "json_object", "json_schema"):
        message = "'text.format' must be an object of type text, json_object or json_schema."
        raise bad_request(message, param="text.format")
    if form["type"] == "text":
        return None
    if form["type"] == "json_object":
        return {"type": "json_object"}
    schema = {name: value for name, value in form.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}


def _read_include(fields: Fields) -> list[Any]:
    include = fields.get("include", [])
    if not isinstance(include, list):
        raise bad_request("'include' must be a list of strings.", param="include")
    return include


def _read_object(fields: Fields, name: str) -> JsonObject:
    value = fields.get(name, {})
    if not isinstance(value, dict):
        raise bad_request(f"'{name}' must be an object.", param=name)
    return value


# ---- what the answer says again


def _read_response_options(fields: Fields, toolbox: Toolbox) -> ResponseOptions:
    reasoning = _read_object(fields, "reasoning")
    summary = reasoning.get("summary") or reasoning.get("generate_summary")
    return ResponseOptions(
        echo=_build_echo(fields),
        toolbox=toolbox,
        summary=summary not in (None, "none"),
        encrypted_reasoning=ENCRYPTED_REASONING in _read_include(fields),
        logprobs=LOGPROBS in _read_include(fields),
    )


def _build_echo(fields: Fields) -> JsonObject:
    reasoning, text = _read_object(fields, "reasoning"), _read_object(fields, "text")
    return {
        "instructions": fields.get("instructions"),
        "max_output_tokens": fields.get("max_output_tokens"),
        "max_tool_calls": fields.get("max_tool_calls"),
        "metadata": fields.get("metadata", {}),
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "prompt_cache_key": fields.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": fields.get("safety_identifier"),
        "service_tier": "default",
        "store": False,
        "temperature": fields.get("temperature"),
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": fields.get("tools", []),
        "top_logprobs": fields.get("top_logprobs", 0),
        "top_p": fields.get("top_p"),
        "truncation": "disabled",
        "user": fields.get("user"),
    }
