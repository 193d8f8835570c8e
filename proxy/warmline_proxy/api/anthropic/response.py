"""Anthropic's response from the backend's chunks: a stream's events and the message that they add up to.  Pure.

    message_start  ->  (content_block_start  content_block_delta ...  content_block_stop) ...  ->  message_delta  ->
    message_stop

One block at a time is open.  A tool call's `input` is written when the call is complete, since it must be an object.
Errors have Anthropic's envelope.

A `ping`, which may come at any place, says how far a long prefill is.  Claude Code ignores it, and gives up after 300 s
without another event: from time to time it gets a message_delta without a change, too.  Others may take that for the
answer's end, as LiteLLM does.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from warmline_proxy.api.base import ApiCall, ResponseStart
from warmline_proxy.api.chunks import ChatChunk, ChunkChoice, ChunkToolCall, ChunkUsage, Event
from warmline_proxy.errors import ClientError, decode_error_body, parse_context_overflow, rename_error_param

UNCHANGED_INTERVAL_S = 60.0  # between such events, before the answer begins
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
SIGNATURE = "d2FybWxpbmU="  # of all thinking blocks: clients send it back, and it is ignored
TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"
SCHEMA = "schema"  # `stop_details` of an answer that could not be held to its format; Anthropic has "refusal" alone
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# Names in a backend's refusal, and the client's names of the same fields.
_FIELD_NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}
_OWN_CALL_ID = re.compile(r"call_([0-9a-f]{24})")


@dataclass(frozen=True)
class MessageOptions:
    """Options of the request that the response depends on."""

    max_tokens: float | None
    is_claude_code: bool = False


class MessageEvents:
    """EventSource of one message."""

    def __init__(self, call: ApiCall, response_start: ResponseStart) -> None:
        self._response_start = response_start
        self._model = response_start.model if call.client_model is None else call.client_model
        options: MessageOptions = call.api_options
        self._is_silent = options.max_tokens == 0  # the prompt is prefilled only
        self._sends_unchanged = options.is_claude_code
        self._has_started = self._has_chunks = False  # has_chunks: the prefill is over
        self._changed_at = time.monotonic()  # the last event but pings, before the answer
        self._content: list[dict[str, Any]] = []  # blocks so far
        self._open_type = ""  # of the last block, while it is open
        self._open_call_index = -1
        self._arguments = ""
        self._stop_reason: tuple[str, str | None] = ("max_tokens" if self._is_silent else "end_turn", None)
        self._stop_details: dict[str, str] | None = None  # why the answer couldn't be held to its format
        self._usage: ChunkUsage | None = None

    def add_chunk(self, chunk: ChatChunk) -> Iterator[Event]:
        self._has_chunks = True
        yield from self._start_message()
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices if not self._is_silent else ():
            yield from self._emit_choice(choice)

    def report_progress(self, progress: dict[str, Any]) -> Iterator[Event]:
        yield {"type": "ping", **progress}
        is_due = time.monotonic() - self._changed_at >= UNCHANGED_INTERVAL_S
        if self._sends_unchanged and is_due and not self._has_chunks:
            self._changed_at = time.monotonic()
            yield from self._start_message()
            usage = {"output_tokens": 0}
            yield {"type": "message_delta", "delta": {"stop_reason": None, "stop_sequence": None}, "usage": usage}

    def resume(self, earlier: "MessageEvents") -> None:
        """Go on after the events of another dispatch of the same request."""
        self._has_started, self._changed_at = earlier._has_started, earlier._changed_at

    def end(self) -> Iterator[Event]:
        self._has_chunks = True
        yield from self._start_message()
        yield from self._close_block()
        yield {"type": "message_delta", "delta": self._build_end(), "usage": self._build_usage()}
        yield {"type": "message_stop"}

    def fail(self, error: ClientError) -> Iterator[Event]:
        yield build_error_envelope(error)

    def build_result(self) -> dict[str, Any]:
        """The whole message, after `end`."""
        return self._build_message() | {"content": self._content} | self._build_end()

    def _build_end(self) -> dict[str, Any]:
        reason, sequence = self._stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": self._stop_details}

    def _start_message(self) -> Iterator[Event]:
        if not self._has_started:
            self._has_started = True
            yield {"type": "message_start", "message": self._build_message()}

    def _build_message(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self._response_start.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": self._build_usage(),
        }

    def _build_usage(self) -> dict[str, Any]:
        """Usage so far; nothing counts as written to the cache, since saving costs clients nothing.

        It is zero before the prefill ends: clients add up what each message_delta finds.
        """
        start = self._response_start
        chunk_usage = self._usage or ChunkUsage(start.prompt_tokens if self._has_chunks else 0)
        cached = chunk_usage.cached_tokens if self._usage else start.cached_tokens if self._has_chunks else 0
        usage: dict[str, Any] = {
            "input_tokens": chunk_usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": 0 if self._is_silent else chunk_usage.completion_tokens,
        }
        if chunk_usage.reasoning_tokens is not None and not self._is_silent:
            usage["output_tokens_details"] = {"thinking_tokens": chunk_usage.reasoning_tokens}
        return usage

    def _emit_choice(self, choice: ChunkChoice) -> Iterator[Event]:
        yield from self._emit_text(THINKING, choice.delta.reasoning_text)
        yield from self._emit_text(TEXT, choice.delta.content or "")
        for call in choice.delta.tool_calls or ():
            yield from self._emit_tool_call(call)
        if choice.finish_reason:
            self._stop_reason = (STOP_REASONS.get(choice.finish_reason, "end_turn"), None)
            if self._stop_reason[0] == "end_turn" and choice.stop_reason and isinstance(choice.stop_reason, str):
                self._stop_reason = ("stop_sequence", choice.stop_reason)
            if choice.failed_format:
                self._stop_details = {"type": SCHEMA, "explanation": choice.failed_format}

    def _emit_text(self, kind: str, text: str) -> Iterator[Event]:
        if not text:
            return
        if self._open_type != kind:
            yield from self._open_block(kind, {kind: "", "signature": ""} if kind == THINKING else {kind: ""})
        yield self._append(f"{kind}_delta", kind, text)

    def _emit_tool_call(self, call: ChunkToolCall) -> Iterator[Event]:
        if call.id or self._open_type != TOOL_USE or call.index != self._open_call_index:
            name = {"id": tool_use_id(call.id or ""), "name": call.function.name or ""}
            yield from self._open_block(TOOL_USE, {**name, "input": {}})
            self._open_call_index, self._arguments = call.index, ""
        self._arguments += call.function.arguments or ""

    def _open_block(self, kind: str, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close_block()
        self._open_type = kind
        self._content.append({"type": kind, **block})
        yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **block}}

    @property
    def _index(self) -> int:
        return len(self._content) - 1

    def _append(self, delta_type: str, field: str, text: str) -> Event:
        """Extend the open block; the delta's event."""
        self._content[-1][field] += text
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": delta_type, field: text}}

    def _close_block(self) -> Iterator[Event]:
        if not self._open_type:
            return
        if self._open_type == THINKING:
            yield self._append("signature_delta", "signature", SIGNATURE)
        if self._open_type == TOOL_USE:
            encoded = _encode_input(self._arguments)
            self._content[-1]["input"] = msgspec.json.decode(encoded)
            delta = {"type": "input_json_delta", "partial_json": encoded}
            yield {"type": "content_block_delta", "index": self._index, "delta": delta}
        self._open_type = ""
        yield {"type": "content_block_stop", "index": self._index}


def _encode_input(arguments: str) -> str:
    """A call's arguments as a JSON object, which wraps other values."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        value = arguments
    return arguments or "{}" if isinstance(value, dict) else msgspec.json.encode({"arguments": value}).decode()


def tool_use_id(call_id: str) -> str:
    """Anthropic's form of our call ids, toolu_<24 hex digits>; other ids are unchanged."""
    return f"toolu_{ours[1]}" if (ours := _OWN_CALL_ID.fullmatch(call_id)) else call_id


def build_error_envelope(error: ClientError) -> Event:
    """Anthropic's error envelope, an event of a stream too."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 499 else "api_error")
    body = decode_error_body(error)
    message = rename_error_param(body, _FIELD_NAMES).message
    if overflow := parse_context_overflow(error):  # clients compact on these words
        message = f"prompt is too long: {overflow.prompt_tokens} tokens > {overflow.context_tokens} maximum"
    elif body.code in ("context_length_exceeded", "kv_memory_exceeded"):
        message = f"prompt is too long: {body.message}"
    return {"type": "error", "error": {"type": kind, "message": message}}
