"""OpenAI's Responses.  Pure, but for lookups of stored responses."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from warmline_common.protocol.messages import ErrorReply
from warmline_proxy.api.base import (
    PASSTHROUGH_FIELDS,
    PROGRESS_INTERVAL_S,
    ApiCall,
    Fields,
    ResponseEncoder,
    ResponseStart,
)
from warmline_proxy.api.chunks import EventEncoder, encode_events
from warmline_proxy.api.custom_tools import JsonObject
from warmline_proxy.api.responses.history import (
    NO_HISTORY,
    ResolvedInput,
    ResponseHistory,
    decode_item,
    find_type,
    resolve_input,
)
from warmline_proxy.api.responses.items import ADDITIONAL_TOOLS, read_input
from warmline_proxy.api.responses.response import SERVER_ERROR, ResponseEvents, ResponseOptions, translate_error
from warmline_proxy.api.responses.tools import Toolbox, read_tool_choice, read_tools
from warmline_proxy.api.tool_fields import ToolFields
from warmline_proxy.errors import ClientError, bad_request
from warmline_proxy.http import body_fields

RESPONSES_PASSTHROUGH_FIELDS = PASSTHROUGH_FIELDS | {"stop", "thinking", "think"}  # unchanged to the backend
# Fields repeated as they came, with their values where absent.
ECHO_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key"))
    | dict.fromkeys(("safety_identifier", "temperature", "top_p", "user"))
    | {"metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "top_logprobs": 0}
)
LOGPROBS, ENCRYPTED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"


@dataclass(frozen=True)
class ResponsesApi:
    """Api of /v1/responses, for one client."""

    history: ResponseHistory = NO_HISTORY

    name = "responses"
    endpoint = "chat"

    async def read_call(self, body: bytes, headers: Mapping[str, str]) -> ApiCall:
        raw = body_fields.parse_object(body)
        try:
            fields = {name: msgspec.json.decode(value) for name, value in raw.items()}
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_request(f"We could not parse the JSON body of your request: {error}") from None
        _reject_unsupported(fields)
        stream, store = _read_switch(fields, "stream", False), _read_switch(fields, "store", True)
        if fields.get("input") is None and "messages" in fields:
            message = "'input' is missing; this body has 'messages': send it to /v1/chat/completions."
            raise bad_request(message, param="input")
        body_fields.check_message_count(fields.get("input"), "input")
        resolved = await resolve_input(fields.get("previous_response_id"), fields.get("input"), self.history)
        body_fields.check_message_count(resolved.items, "input")
        messages = read_input(fields.get("instructions"), resolved.earlier, resolved.given)
        is_stored = store and len(body) + resolved.stored_bytes <= self.history.response_bytes_max
        toolbox = read_tools(_collect_tools(fields.get("tools"), resolved))
        choice, toolbox = read_tool_choice(fields.get("tool_choice"), toolbox)
        return ApiCall(
            api=self,
            fields={"messages": messages, **_build_tool_fields(fields, choice, toolbox), **_build_options(fields)},
            client_model=body_fields.parse_model_name(fields.get("model")),
            stream=stream,
            session_hint=body_fields.find_session_hint(raw, headers),
            retry_count=body_fields.parse_retry_count(headers),
            api_options=_read_response_options(fields, toolbox, resolved, is_stored),
            tool_fields=ToolFields(tuple(tool.field for tool in toolbox.tools.values())),
            progress_interval_s=PROGRESS_INTERVAL_S,
        )

    def create_encoder(
        self, call: ApiCall, response_start: ResponseStart, earlier: ResponseEncoder | None = None
    ) -> ResponseEncoder:
        model = response_start.model if call.client_model is None else call.client_model
        events = ResponseEvents(call.api_options, response_start, model)
        if call.stream and isinstance(earlier, EventEncoder) and isinstance(earlier.events, ResponseEvents):
            events.resume(earlier.events)
        return EventEncoder(events, call.stream)

    def encode_error(self, error: ClientError) -> bytes:
        return msgspec.json.encode(ErrorReply(error=translate_error(error)))

    def encode_stream_error(self, error: ClientError) -> bytes:
        """An error event with its fields twice: OpenAI's SDK raises for `error`, others read the event's own."""
        body = translate_error(error)
        fields = {"code": body.code or SERVER_ERROR, "message": body.message, "param": body.param}
        event = {"type": "error", "sequence_number": 0, **fields, "error": {"type": body.type, **fields}}
        return encode_events([event])


# ---- reading


def _reject_unsupported(fields: Fields) -> None:
    if fields.get("conversation") is not None:
        message = "'conversation' can't be used: use 'previous_response_id', or send the whole as 'input'."
        raise bad_request(message, code="unsupported_parameter", param="conversation")
    if fields.get("prompt") is not None:
        message = "'prompt' names a stored prompt; none are stored here.  Send it as 'instructions' and 'input'."
        raise bad_request(message, code="unsupported_parameter", param="prompt")
    if fields.get("background") is True:
        message = "'background' can't be true: an answer is computed only while its client waits.  Leave it out."
        raise bad_request(message, code="unsupported_parameter", param="background")


def _read_switch(fields: Fields, name: str, default: bool) -> bool:
    if isinstance(value := fields.get(name, default), bool):
        return value
    raise bad_request(f"'{name}' must be true or false.", param=name)


def _collect_tools(tools: object, resolved: ResolvedInput) -> object:
    """Tools of the request and of its additional_tools items."""
    items = [decode_item(item) for item in resolved.items if find_type(item) == ADDITIONAL_TOOLS]
    added = [tool for item in items if isinstance(item.get("tools"), list) for tool in item["tools"]]
    return [*(tools or []), *added] if added and isinstance(tools, list | None) else tools


def _build_tool_fields(fields: Fields, choice: Any, toolbox: Toolbox) -> Fields:
    if toolbox.tools:
        options = {"tool_choice": choice, "parallel_tool_calls": fields.get("parallel_tool_calls")}
        functions = [{"type": "function", "function": tool.definition} for tool in toolbox.tools.values()]
        return {"tools": functions} | {name: value for name, value in options.items() if value is not None}
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
    """Chat's response_format, nested where Responses is flat; None for text."""
    if form in (None, {}):
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": kind}
    if kind == "json_schema":
        schema = {name: value for name, value in form.items() if name != "type" and value is not None}
        return {"type": kind, "json_schema": schema}
    message = "'text.format' must be an object of type text, json_object or json_schema."
    raise bad_request(message, param="text.format")


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


# ---- fields repeated in the response


def _read_response_options(
    fields: Fields, toolbox: Toolbox, resolved: ResolvedInput, is_stored: bool
) -> ResponseOptions:
    reasoning = _read_object(fields, "reasoning")
    summary = reasoning.get("summary") or reasoning.get("generate_summary")
    return ResponseOptions(
        echo=_build_echo(fields, is_stored),
        toolbox=toolbox,
        summary=summary not in (None, "none"),
        encrypted_reasoning=ENCRYPTED_REASONING in _read_include(fields),
        logprobs=LOGPROBS in _read_include(fields),
        stored_input=resolved.items if is_stored else None,
    )


def _build_echo(fields: Fields, is_stored: bool) -> JsonObject:
    reasoning, text = _read_object(fields, "reasoning"), _read_object(fields, "text")
    return {
        **{name: fields.get(name, default) for name, default in ECHO_DEFAULTS.items()},
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "service_tier": "default",
        "store": is_stored,
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "truncation": "disabled",
    }
