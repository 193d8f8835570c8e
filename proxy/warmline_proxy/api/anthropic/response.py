"""Anthropic's answer from the backend's chunks: a stream's events, or the same events folded into one message.

    message_start  ->  (content_block_start  content_block_delta ...  content_block_stop) ...  ->  message_delta  ->
    message_stop

One block at a time is open.  Of a tool call, `input` is told when the call is complete, for it must be an object.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from warmline_common.protocol.sse import data_event
from warmline_proxy.api.anthropic.errors import error_object
from warmline_proxy.api.anthropic.ids import tool_use_id
from warmline_proxy.api.base import Begun, Call, Chunk
from warmline_proxy.api.chunks import Heard, HeardCall, HeardChoice, HeardUsage, hear
from warmline_proxy.errors import ClientError

Event = dict[str, Any]

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
SIGNATURE = "d2FybWxpbmU="  # of all thinking: clients keep it and send it back, nobody here reads it
TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"
DELTAS = {TEXT: "text_delta", THINKING: "thinking_delta"}


class MessageEncoder:
    """An apis.Encoder."""

    def __init__(self, call: Call, begun: Begun) -> None:
        self._events = MessageEvents(call, begun)
        self._folded = None if call.stream else FoldedMessage()

    def chunk(self, chunk: Chunk, raw: bytes) -> bytes:
        return self._tell(self._events.hear(hear(raw)))

    def done(self) -> bytes:
        return self._tell(self._events.end())

    def whole(self) -> bytes:
        self._tell(self._events.end())
        assert self._folded is not None
        return msgspec.json.encode(self._folded.message)

    def failure(self, error: ClientError) -> bytes:
        return data_event(error_object(error), "error")

    def _tell(self, events: Iterable[Event]) -> bytes:
        if self._folded is None:
            return b"".join(data_event(msgspec.json.encode(event), event["type"]) for event in events)
        for event in events:
            self._folded.add(event)
        return b""


class MessageEvents:
    """What is said, in order, from what is heard."""

    def __init__(self, call: Call, begun: Begun) -> None:
        self._begun = begun
        self._model = begun.model if call.client_model is None else call.client_model
        self._mute = call.asked == 0  # max_tokens: the prompt was to be read, nothing is to be said
        self._started = False
        self._blocks = 0  # that were opened
        self._open = ""  # the type of the block that is
        self._call = -1  # the index of the call that is open
        self._arguments = ""
        self._stop: tuple[str, str | None] = ("max_tokens" if self._mute else "end_turn", None)
        self._usage: HeardUsage | None = None

    def hear(self, heard: Heard) -> Iterator[Event]:
        yield from self._start()
        self._usage = heard.usage or self._usage
        for choice in heard.choices if not self._mute else ():
            yield from self._choice(choice)

    def end(self) -> Iterator[Event]:
        yield from self._start()
        yield from self._close()
        reason, sequence = self._stop
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None},
            "usage": self._usage_now(),
        }
        yield {"type": "message_stop"}

    def _start(self) -> Iterator[Event]:
        if not self._started:
            self._started = True
            yield {"type": "message_start", "message": self._message()}

    def _message(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self._begun.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": self._usage_now(),
        }

    def _usage_now(self) -> dict[str, Any]:
        """Nothing counts as written to the cache: what is kept costs nobody more than what isn't."""
        heard = self._usage or HeardUsage(self._begun.prompt_tokens)
        cached = heard.cached_tokens if self._usage else self._begun.cached_tokens
        usage: dict[str, Any] = {
            "input_tokens": heard.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": 0 if self._mute else heard.completion_tokens,
        }
        if heard.reasoning_tokens is not None and not self._mute:
            usage["output_tokens_details"] = {"thinking_tokens": heard.reasoning_tokens}
        return usage

    def _choice(self, choice: HeardChoice) -> Iterator[Event]:
        yield from self._say(THINKING, choice.delta.thought)
        yield from self._say(TEXT, choice.delta.content or "")
        for call in choice.delta.tool_calls or ():
            yield from self._call_tool(call)
        if choice.finish_reason:
            word = choice.stop_reason if isinstance(choice.stop_reason, str) else None
            reason = STOP_REASONS.get(choice.finish_reason, "end_turn")
            self._stop = ("stop_sequence", word) if word and reason == "end_turn" else (reason, None)

    def _say(self, kind: str, text: str) -> Iterator[Event]:
        if not text:
            return
        if self._open != kind:
            yield from self._begin(kind, {kind: "", "signature": ""} if kind == THINKING else {kind: ""})
        yield self._delta({"type": DELTAS[kind], kind: text})

    def _call_tool(self, call: HeardCall) -> Iterator[Event]:
        if call.id or self._open != TOOL_USE or call.index != self._call:
            name = {"id": tool_use_id(call.id or ""), "name": call.function.name or ""}
            yield from self._begin(TOOL_USE, {**name, "input": {}})
            self._call, self._arguments = call.index, ""
        self._arguments += call.function.arguments or ""

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._open = kind
        self._blocks += 1
        yield {"type": "content_block_start", "index": self._blocks - 1, "content_block": {"type": kind, **block}}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _close(self) -> Iterator[Event]:
        if not self._open:
            return
        if self._open == THINKING:
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open == TOOL_USE:
            yield self._delta({"type": "input_json_delta", "partial_json": _input_json(self._arguments)})
        self._open = ""
        yield {"type": "content_block_stop", "index": self._blocks - 1}


class FoldedMessage:
    """The message that a client makes of its events."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}

    def add(self, event: Event) -> None:
        if event["type"] == "message_start":
            self.message = event["message"]
        elif event["type"] == "content_block_start":
            self.message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            _extend(self.message["content"][event["index"]], event["delta"])
        elif event["type"] == "message_delta":
            self.message |= event["delta"]
            self.message["usage"] = event["usage"]


def _extend(block: dict[str, Any], delta: dict[str, Any]) -> None:
    if delta["type"] == "input_json_delta":
        block["input"] = msgspec.json.decode(delta["partial_json"])
        return
    for key, value in delta.items():
        if key != "type":
            block[key] += value


def _input_json(arguments: str) -> str:
    """A call's arguments, as an object whatever they are."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        value = arguments
    return arguments or "{}" if isinstance(value, dict) else msgspec.json.encode({"arguments": value}).decode()
