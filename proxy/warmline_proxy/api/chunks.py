"""The backend's chunks as typed values: for APIs that write their answers anew.  Unknown fields are ignored."""

from typing import Any

import msgspec

from warmline_common.protocol.messages import decode
from warmline_proxy.errors import bad_gateway


class ChunkFunction(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None  # JSON, or a part of it


class ChunkToolCall(msgspec.Struct, frozen=True):
    """A tool call, or more of its arguments: then without id and name."""

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
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None  # "stop", "length" or "tool_calls"
    stop_reason: str | int | None = None  # the stop word that ended it, where one did


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class _CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class ChunkUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None

    @property
    def cached_tokens(self) -> int:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else 0

    @property
    def reasoning_tokens(self) -> int | None:
        """None where the backend doesn't count them."""
        return self.completion_tokens_details.reasoning_tokens if self.completion_tokens_details else None


class ChatChunk(msgspec.Struct, frozen=True):
    """One chunk of a chat."""

    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None


def decode_chunk(raw: bytes) -> ChatChunk:
    """Raises ClientError 502 for what is no chunk."""
    try:
        return decode(raw, ChatChunk)
    except msgspec.DecodeError as error:
        raise bad_gateway(f"The backend sent an unreadable chunk: {error}") from error
