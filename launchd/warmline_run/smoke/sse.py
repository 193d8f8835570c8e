"""Server-sent events out of bytes.  Lines are split on bytes, since text may have line breaks of its own.  Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

EVENT_BYTES_MAX = 64 << 20
_PROGRESS = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True)
class SmokeEvent:
    """One event's data, or one comment."""

    data: str = ""
    comment: str = ""

    @property
    def progress(self) -> tuple[int, int] | None:
        """Tokens done and in all, where a comment tells of a prefill."""
        match = _PROGRESS.search(self.comment)
        return (int(match[1]), int(match[2])) if match else None


class EventReader:
    """Feed it bytes as they come."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> Iterator[SmokeEvent]:
        *lines, self._buffer = (self._buffer + piece).split(b"\n")
        if len(self._buffer) > EVENT_BYTES_MAX:
            raise ValueError(f"a line of more than {EVENT_BYTES_MAX >> 20} MiB")
        for line in lines:
            yield from self._parse_line(line.rstrip(b"\r").decode(errors="replace"))

    def _parse_line(self, line: str) -> Iterator[SmokeEvent]:
        if not line and self._data:
            yield SmokeEvent(data="\n".join(self._data))
            self._data = []
        elif line.startswith(":"):
            yield SmokeEvent(comment=line[1:].strip())
        elif line.startswith("data:"):
            self._data.append(line[5:].removeprefix(" "))
