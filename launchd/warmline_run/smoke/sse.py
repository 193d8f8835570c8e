"""Server-sent events out of bytes.  Lines are split on bytes, since text may have line breaks of its own.  Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

EVENT_BYTES_MAX = 64 << 20
_PROGRESS = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True)
class Event:
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
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> Iterator[Event]:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise ValueError(f"a line of more than {EVENT_BYTES_MAX >> 20} MiB")
        for line in lines:
            yield from self._line(line.rstrip(b"\r").decode(errors="replace"))

    def _line(self, line: str) -> Iterator[Event]:
        if not line and self._data:
            yield Event(data="\n".join(self._data))
            self._data = []
        elif line.startswith(":"):
            yield Event(comment=line[1:].strip())
        elif line.startswith("data:"):
            self._data.append(line[5:].removeprefix(" "))
