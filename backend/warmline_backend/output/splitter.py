"""Splitter of marked text into reasoning, content and calls."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from typing import Self

from warmline_backend.output.dialect import Dialect, get_scanners
from warmline_backend.output.emitter import PartEmitter
from warmline_backend.output.events import Part, Text, ToolCall
from warmline_backend.output.expected import ExpectedOutput
from warmline_backend.output.markers import MarkerScanner
from warmline_backend.tool_parsers.lenient_json import ToolCallParseError
from warmline_backend.tool_parsers.registry import CallMarkers

TRIALS_MAX = 32  # of calls at the end of reasoning
ENDS_HELD_MAX = 64  # so many end markers may stand in a call's text


class Splitter(ABC):
    """Splitter of text.  Emitted parts are final.  Offsets of calls are characters of all text."""

    def __init__(self, dialect: Dialect, expected: ExpectedOutput, step: Callable[[], bool]) -> None:
        self._tool_format = dialect.tool_format if expected.tools else None
        self._tools = expected.tools if self._tool_format else None
        self._emitter = PartEmitter(self._tools, expected.parallel)
        self._buffer = ""  # text behind all that is consumed
        self._offset = 0  # of the buffer
        self._pending: list[str] = []  # text of a call, or of a possible one
        self._step = step  # consumes up to the next marker; true while there may be another

    def copy(self) -> Self:
        made = copy(self)
        made._emitter, made._pending = self._emitter.copy(), [*self._pending]
        made._step = getattr(made, self._step.__name__)  # the same method, of the copy
        return made

    @property
    def is_done(self) -> bool:
        """True where the rest is not wanted."""
        return self._emitter.is_done

    @property
    @abstractmethod
    def is_reasoning(self) -> bool:
        """True within reasoning."""

    @property
    @abstractmethod
    def is_calling(self) -> bool:
        """True within a call."""

    def feed(self, text: str) -> list[Part]:
        """Add text; returns the parts that are certain."""
        self._buffer += text
        while not self._emitter.is_done and self._step():
            pass
        return self._emitter.take_parts()

    def finish(self, natural: bool) -> list[Part]:
        """Return the rest.  `natural`: the model ended by itself, so open parts may count as closed."""
        self._finish(natural)
        self._emitter.finish()
        return self._emitter.take_parts()

    @abstractmethod
    def _finish(self, natural: bool) -> None:
        """Emit the open parts."""

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        self._offset += length
        return taken

    def _take_all(self) -> str:
        return self._take(len(self._buffer))

    def _emit_text(self, text: str) -> None:
        """Emit content that ends where the buffer begins."""
        self._emitter.emit_text(text, self._offset)

    def _emit_reasoning(self, text: str) -> None:
        """Emit reasoning that ends where the buffer begins."""
        self._emitter.emit_reasoning(text, self._offset)

    def _push_back(self, text: str) -> None:
        """Return consumed text to the buffer."""
        self._buffer = text + self._buffer
        self._offset -= len(text)


class MarkerSplitter(Splitter):
    """Splitter for models with markers around reasoning and calls.

    Constrained content, once begun, goes on to the answer's end, whatever it spells.
    """

    def __init__(self, dialect: Dialect, expected: ExpectedOutput) -> None:
        super().__init__(dialect, expected, self._read_content)
        self._dialect, self._scanners = dialect, get_scanners(dialect, self._tool_format is not None)
        self._is_constrained = expected.is_constrained
        self._call_markers: CallMarkers | None = None  # of the call
        self._call_scanner = MarkerScanner(())
        self._end_markers_held = 0  # end markers in `_pending`, taken for text of the call
        self._trial: MarkerSplitter | None = None  # parses possible calls within reasoning
        self._trial_calls: list[ToolCall] = []
        self._trial_marker, self._trial_start, self._trials = "", 0, 0
        self._begin_content()
        if dialect.is_reasoning_open(expected.tail):
            self._step = self._read_reasoning
            self._emitter.begin_reasoning()

    def copy(self) -> Self:
        made = super().copy()
        made._trial, made._trial_calls = self._trial and self._trial.copy(), [*self._trial_calls]
        return made

    @property
    def is_reasoning(self) -> bool:
        return self._step in (self._read_reasoning, self._read_trial)

    @property
    def is_calling(self) -> bool:
        return self._step in (self._read_call, self._read_trial)

    def _finish(self, natural: bool) -> None:
        while not self._emitter.is_done and (self._step() or self._finish_step(natural)):
            pass

    def _finish_step(self, natural: bool) -> bool:
        """Close an open part.  True while there is more to read."""
        if self._step == self._read_call:
            self._pending.append(self._take_all())
            self._end_call("", cut=not natural)
        elif self._step == self._read_trial:
            self._finish_trial(natural)
        elif self._step == self._read_reasoning:
            self._emit_reasoning(self._take_all())
        else:
            self._emit_text(self._take_all())
        return bool(self._buffer)

    # ---- states: each consumes up to the next marker, and returns true while there may be another

    def _begin_content(self) -> None:
        """Read content, which may begin with a call without a marker."""
        can_be_bare = self._tool_format is not None and self._tool_format.can_be_bare is not None
        self._step = self._read_start if can_be_bare and self._emitter.is_empty else self._read_content

    def _read_start(self) -> bool:
        """Read the beginning of an answer that may be a call without a marker."""
        assert self._tool_format and self._tool_format.can_be_bare
        is_call = self._tool_format.can_be_bare(self._buffer)
        if is_call is None:
            return False
        if is_call:
            self._begin_call(self._tool_format)
        else:
            self._step = self._read_content
        return True

    def _read_content(self) -> bool:
        if self._is_constrained and self._emitter.has_content:
            self._emit_text(self._take_all())
            return False
        safe, marker = self._scanners.content.find_marker(self._buffer)
        self._emit_text(self._take(safe))
        if not marker:
            return False
        if self._is_constrained and self._emitter.has_content:
            return True
        self._take(len(marker))
        if marker == self._dialect.think_start:
            self._emitter.begin_reasoning()
            self._step = self._read_reasoning
        elif marker == self._dialect.think_end:
            self._end_reasoning()
        elif opening := self._scanners.openings.get(marker):
            self._begin_call(opening)
        elif marker not in self._dialect.ignored_markers and not self._emitter.is_after_call:
            self._emit_text(marker)
        return True

    def _read_reasoning(self) -> bool:
        safe, marker = self._scanners.reasoning.find_marker(self._buffer)
        self._emit_reasoning(self._take(safe))
        if not marker:
            return False
        if marker == self._dialect.think_end:
            self._take(len(marker))
            self._end_reasoning()
        elif marker == self._dialect.think_start:
            self._take(len(marker))
            if not self._emitter.after_marker:  # else the prompt has opened it already
                self._emit_reasoning(marker)
        else:
            self._begin_trial(marker)
        return True

    def _begin_trial(self, marker: str) -> None:
        self._trials += 1
        self._trial_start, self._trial_calls, self._pending = self._offset, [], []
        if self._trials > TRIALS_MAX:
            self._emit_reasoning(self._take(len(marker)))
            return
        self._trial = MarkerSplitter(self._dialect, ExpectedOutput(tools=self._tools))
        self._trial_marker, self._step = marker, self._read_trial
        self._feed_trial(self._take(len(marker)))

    def _end_reasoning(self) -> None:
        self._emitter.end_reasoning(self._offset)
        self._begin_content()

    # ---- calls

    def _begin_call(self, call_markers: CallMarkers) -> None:
        self._call_markers, self._pending, self._end_markers_held = call_markers, [], 0
        self._call_scanner = self._scanners.calls[call_markers.start]
        self._step = self._read_call

    def _read_call(self) -> bool:
        safe, marker = self._call_scanner.find_marker(self._buffer)
        self._pending.append(self._take(safe))
        if not marker:
            return False
        assert self._call_markers
        if marker != self._call_markers.end:  # the next call's start
            self._step = self._read_content
            self._end_call("", cut=False)
            return True
        self._take(len(marker))
        if not self._end_call(marker, cut=False):
            self._pending.append(marker)
            self._end_markers_held += 1
        return True

    def _end_call(self, marker: str, *, cut: bool) -> bool:
        """Emit a call from its complete text, or other text as it is.  False within a string."""
        assert self._call_markers
        text = "".join(self._pending)
        try:
            if cut and self._call_markers.end:
                raise ToolCallParseError("it is cut")
            start = self._offset - len(marker) - len(text)
            self._emitter.emit_items(self._call_markers.parse(text, cut), text, start, self._offset)
        except ToolCallParseError as error:
            if marker and error.cut and self._end_markers_held < ENDS_HELD_MAX:
                return False
            self._reject_call(text + marker)
        self._step = self._read_content
        return True

    def _reject_call(self, text: str) -> None:
        """Emit as text.  Where it holds end markers, the text after the first of them is read anew."""
        assert self._call_markers
        first = text.find(self._call_markers.end) + len(self._call_markers.end) if self._end_markers_held else len(text)
        self._push_back(text[first:])
        self._emit_text(self._call_markers.start + text[:first])

    # ---- trials: possible calls within reasoning count where nothing but the end follows them

    def _read_trial(self) -> bool:
        safe, marker = self._scanners.trial.find_marker(self._buffer)
        if not self._feed_trial(self._take(safe)) or marker:
            self._reject_trial()
            return True
        return False

    def _reject_trial(self) -> None:
        """Emit as reasoning; other calls may begin within it."""
        text, length = "".join(self._pending), len(self._trial_marker)
        self._push_back(text[length:])
        self._emit_reasoning(text[:length])
        self._step = self._read_reasoning

    def _feed_trial(self, text: str) -> bool:
        """Feed the trial; true while it has nothing but calls."""
        assert self._trial
        self._pending.append(text)
        return self._collect_trial_calls(self._trial.feed(text))

    def _collect_trial_calls(self, parts: list[Part]) -> bool:
        self._trial_calls += [part for part in parts if isinstance(part, ToolCall)]
        return not any(isinstance(part, Text) and part.text.strip() for part in parts)

    def _finish_trial(self, natural: bool) -> None:
        assert self._trial
        fits = self._feed_trial(self._take_all())
        if not (fits and natural and self._collect_trial_calls(self._trial.finish(natural)) and self._trial_calls):
            self._reject_trial()
            return
        self._emitter.end_reasoning(self._trial_start)
        for call in self._trial_calls:
            if not self._emitter.is_done:
                start = self._trial_start
                self._emitter.emit_call(ToolCall(call.name, call.arguments, start, start + call.end))
