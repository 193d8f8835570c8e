"""Server-sent events as bytes, and the folding of OpenAI chunks into one answer.

Parsed on bytes: a str splitter would break events at U+2028 and U+0085.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"


class SseEvent(msgspec.Struct, frozen=True):
    """One SSE event, or a comment (`: text`), or both parts empty for an event without data."""

    data: bytes = b""
    name: bytes = b""
    comment: bytes = b""
    raw: bytes = b""  # as received, blank line included; line ends are LF


class SseParser:
    """Parser of SSE: feed bytes as they come, whole events come out.  Not thread-safe; one a stream."""

    def __init__(self) -> None:
        self._buffer = b""

    @property
    def buffered_bytes(self) -> int:
        """Size of the event that is not whole yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[SseEvent]:
        self._buffer += data
        if b"\r" in self._buffer:  # a CR may have come with the data before
            self._buffer = self._buffer.replace(b"\r\n", b"\n")
        while (end := self._buffer.find(b"\n\n")) >= 0:
            raw, self._buffer = self._buffer[: end + 2], self._buffer[end + 2 :]
            yield parse_event(raw)


def parse_event(raw: bytes) -> SseEvent:
    data, name, comment = [], b"", b""
    for line in raw.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
        elif not field and line:
            comment = value
    return SseEvent(data=b"\n".join(data), name=name, comment=comment, raw=raw)


def encode_event(payload: bytes, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + payload + b"\n\n"


def encode_comment(text: str) -> bytes:
    return f": {text}\n\n".encode()


class ChunkAggregator:
    """Aggregator of streamed chunks into the JSON of a request without a stream.

    Works for ``chat.completion.chunk`` and for ``text_completion`` chunks, and for any number of choices; unknown
    fields of the first chunk are kept.
    """

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choices: dict[int, _ChoiceAggregator] = {}
        self._usage: Any = None

    def add(self, chunk: dict[str, Any]) -> None:
        if not self._head:
            self._head = {key: value for key, value in chunk.items() if key not in ("choices", "usage")}
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        for choice in chunk.get("choices") or ():
            self._choices.setdefault(choice.get("index") or 0, _ChoiceAggregator()).add(choice)

    def result(self) -> dict[str, Any]:
        """Aggregated answer; call once the stream has ended."""
        chat = self._head.get("object") == "chat.completion.chunk"
        folded = sorted(self._choices.items()) or [(0, _ChoiceAggregator())]
        choices = [{"index": index, **choice.result(chat)} for index, choice in folded]
        answer = {**self._head, "choices": choices, "usage": self._usage}
        if chat:
            answer["object"] = "chat.completion"
        return answer


class _ChoiceAggregator:
    """Aggregator of one choice's chunks."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._role = "assistant"
        self._extra: dict[str, list[str]] = {}  # other fields that come in pieces, as reasoning does
        self._tool_calls: dict[int, dict[str, Any]] = {}
        self._logprobs: dict[str, list[Any]] = {}
        self._finish_reason: str | None = None
        self._stop_reason: dict[str, str] = {}  # `stop_reason`, where a stop word ended it

    def add(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        self._role = delta.get("role") or self._role
        self._text.append(delta.get("content") or choice.get("text") or "")
        for key, value in delta.items():
            if key not in ("role", "content") and isinstance(value, str):
                self._extra.setdefault(key, []).append(value)
        for call in delta.get("tool_calls") or ():
            self._add_tool_call(call)
        for key, value in (choice.get("logprobs") or {}).items():
            if value:
                self._logprobs.setdefault(key, []).extend(value)
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        if choice.get("stop_reason"):
            self._stop_reason = {"stop_reason": choice["stop_reason"]}

    def _add_tool_call(self, call: dict[str, Any]) -> None:
        """Add a call's delta: id, type and name come once, arguments in one piece or several."""
        whole = self._tool_calls.setdefault(call["index"], {"function": {"name": "", "arguments": ""}})
        function = call.get("function") or {}
        whole["function"]["name"] = function.get("name") or whole["function"]["name"]
        whole["function"]["arguments"] += function.get("arguments") or ""
        whole.update({key: call[key] for key in ("id", "type") if call.get(key)})

    def result(self, chat: bool) -> dict[str, Any]:
        text = "".join(self._text)
        content = {"message": self._build_message(text)} if chat else {"text": text}
        absent = {"content": None, "refusal": None} if chat else {}
        return {
            **content,
            "logprobs": absent | self._logprobs if self._logprobs else None,
            "finish_reason": self._finish_reason,
            **self._stop_reason,
        }

    def _build_message(self, text: str) -> dict[str, Any]:
        extra: dict[str, Any] = {key: "".join(pieces) for key, pieces in self._extra.items()}
        if self._tool_calls:
            calls = [call for _, call in sorted(self._tool_calls.items())]
            extra["tool_calls"] = [{"id": call.get("id"), "type": call.get("type"), **call} for call in calls]
        content = text or (None if self._tool_calls else "")
        return {"role": self._role, "content": content, "refusal": None, **extra}
