"""Incremental reading of one JSON value: where each value in it begins and ends, as its text comes.  Pure."""

import re
from copy import copy
from typing import Literal, NamedTuple

from warmline_backend.tool_parsers.lenient_json import ToolCallParseError, parse_strict_json

EventKind = Literal["begin", "end", "comma", "key"]
ReaderState = Literal["value", "key", "colon", "after", "text", "scalar", "over"]

_SPACES = re.compile(r"[ \t\r\n]*")
_TEXT_END = re.compile(r'["\\]')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_CLOSINGS = {"{": "}", "[": "]"}


class JsonEvent(NamedTuple):
    """Event of a text.  `offset` is that of its character in the text: of an end, the first one behind the value."""

    kind: EventKind
    offset: int
    text: str = ""  # of "begin", the value's first character; of "key", the name


class JsonReader:
    """Reader of a text with one JSON value.

    A number or a literal ends with the character behind it, or with the text.  Space before the value is skipped, and
    so is all that follows the value.  A character that can't stand where it is ends the reading.
    """

    def __init__(self) -> None:
        self._length = 0  # of the text so far
        self._open: list[str] = []  # brackets
        self._state: ReaderState = "value"
        self._can_close = False  # before the first member of an object or an array
        self._is_key = self._is_escaped = False  # within a text
        self._key: list[str] = []  # pieces of it

    @property
    def is_over(self) -> bool:
        """True behind the value, and where the reading has ended."""
        return self._state == "over"

    def copy(self) -> "JsonReader":
        made = copy(self)
        made._open, made._key = [*self._open], [*self._key]
        return made

    def feed(self, text: str) -> list[JsonEvent]:
        """Add text; returns its events in order."""
        events, position = list[JsonEvent](), 0
        while position < len(text) and self._state != "over":
            match self._state:
                case "text":
                    position = self._read_text(text, position, events)
                case "scalar":
                    position = self._read_scalar(text, position, events)
                case _:
                    position = _SPACES.match(text, position).end()  # type: ignore[union-attr]
                    if position < len(text):
                        self._read_sign(text[position], self._length + position, events)
                        position += 1
        self._length += len(text)
        return events

    def finish(self) -> list[JsonEvent]:
        """End the text; returns the end of a number or a literal that is the whole value."""
        events = list[JsonEvent]()
        if self._state == "scalar" and not self._open:
            self._end_value(self._length, events)
        self._state = "over"
        return events

    def _read_text(self, text: str, position: int, events: list[JsonEvent]) -> int:
        """Read a string or a key up to its end; returns the position behind what is read."""
        start = position
        if self._is_escaped:
            self._is_escaped, position = False, position + 1
        while (found := _TEXT_END.search(text, position)) is not None:
            if found.group() == '"':
                self._end_text(text[start : found.start()], self._length + found.end(), events)
                return found.end()
            position = found.end() + 1
        self._is_escaped = position > len(text)
        if self._is_key:
            self._key.append(text[start:])
        return len(text)

    def _end_text(self, rest: str, end: int, events: list[JsonEvent]) -> None:
        if not self._is_key:
            self._end_value(end, events)
            return
        events.append(JsonEvent("key", end, _decode_key("".join([*self._key, rest]))))
        self._key, self._state = [], "colon"

    def _read_scalar(self, text: str, position: int, events: list[JsonEvent]) -> int:
        end = _SCALAR.match(text, position).end()  # type: ignore[union-attr]
        if end < len(text):
            self._end_value(self._length + end, events)
        return end

    def _read_sign(self, char: str, offset: int, events: list[JsonEvent]) -> None:
        """Read the one character outside of strings and scalars, which is no space."""
        container = self._open[-1] if self._open else ""
        if char == _CLOSINGS.get(container) and (self._state == "after" or self._can_close):
            self._open.pop()
            self._end_value(offset + 1, events)
        elif self._state == "value":
            self._begin_value(char, offset, events)
        elif self._state == "key" and char == '"':
            self._begin_text(is_key=True)
        elif self._state == "colon" and char == ":":
            self._state = "value"
        elif self._state == "after" and char == ",":
            events.append(JsonEvent("comma", offset))
            self._state = "key" if container == "{" else "value"
        else:
            self._state = "over"

    def _begin_value(self, char: str, offset: int, events: list[JsonEvent]) -> None:
        self._can_close = False
        if char in _CLOSINGS:
            self._open.append(char)
            self._state, self._can_close = ("key" if char == "{" else "value"), True
        elif char == '"':
            self._begin_text(is_key=False)
        elif _SCALAR.fullmatch(char):
            self._state = "scalar"
        else:
            self._state = "over"
            return
        events.append(JsonEvent("begin", offset, char))

    def _begin_text(self, *, is_key: bool) -> None:
        self._state, self._is_key, self._can_close = "text", is_key, False

    def _end_value(self, end: int, events: list[JsonEvent]) -> None:
        events.append(JsonEvent("end", end))
        self._state, self._can_close = ("after" if self._open else "over"), False


def _decode_key(text: str) -> str:
    try:
        return str(parse_strict_json(f'"{text}"')[0])
    except ToolCallParseError:  # no JSON, which the validation of the whole finds
        return text
