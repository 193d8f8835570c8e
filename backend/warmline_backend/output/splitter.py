"""Marked text told apart as it comes: reasoning, content and calls."""

import json
from typing import Any, Protocol

from warmline_backend.output.dialect import Dialect
from warmline_backend.output.parts import Called, Part, Said, Thought
from warmline_backend.output.reading import Written
from warmline_backend.output.schema_types import parameters_of, typed

_NEWLINE = "\n"


class Splitter(Protocol):
    """Parts that come out are final.  Offsets of calls are characters of all that was fed."""

    done: bool  # what follows is not wanted

    @property
    def thinking(self) -> bool:
        """What follows is reasoning."""

    def feed(self, text: str) -> list[Part]:
        """What is certain now."""

    def finish(self, natural: bool) -> list[Part]:
        """The rest.  `natural`: the model ended by itself, so what is open may be taken for closed."""


class MarkedSplitter:
    """For models that put markers around reasoning and around calls.

    `tools` None: nothing is a call.  `thinking`: the prompt has opened the reasoning.  `parallel`: more than one call
    may be told.

    Line breaks next to reasoning's markers belong to the markers.  So does white space before and after calls, but
    where content stands on both sides.
    """

    def __init__(
        self, dialect: Dialect, tools: list[dict[str, Any]] | None, *, thinking: bool = False, parallel: bool = True
    ) -> None:
        self.done = False
        self._dialect, self._tools, self._parallel = dialect, tools, parallel
        self._format = dialect.calls if tools else None
        self._in_content, self._in_thought, self._in_call = dialect.scanners(bool(self._format))
        self._buffer = ""  # what comes after all that was consumed
        self._offset = 0  # of the buffer
        self._step = self._think if thinking else self._say
        self._thought_until = -1 if thinking else 0  # where the last reasoning ended
        self._gap = ""  # white space that is told only once something follows
        self._strips_newlines = thinking
        self._said = self._called = False

    @property
    def thinking(self) -> bool:
        return self._step == self._think

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while not self.done and self._step(parts):
            pass
        return parts

    def finish(self, natural: bool) -> list[Part]:
        parts: list[Part] = []
        if self.done:
            return parts
        step, rest = self._step, self._take(len(self._buffer))
        if step == self._call:
            self._end_call(rest, "", natural, parts)
        elif step == self._think:
            self._tell_thought(rest, parts)
            if self._gap:
                parts.append(Thought(self._gap))
        else:
            self._tell(rest, parts)
        if self._gap and step != self._think and not self._called:
            parts.append(Said(self._gap))
        return parts

    # ---- states: each consumes up to the next marker, and says whether one was there

    def _say(self, parts: list[Part]) -> bool:
        safe, marker = self._in_content.find(self._buffer)
        self._tell(self._take(safe), parts)
        if not marker:
            return False
        self._take(len(marker))
        dialect = self._dialect
        if marker == dialect.think_start:
            self._begin_thought()
        elif marker == dialect.think_end:
            self._end_thought()
        elif self._format and marker == self._format.start:
            self._step = self._call
        elif not self._after_call:
            self._tell(marker, parts)
        return True

    def _think(self, parts: list[Part]) -> bool:
        safe, marker = self._in_thought.find(self._buffer)
        self._tell_thought(self._take(safe), parts)
        if not marker:
            return False
        self._take(len(marker))
        if marker == self._dialect.think_end:
            self._end_thought()
        elif not self._strips_newlines:  # a second start at the beginning says nothing
            self._tell_thought(marker, parts)
        return True

    def _call(self, parts: list[Part]) -> bool:
        length, marker = self._in_call.find(self._buffer)
        if not marker:
            return False
        assert self._format
        text = self._take(length)
        if marker == self._format.end:
            self._take(len(marker))
            self._step = self._say
            self._end_call(text, marker, True, parts)
        else:  # the next call's start
            self._end_call(text, "", True, parts)
            if not self.done:
                self._take(len(marker))
        return True

    # ---- reasoning

    def _begin_thought(self) -> None:
        self._step, self._strips_newlines = self._think, True
        self._thought_until = -1

    def _end_thought(self) -> None:
        self._step, self._strips_newlines = self._say, True
        self._gap, self._thought_until = "", self._offset

    def _tell_thought(self, text: str, parts: list[Part]) -> None:
        if self._strips_newlines:
            text = text.lstrip(_NEWLINE)
        if not text:
            return
        self._strips_newlines = False
        text = self._gap + text
        told = text.rstrip(_NEWLINE)
        self._gap = text[len(told) :]
        if told:
            parts.append(Thought(told))

    # ---- content

    @property
    def _after_call(self) -> bool:
        return self._called and not self._strips_newlines

    def _tell(self, text: str, parts: list[Part]) -> None:
        if self._strips_newlines:
            text = text.lstrip(_NEWLINE)
        if not text:
            return
        self._strips_newlines = False
        if self._format is None:
            parts.append(Said(text))
            return
        text = self._gap + text
        told = text.rstrip()
        self._gap = text[len(told) :]
        if told:
            self._said = True
            parts.append(Said(told))

    # ---- calls

    def _end_call(self, text: str, marker: str, natural: bool, parts: list[Part]) -> None:
        """A call's text is there: tell of what it says, or the text itself where it says nothing."""
        assert self._format
        try:
            if not marker and not natural:
                raise ValueError("it is cut")
            items = self._format.read(text, bool(marker), self._tools)
        except ValueError:
            self._tell(self._format.start + text + marker, parts)
            return
        for item in items:
            if isinstance(item, str):
                self._tell(item, parts)
            elif self._parallel or not self._called:
                self._tell_call(item, parts)
        self.done = self._called and not self._parallel

    def _tell_call(self, written: Written, parts: list[Part]) -> None:
        if not self._said:
            self._gap = ""
        self._called = True
        parts.append(Called(written.name, self._as_json(written), self._thought_until, self._offset))

    def _as_json(self, written: Written) -> str:
        arguments = typed(written.arguments, parameters_of(self._tools, written.name))
        text = json.dumps(arguments, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError:  # half a surrogate pair, which only an escape can say
            return json.dumps(arguments)
        return text

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        self._offset += length
        return taken
