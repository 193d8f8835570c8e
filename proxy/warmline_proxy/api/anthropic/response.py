"""Anthropic's answer from the backend's chunks: a stream's events, or the same events folded into one message.

    message_start  ->  (content_block_start  content_block_delta ...  content_block_stop) ...  ->  message_delta  ->
    message_stop

One block at a time is open.  Of a tool call, `input` is told when the call is complete, for it must be an object.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from warmline_common.protocol.sse import encode_event
from warmline_proxy.api.anthropic.errors import encode_error_envelope
from warmline_proxy.api.anthropic.ids import tool_use_id
from warmline_proxy.api.base import ApiCall, Chunk, ResponseStart
from warmline_proxy.api.chunks import ChatChunk, ChunkChoice, ChunkToolCall, ChunkUsage, decode_chunk
from warmline_proxy.errors import ClientError

Event = dict[str, Any]

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
SIGNATURE = "d2FybWxpbmU="  # of all thinking: clients keep it and send it back, nobody here reads it
TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"
DELTAS = {TEXT: "text_delta", THINKING: "thinking_delta"}


class MessageEncoder:
    """An apis.Encoder."""

    def __init__(self, call: ApiCall, response_start: ResponseStart) -> None:
        self._events = MessageEvents(call, response_start)
        self._fold = None if call.stream else MessageFold()

    def encode_chunk(self, chunk: Chunk, raw: bytes) -> bytes:
        return self._emit(self._events.add_chunk(decode_chunk(raw)))

    def encode_done(self) -> bytes:
        return self._emit(self._events.end())

    def encode_json(self) -> bytes:
        self._emit(self._events.end())
        assert self._fold is not None
        return msgspec.json.encode(self._fold.message)

    def encode_stream_error(self, error: ClientError) -> bytes:
        return encode_event(encode_error_envelope(error), "error")

    def _emit(self, events: Iterable[Event]) -> bytes:
        if self._fold is None:
            return b"".join(encode_event(msgspec.json.encode(event), event["type"]) for event in events)
        for event in events:
            self._fold.add(event)
        return b""


class MessageEvents:
    """What is said, in order, from what is heard."""

    def __init__(self, call: ApiCall, response_start: ResponseStart) -> None:
        self._response_start = response_start
        self._model = response_start.model if call.client_model is None else call.client_model
        self._is_silent = call.api_options == 0  # max_tokens: the prompt was to be read, nothing is to be said
        self._has_started = False
        self._block_count = 0  # that were opened
        self._open_type = ""  # the type of the block that is
        self._open_call_index = -1  # the index of the call that is open
        self._arguments = ""
        self._stop_reason: tuple[str, str | None] = ("max_tokens" if self._is_silent else "end_turn", None)
        self._usage: ChunkUsage | None = None

    def add_chunk(self, chunk: ChatChunk) -> Iterator[Event]:
        yield from self._start_message()
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices if not self._is_silent else ():
            yield from self._emit_choice(choice)

    def end(self) -> Iterator[Event]:
        yield from self._start_message()
        yield from self._close_block()
        reason, sequence = self._stop_reason
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None},
            "usage": self._build_usage(),
        }
        yield {"type": "message_stop"}

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
        """Nothing counts as written to the cache: what is kept costs nobody more than what isn't."""
        chunk_usage = self._usage or ChunkUsage(self._response_start.prompt_tokens)
        cached = chunk_usage.cached_tokens if self._usage else self._response_start.cached_tokens
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
            stop_sequence = choice.stop_reason if isinstance(choice.stop_reason, str) else None
            reason = STOP_REASONS.get(choice.finish_reason, "end_turn")
            self._stop_reason = (
                ("stop_sequence", stop_sequence) if stop_sequence and reason == "end_turn" else (reason, None)
            )

    def _emit_text(self, kind: str, text: str) -> Iterator[Event]:
        if not text:
            return
        if self._open_type != kind:
            yield from self._open_block(kind, {kind: "", "signature": ""} if kind == THINKING else {kind: ""})
        yield self._build_delta({"type": DELTAS[kind], kind: text})

    def _emit_tool_call(self, call: ChunkToolCall) -> Iterator[Event]:
        if call.id or self._open_type != TOOL_USE or call.index != self._open_call_index:
            name = {"id": tool_use_id(call.id or ""), "name": call.function.name or ""}
            yield from self._open_block(TOOL_USE, {**name, "input": {}})
            self._open_call_index, self._arguments = call.index, ""
        self._arguments += call.function.arguments or ""

    def _open_block(self, kind: str, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close_block()
        self._open_type = kind
        self._block_count += 1
        yield {"type": "content_block_start", "index": self._block_count - 1, "content_block": {"type": kind, **block}}

    def _build_delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._block_count - 1, "delta": delta}

    def _close_block(self) -> Iterator[Event]:
        if not self._open_type:
            return
        if self._open_type == THINKING:
            yield self._build_delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open_type == TOOL_USE:
            yield self._build_delta({"type": "input_json_delta", "partial_json": _encode_input(self._arguments)})
        self._open_type = ""
        yield {"type": "content_block_stop", "index": self._block_count - 1}


class MessageFold:
    """The message that a client makes of its events."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}

    def add(self, event: Event) -> None:
        if event["type"] == "message_start":
            self.message = event["message"]
        elif event["type"] == "content_block_start":
            self.message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            _extend_block(self.message["content"][event["index"]], event["delta"])
        elif event["type"] == "message_delta":
            self.message |= event["delta"]
            self.message["usage"] = event["usage"]


def _extend_block(block: dict[str, Any], delta: dict[str, Any]) -> None:
    if delta["type"] == "input_json_delta":
        block["input"] = msgspec.json.decode(delta["partial_json"])
        return
    for key, value in delta.items():
        if key != "type":
            block[key] += value


def _encode_input(arguments: str) -> str:
    """A call's arguments, as an object whatever they are."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        value = arguments
    return arguments or "{}" if isinstance(value, dict) else msgspec.json.encode({"arguments": value}).decode()
