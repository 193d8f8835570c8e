"""OpenAI's Responses.  Nothing is stored: who goes on sends the whole conversation again, at a warm prefill's cost."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from warmline_common.protocol.messages import ErrorBody, ErrorReply
from warmline_common.protocol.sse import data_event
from warmline_proxy.api.base import PASSED_ON, Begun, Call, Chunk, Fields
from warmline_proxy.api.chunks import hear
from warmline_proxy.api.responses.items import read_input
from warmline_proxy.api.responses.response import Answering, Asked
from warmline_proxy.api.responses.tools import Object, Toolbox, choose, read_tools
from warmline_proxy.errors import ClientError, bad_request, read_error, renamed
from warmline_proxy.http.body_fields import check_nesting, model_name, object_of, retry_count, session_hint

PASSED = PASSED_ON | {"stop", "thinking"}  # to the backend as they came
LOGPROBS, SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
SERVER_ERROR = "server_error"
# What a backend's refusal calls a field, and what it was in the client's body.
_FIELDS = {
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
}


class Responses:
    """An apis.Api."""

    name = "responses"
    endpoint = "chat"

    def read(self, body: bytes, headers: Mapping[str, str]) -> Call:
        raw = object_of(body)
        fields = _values(raw)
        check_nesting(fields)
        _refuse_stored(fields)
        if not isinstance(stream := fields.get("stream", False), bool):
            raise bad_request("'stream' must be true or false.", param="stream")
        messages = read_input(fields.get("instructions"), fields.get("input"))
        toolbox = read_tools(_all_tools(fields))
        choice, toolbox = choose(fields.get("tool_choice"), toolbox)
        return Call(
            api=self,
            fields={"messages": messages, **_tool_fields(fields, choice, toolbox), **_options(fields)},
            client_model=model_name(fields.get("model")),
            stream=stream,
            session_hint=session_hint(raw, headers),
            retry_count=retry_count(headers),
            asked=_asked(fields, toolbox),
        )

    def encoder(self, call: Call, begun: Begun) -> "_Encoder":
        model = begun.model if call.client_model is None else call.client_model
        return _Encoder(Answering(call.asked, begun, model), call.stream)

    def refusal(self, error: ClientError) -> bytes:
        return msgspec.json.encode(ErrorReply(error=_said(error)))

    def failure(self, error: ClientError) -> bytes:
        """Told twice: OpenAI's SDK raises for `error`, others read the event's own fields."""
        said = _said(error)
        told = {"code": said.code or SERVER_ERROR, "message": said.message, "param": said.param}
        return _sse([{"type": "error", "sequence_number": 0, **told, "error": {"type": said.type, **told}}])


class _Encoder:
    """An apis.Encoder."""

    def __init__(self, answering: Answering, stream: bool) -> None:
        self._answering, self._stream = answering, stream

    def chunk(self, chunk: Chunk, raw: bytes) -> bytes:
        return self._told(self._answering.chunk(hear(raw)))

    def done(self) -> bytes:
        return self._told(self._answering.end())

    def whole(self) -> bytes:
        self._told(self._answering.end())
        return msgspec.json.encode(self._answering.result())

    def failure(self, error: ClientError) -> bytes:
        said = _said(error)
        return _sse(self._answering.fail(said.code or SERVER_ERROR, said.message))

    def _told(self, events: Iterable[Object]) -> bytes:
        return _sse(events) if self._stream else _unheard(events)


def _said(error: ClientError) -> ErrorBody:
    return renamed(read_error(error), _FIELDS)


def _unheard(events: Iterable[Object]) -> bytes:
    """What a stream would say, run through for what it leaves."""
    for _ in events:
        pass
    return b""


def _sse(events: Iterable[Object]) -> bytes:
    return b"".join(data_event(msgspec.json.encode(event), event["type"]) for event in events)


# ---- reading


def _values(raw: Mapping[str, msgspec.Raw]) -> Fields:
    try:
        return {name: msgspec.json.decode(value) for name, value in raw.items()}
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(f"We could not parse the JSON body of your request: {error}") from None


def _refuse_stored(fields: Fields) -> None:
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


def _all_tools(fields: Fields) -> object:
    """Those of the request, and those that items have added on the way."""
    tools, items = fields.get("tools"), fields.get("input")
    added = [
        tool
        for item in (items if isinstance(items, list) else ())
        if isinstance(item, dict) and item.get("type") == "additional_tools" and isinstance(item.get("tools"), list)
        for tool in item["tools"]
    ]
    return [*(tools or []), *added] if added and isinstance(tools, list | None) else tools


def _tool_fields(fields: Fields, choice: Any, toolbox: Toolbox) -> Fields:
    if toolbox.tools:
        told = {"tool_choice": choice, "parallel_tool_calls": fields.get("parallel_tool_calls")}
        return {"tools": toolbox.chat, **{name: value for name, value in told.items() if value is not None}}
    if choice in (None, "auto", "none"):
        return {}
    raise bad_request("'tool_choice' needs a tool that can be called here; 'tools' has none.", param="tool_choice")


def _options(fields: Fields) -> Fields:
    options = {name: value for name, value in fields.items() if name in PASSED}
    if "max_output_tokens" in fields:
        options["max_completion_tokens"] = fields["max_output_tokens"]
    if (effort := _object(fields, "reasoning").get("effort")) is not None:
        options["reasoning_effort"] = effort
    if form := _response_format(_object(fields, "text").get("format")):
        options["response_format"] = form
    if LOGPROBS in _include(fields):
        options |= {"logprobs": True, "top_logprobs": fields.get("top_logprobs", 0)}
    return options


def _response_format(form: Any) -> Object | None:
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


def _include(fields: Fields) -> list[Any]:
    include = fields.get("include", [])
    if not isinstance(include, list):
        raise bad_request("'include' must be a list of strings.", param="include")
    return include


def _object(fields: Fields, name: str) -> Object:
    value = fields.get(name, {})
    if not isinstance(value, dict):
        raise bad_request(f"'{name}' must be an object.", param=name)
    return value


# ---- what the answer says again


def _asked(fields: Fields, toolbox: Toolbox) -> Asked:
    reasoning = _object(fields, "reasoning")
    summary = reasoning.get("summary") or reasoning.get("generate_summary")
    return Asked(
        echo=_echo(fields),
        toolbox=toolbox,
        summary=summary not in (None, "none"),
        sealed=SEALED in _include(fields),
        logprobs=LOGPROBS in _include(fields),
    )


def _echo(fields: Fields) -> Object:
    reasoning, text = _object(fields, "reasoning"), _object(fields, "text")
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
