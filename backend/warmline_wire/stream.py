"""Server-sent events as bytes, and the folding of OpenAI chunks into one answer.

Parsed on bytes: a str splitter would break events at U+2028 and U+0085.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"


class Event(msgspec.Struct, frozen=True):
    """One SSE event, or a comment (`: text`), or both parts empty for an event without data."""

    data: bytes = b""
    name: bytes = b""
    comment: bytes = b""
    raw: bytes = b""  # as received, blank line included; line ends are LF


class EventParser:
    """Feed bytes as they come; whole events come out.  Not thread-safe; one a stream."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> Iterator[Event]:
        self._buffer += data
        if b"\r" in self._buffer:  # a CR may have come with the data before
            self._buffer = self._buffer.replace(b"\r\n", b"\n")
        while (end := self._buffer.find(b"\n\n")) >= 0:
            raw, self._buffer = self._buffer[: end + 2], self._buffer[end + 2 :]
            yield parse_event(raw)


def parse_event(raw: bytes) -> Event:
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
    return Event(data=b"\n".join(data), name=name, comment=comment, raw=raw)


def data_event(payload: bytes, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + payload + b"\n\n"


def comment_event(text: str) -> bytes:
    return f": {text}\n\n".encode()


class ChunkFold:
    """Folds streamed chunks of one choice into the JSON that a client gets that did not ask for a stream.

    Works for ``chat.completion.chunk`` and for ``text_completion`` chunks; unknown fields of the first chunk
    are kept.
    """

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._text: list[str] = []
        self._role = "assistant"
        self._extra: dict[str, Any] = {}
        self._logprobs: dict[str, list[Any]] = {}
        self._finish: str | None = None
        self._usage: Any = None

    def add(self, chunk: dict[str, Any]) -> None:
        if not self._head:
            self._head = {key: value for key, value in chunk.items() if key not in ("choices", "usage")}
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        for choice in chunk.get("choices") or ():
            self._add_choice(choice)

    def _add_choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        self._role = delta.get("role") or self._role
        self._text.append(delta.get("content") or choice.get("text") or "")
        for key, value in delta.items():
            if key not in ("role", "content") and isinstance(value, str):
                self._extra[key] = self._extra.get(key, "") + value
        for key, value in (choice.get("logprobs") or {}).items():
            if value:
                self._logprobs.setdefault(key, []).extend(value)
        self._finish = choice.get("finish_reason") or self._finish

    def result(self) -> dict[str, Any]:
        """The folded answer; call once the stream has ended."""
        text, kind = "".join(self._text), self._head.get("object")
        choice: dict[str, Any] = {"index": 0}
        if kind == "chat.completion.chunk":
            choice["message"] = {"role": self._role, "content": text, **self._extra}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs or None
        choice["finish_reason"] = self._finish
        answer = {**self._head, "choices": [choice], "usage": self._usage}
        if kind == "chat.completion.chunk":
            answer["object"] = "chat.completion"
        return answer
