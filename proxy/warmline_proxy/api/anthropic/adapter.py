"""Anthropic's Messages: read into OpenAI's chat body, answered from its chunks; and the list of models.  Pure."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from warmline_proxy.api.anthropic.request import MessagesBody, build_chat_fields, list_tool_places, read_body
from warmline_proxy.api.anthropic.response import MessageEvents, MessageOptions, build_error_envelope
from warmline_proxy.api.base import PROGRESS_INTERVAL_S, ApiCall, ResponseEncoder, ResponseStart
from warmline_proxy.api.chunks import EventEncoder, encode_events
from warmline_proxy.api.models import ServedModelInfo
from warmline_proxy.api.tool_fields import ToolFields
from warmline_proxy.errors import ClientError, bad_request
from warmline_proxy.http import body_fields

CLAUDE_CODE = "claude-cli/"  # its User-Agent begins so
TIME_S_MAX = 253_402_300_799  # the last second of the year 9999
_SESSION = re.compile(r"_session_([0-9A-Za-z-]{8,64})$")


class MessagesApi:
    """Api of /v1/messages."""

    name, endpoint = "messages", "chat"

    async def read_call(self, body: bytes, headers: Mapping[str, str]) -> ApiCall:
        """Raises ClientError 400; invalid values that only the backend needs are refused by the backend."""
        parsed = read_body(body)
        if parsed.max_tokens is None:
            raise bad_request("max_tokens: Field required", param="max_tokens")
        return self._build_call(parsed, headers)

    async def read_count_call(self, body: bytes, headers: Mapping[str, str]) -> ApiCall:
        """Call of a count_tokens body, which needs no `max_tokens`.  Raises ClientError 400."""
        return self._build_call(read_body(body), headers)

    def _build_call(self, body: MessagesBody, headers: Mapping[str, str]) -> ApiCall:
        body_fields.check_message_count(body.messages, "messages")
        fields = build_chat_fields(body)
        return ApiCall(
            api=self,
            fields=fields,
            client_model=body_fields.parse_model_name(body.model),
            stream=body.stream is True,
            session_hint=body_fields.find_session_hint(body.others, headers)
            or body_fields.strip_unprintable(parse_session(body.user_id)),
            retry_count=body_fields.parse_retry_count(headers),
            api_options=MessageOptions(body.max_tokens, headers.get("User-Agent", "").startswith(CLAUDE_CODE)),
            progress_interval_s=PROGRESS_INTERVAL_S,
            tool_fields=ToolFields(list_tool_places(body.tools or []), "input_schema"),
        )

    def create_encoder(
        self, call: ApiCall, response_start: ResponseStart, earlier: ResponseEncoder | None = None
    ) -> ResponseEncoder:
        events = MessageEvents(call, response_start)
        if call.stream and isinstance(earlier, EventEncoder) and isinstance(earlier.events, MessageEvents):
            events.resume(earlier.events)
        return EventEncoder(events, call.stream)

    def encode_error(self, error: ClientError) -> bytes:
        return msgspec.json.encode(build_error_envelope(error))

    def encode_stream_error(self, error: ClientError) -> bytes:
        return encode_events([build_error_envelope(error)])


def parse_session(user_id: str) -> str:
    """Session named by `metadata.user_id`, where Claude Code puts it as JSON or as a suffix; else the whole id."""
    if match := _SESSION.search(user_id):
        return match[1]
    try:
        value = msgspec.json.decode(user_id)
    except (msgspec.DecodeError, RecursionError):
        return user_id
    session = value.get("session_id") if isinstance(value, dict) else None
    return session if isinstance(session, str) and session else user_id


def build_models_reply(name: str, models: Sequence[ServedModelInfo]) -> dict[str, Any]:
    """Entry of the only model given, under `name`; without a name, the list."""
    entries = [_build_model_entry(name or model.name, model) for model in models]
    first_id, last_id = entries[0]["id"], entries[-1]["id"]
    return entries[0] if name else {"data": entries, "has_more": False, "first_id": first_id, "last_id": last_id}


def _build_model_entry(name: str, model: ServedModelInfo) -> dict[str, Any]:
    entry = {
        "type": "model",
        "id": name,
        "display_name": model.name,
        "created_at": _format_time(model.created),
        "lifecycle": "active",
        "max_input_tokens": model.context_tokens_max or None,
        "max_tokens": model.context_tokens_max or None,
    }
    return entry if model.is_loaded is None else {**entry, "loaded": model.is_loaded}


def _format_time(seconds: int) -> str:
    """Unix seconds as ISO 8601; the nearest time that can be written where a clock or a file's time is beyond that."""
    return datetime.fromtimestamp(max(0, min(seconds, TIME_S_MAX)), UTC).isoformat()
