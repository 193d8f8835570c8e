"""The backend's chunks as typed values, and the encoder of APIs with events of their own.  Pure."""

from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from warmline_common.protocol.messages import decode
from warmline_common.protocol.sse import encode_event
from warmline_proxy.api.base import Chunk, PromptProgress
from warmline_proxy.errors import ClientError, bad_gateway

Event = dict[str, Any]  # with a `type`


class ChunkFunction(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None  # JSON, or a part of it


class ChunkToolCall(msgspec.Struct, frozen=True):
    """A tool call, or, without id and name, more of its arguments."""

    index: int = 0
    id: str | None = None
    function: ChunkFunction = ChunkFunction()


class ChunkDelta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same text under its other name
    tool_calls: list[ChunkToolCall] | None = None

    @property
    def reasoning_text(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class ChunkChoice(msgspec.Struct, frozen=True):
    delta: ChunkDelta = ChunkDelta()
    text: str | None = None  # of a completion, which has no delta
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None  # "stop", "length" or "tool_calls"
    stop_reason: str | int | None = None  # the stop sequence that ended the answer; or why it was cut, with "length"

    @property
    def failed_format(self) -> str:
        """Why an answer of a given format was cut; "" where it was not, or only by its limit."""
        return str(self.stop_reason or "") if self.finish_reason == "length" else ""


class _UsageDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0  # of the prompt
    reasoning_tokens: int = 0  # of the completion


class ChunkUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _UsageDetails | None = None
    completion_tokens_details: _UsageDetails | None = None

    @property
    def cached_tokens(self) -> int:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else 0

    @property
    def reasoning_tokens(self) -> int | None:
        """None where the backend does not count them."""
        return self.completion_tokens_details.reasoning_tokens if self.completion_tokens_details else None


class ChatChunk(msgspec.Struct, frozen=True):
    """One chunk of a chat, or of a completion."""

    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None


class EventSource(Protocol):
    """Events of one answer, as an API names them, from the backend's chunks."""

    def add_chunk(self, chunk: ChatChunk) -> Iterable[Event]: ...

    def report_progress(self, progress: dict[str, Any]) -> Iterable[Event]:
        """Events that clients ignore, with these fields."""

    def end(self) -> Iterable[Event]: ...

    def fail(self, error: ClientError) -> Iterable[Event]:
        """Last events of a stream whose answer has begun."""

    def build_result(self) -> dict[str, Any]:
        """The whole answer, after `end`."""


class EventEncoder:
    """ResponseEncoder of an API whose streams are typed events and whose JSON is their result."""

    def __init__(self, events: EventSource, stream: bool) -> None:
        self.events, self._stream = events, stream

    def encode_chunk(self, chunk: Chunk, raw: bytes) -> bytes:
        """Raises ClientError 502 where `raw` is no chunk of a chat."""
        try:
            decoded = decode(raw, ChatChunk)
        except msgspec.DecodeError as error:
            raise bad_gateway(f"The backend sent an unreadable chunk: {error}") from error
        return self._emit(self.events.add_chunk(decoded))

    def encode_progress(self, progress: PromptProgress, loading: str = "", index: int = 0) -> bytes:
        fields = {"prompt_progress": progress} | ({"loading": loading} if loading else {})
        return self._emit(self.events.report_progress(fields))

    def encode_done(self) -> bytes:
        return self._emit(self.events.end())

    def encode_json(self) -> bytes:
        self._emit(self.events.end())
        return msgspec.json.encode(self.events.build_result())

    def encode_stream_error(self, error: ClientError) -> bytes:
        return encode_events(self.events.fail(error))

    def _emit(self, events: Iterable[Event]) -> bytes:
        if self._stream:
            return encode_events(events)
        deque(events, maxlen=0)  # run for their effect on the result
        return b""


def encode_events(events: Iterable[Event]) -> bytes:
    """Server-sent events, named by their `type`."""
    return b"".join(encode_event(msgspec.json.encode(event), event["type"]) for event in events)
