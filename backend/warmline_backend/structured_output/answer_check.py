"""Checks of an answer for what its grammar can't force, as its tokens come: values, calls, and whether there is one.

The answer's tokens become parts through a parser of output, as they do for the client.  Each value of the content that
a check concerns is validated once it is complete, and the arguments of each call once the call is.
"""

import io
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field

from warmline_backend.output.events import Part, Reasoning, Text, ToolCall
from warmline_backend.output.parser import OutputParser
from warmline_backend.request.schemas import Schema
from warmline_backend.structured_output.check_places import NO_PLACE, CheckPlaces, Place, escape_step
from warmline_backend.structured_output.json_reader import JsonEvent, JsonReader
from warmline_backend.structured_output.json_schema.patterns import CheckTooCostlyError, compile_check
from warmline_backend.structured_output.json_schema.validator import SchemaValidator
from warmline_backend.tool_parsers.lenient_json import ToolCallParseError, parse_strict_json
from warmline_common.protocol.surrogates import replace_halves

REASON_CHARS_MAX = 300
PATH_CHARS_MAX = 120
SNAPSHOT_TOKENS = 256  # between two snapshots that an answer can be rewound to
SNAPSHOTS_MAX = 16  # the older they are, the fewer are kept
VALIDATION_TIME_MAX_S = 0.1  # of the thread, for all values that end with one token

_MISSING_CALL = "a call of a tool is required, and this is none that can be read"

MakeParser = Callable[[], OutputParser]  # of one answer, without stop words


@dataclass(frozen=True)
class Violation:
    """Fault of an answer."""

    start: int  # answer tokens before the first token of the invalid value
    reason: str  # for people, one line
    is_incomplete: bool = False  # more of the value may mend it


class ContentCheck:
    """Checks of content that is JSON.  Immutable; any thread.

    `checks` are pointers to the subschemas of a normalized schema that have a keyword to be checked.
    """

    def __init__(self, schema: Schema, checks: Collection[str]) -> None:
        """Raises PatternError, and LookupError for a reference without a target."""
        self.validator = SchemaValidator(schema)
        self.places = CheckPlaces(schema, checks, compile_check)


class ToolCheck:
    """Check of one tool's arguments against the whole of a normalized schema.  Immutable; any thread."""

    def __init__(self, schema: Schema) -> None:
        """Raises PatternError, and LookupError for a reference without a target."""
        self.validator = SchemaValidator(schema)


@dataclass(frozen=True, eq=False)
class AnswerChecks:
    """Checks of one prompt's answers.  Any thread."""

    content: ContentCheck | None = None
    tools: Mapping[str, ToolCheck] = field(default_factory=dict)  # by function
    requires_call: bool = False  # the answer is calls, without text
    may_comment: bool = False  # with required calls: text may precede them

    def create(self, make_parser: MakeParser) -> "AnswerCheck":
        """Create the check of one run of one answer."""
        return AnswerCheck(self, make_parser)


class AnswerCheck:
    """Check of one run of one answer.  Engine thread.

    After a violation the answer is rewound before it goes on, or it ends there.
    """

    def __init__(self, checks: AnswerChecks, make_parser: MakeParser) -> None:
        self._tokens: list[int] = []
        self._validation = _Validation()
        self._state = _AnswerState(checks, make_parser(), self._validation)
        self._snapshots = [(0, self._state.copy())]  # by the tokens before them; the first one stays

    @property
    def sound_count(self) -> int:
        """Answer tokens before the outermost open value that a check concerns, and before text that is no part yet."""
        return self._state.sound_count

    def add(self, token: int, ends: bool) -> Violation | None:
        """Add a token; `ends`: it ends the answer and has no text.  Returns what it shows to be wrong."""
        self._tokens.append(token)
        self._validation.begin_token()
        if violation := self._state.add(token, ends):
            return violation
        if len(self._tokens) >= self._snapshots[-1][0] + SNAPSHOT_TOKENS:
            self._snapshots.append((len(self._tokens), self._state.copy()))
            if len(self._snapshots) > SNAPSHOTS_MAX:
                del self._snapshots[1::2]
        return None

    def rewind(self, count: int) -> None:
        """Forget all but the first `count` tokens, among which there is no violation."""
        while self._snapshots[-1][0] > count:
            self._snapshots.pop()
        del self._tokens[count:]
        start, snapshot = self._snapshots[-1]
        self._state = snapshot.copy()
        self._validation.is_off = True
        for token in self._tokens[start:]:
            self._state.add(token, False)
        self._validation.is_off = False


class _AnswerState:
    """State of an answer's check after some tokens."""

    def __init__(self, checks: AnswerChecks, parser: OutputParser, validation: "_Validation") -> None:
        self._checks, self._parser, self._validation = checks, parser, validation
        self._content = _ContentState(checks.content, validation) if checks.content else None
        self._count = 0  # tokens
        self._settled_count = 0  # tokens whose text is in parts, or in none for certain
        self._call_start = self._call_end = 0  # tokens of the last calls, which end together
        self._has_calls = False
        self._text_start = -1  # token with which the last content begins
        self.sound_count = 0

    def copy(self) -> "_AnswerState":
        made = copy(self)
        made._parser, made._content = self._parser.copy(), self._content and self._content.copy()
        return made

    def add(self, token: int, ends: bool) -> Violation | None:
        self._count += 1
        for part in self._parser.finish() if ends else self._parser.add(token):
            if violation := self._add_part(part):
                return violation
        if ends:
            self._settled_count = self._count
            if violation := self._end():
                return violation
        held = self._content.held_token if self._content and not ends else -1
        self.sound_count = min(held, self._settled_count) if held >= 0 else self._settled_count
        return None

    def _add_part(self, part: Part) -> Violation | None:
        violation = None
        if isinstance(part, ToolCall):
            violation = self._add_call(part)
        elif isinstance(part, Text):
            violation = self._add_text(part)
        if isinstance(part, Text | Reasoning):
            is_placed = part.offset >= 0
            self._settle(self._parser.find_token(part.offset + len(part.text)) if is_placed else self._count)
        return violation

    def _settle(self, count: int) -> None:
        self._settled_count = max(self._settled_count, min(count, self._count))

    def _add_text(self, text: Text) -> Violation | None:
        start = text.start if text.start >= 0 else self._settled_count
        if text.text.strip():
            self._text_start = start
            if self._checks.requires_call and not self._checks.may_comment:
                return Violation(start, _MISSING_CALL)
        if self._content is None:
            return None

        def find_token(position: int) -> int:
            return self._parser.find_token(text.offset + position) if text.offset >= 0 else start

        return self._content.add(text.text, find_token)

    def _add_call(self, call: ToolCall) -> Violation | None:
        self._has_calls = True
        if call.end > self._call_end:
            self._call_start, self._call_end = self._settled_count, call.end
        self._settle(call.end)
        tool = self._checks.tools.get(call.name)
        if tool is None:
            return None
        problem = self._validation.find_problem(tool.validator, call.arguments, [""])
        # What is incomplete has been closed, and what closes a call is no part of the arguments.
        return Violation(self._call_start, _format_reason(f"{call.name}: ", problem)) if problem else None

    def _end(self) -> Violation | None:
        if self._checks.requires_call and not self._has_calls:
            return Violation(max(self._text_start, 0), _MISSING_CALL)
        return None if self._content is None or self._has_calls else self._content.end(self._count)


# ---- content


@dataclass(slots=True)
class _OpenValue:
    """A value of the content that is not complete."""

    place: Place
    start: int  # offset in the content
    token: int  # the answer's, with which it begins
    step: str | int  # of the present property, or of the present item
    names: set[str] | None = None  # of an object that is checked
    comma_token: int = 0  # with the last comma

    def copy(self) -> "_OpenValue":
        made = copy(self)
        made.names = None if self.names is None else self.names.copy()
        return made


class _ContentState:
    """State of the content's check after some tokens."""

    def __init__(self, check: ContentCheck, validation: "_Validation") -> None:
        self._check, self._validation = check, validation
        self._reader = JsonReader()
        self._open: list[_OpenValue] = []
        self._text = io.StringIO()  # shared by all copies, each of which writes at its own end
        self._length = 0
        self._start = -1  # token with which the value begins
        self._is_complete = False
        self.held_token = -1  # with which the outermost open value begins that a check concerns; -1 for none
        self._held_depth = 0  # of that value

    def copy(self) -> "_ContentState":
        made = copy(self)
        made._reader, made._open = self._reader.copy(), [value.copy() for value in self._open]
        return made

    def add(self, text: str, find_token: Callable[[int], int]) -> Violation | None:
        """Add text; `find_token` tells the token of a position in it."""
        if self._is_complete:
            return None
        self._text.seek(self._length)
        self._text.write(text)
        events = self._reader.feed(text)
        base, self._length = self._length, self._length + len(text)
        for event in events:
            token = find_token(event.offset - base) if event.kind in ("begin", "comma") else -1
            if violation := self._take_event(event, token):
                return violation
        return None

    def end(self, token: int) -> Violation | None:
        """End the content before this token; validates the whole where the reader did not get through it."""
        is_cut = not self._reader.is_over
        for event in self._reader.finish():
            if violation := self._take_event(event, token):
                return violation
        if self._is_complete or self._check.places.root is NO_PLACE:
            return None
        problem = self._validate(0, self._length, [""])
        return Violation(max(self._start, 0), _format_reason("", problem), is_cut) if problem else None

    def _take_event(self, event: JsonEvent, token: int) -> Violation | None:
        value = self._open[-1] if self._open else None
        try:
            if event.kind == "begin":
                self._begin_value(event, token)
            elif event.kind == "end":
                return self._end_value(event.offset)
            elif value and event.kind == "comma":
                value.comma_token = token
                value.step = value.step if isinstance(value.step, str) else value.step + 1
            elif value:
                return self._begin_property(value, event.text)
        except CheckTooCostlyError as error:
            return Violation(token, _format_reason(self._format_pointer(), _Problem(str(error))))
        return None

    def _begin_value(self, event: JsonEvent, token: int) -> None:
        places = self._check.places
        place = places.find_child(self._open[-1].place, self._open[-1].step) if self._open else places.root
        names = set[str]() if event.text == "{" and place.is_checked else None
        self._open.append(_OpenValue(place, event.offset, token, 0 if event.text == "[" else "", names))
        if place.is_checked and self.held_token < 0:
            self.held_token, self._held_depth = token, len(self._open)
        self._start = token if self._start < 0 else self._start

    def _begin_property(self, value: _OpenValue, name: str) -> Violation | None:
        value.step = name
        if value.names is not None:
            if name in value.names:
                problem = _Problem(f"repeats the key {json.dumps(name, ensure_ascii=False)}")
                return Violation(value.comma_token, _format_reason(self._format_pointer(), problem))
            value.names.add(name)
        return None

    def _end_value(self, end: int) -> Violation | None:
        value = self._open[-1]
        if value.place.is_checked and (problem := self._validate(value.start, end, value.place.pointers)):
            return Violation(value.token, _format_reason(self._format_pointer(), problem), problem.is_incomplete)
        if len(self._open) == self._held_depth:
            self.held_token, self._held_depth = -1, 0
        self._open.pop()
        self._is_complete = not self._open
        return None

    def _validate(self, start: int, end: int, pointers: Iterable[str]) -> "_Problem | None":
        self._text.seek(start)
        return self._validation.find_problem(self._check.validator, self._text.read(end - start), pointers)

    def _format_pointer(self) -> str:
        """JSON pointer of the innermost open value."""
        return "".join(f"/{escape_step(value.step)}" for value in self._open[:-1])


@dataclass(frozen=True)
class _Problem:
    """Why a value can't be shown to be valid."""

    reason: str
    path: str = ""  # JSON pointer within the value
    is_incomplete: bool = False


class _Validation:
    """Validation of one answer's values, within the time that a token may take."""

    def __init__(self) -> None:
        self.is_off = False  # while tokens are added again that are known to be valid
        self._start_s = 0.0  # of the thread, before the first value that ends with the token; 0 for none

    def begin_token(self) -> None:
        self._start_s = 0.0

    def find_problem(self, validator: SchemaValidator, text: str, pointers: Iterable[str]) -> _Problem | None:
        """Find a problem of a JSON value under the subschemas at `pointers`; first one that more of it can't mend."""
        if self.is_off:
            return None
        self._start_s = self._start_s or time.thread_time()
        try:
            value, end = parse_strict_json(text)
        except ToolCallParseError as parse_error:
            return _Problem(f"can't be read: {parse_error}")
        if text[end:].strip():
            return _Problem("is followed by more text")
        incomplete: _Problem | None = None
        for pointer in pointers:
            problem = self._find_problem_under(validator, value, pointer)
            if problem and not problem.is_incomplete:
                return problem
            incomplete = incomplete or problem
        return incomplete

    def _find_problem_under(self, validator: SchemaValidator, value: object, pointer: str) -> _Problem | None:
        if time.thread_time() - self._start_s > VALIDATION_TIME_MAX_S:
            return _Problem("the values that end here take too long to check")
        try:
            error = validator.find_error(value, pointer)
        except CheckTooCostlyError as costly_error:
            return _Problem(str(costly_error))
        return _Problem(error.message, error.path, error.is_incomplete) if error else None


def _format_reason(place: str, problem: _Problem) -> str:
    """One line for people: where, and what."""
    path = place + problem.path
    if len(path) > PATH_CHARS_MAX:
        path = f"{path[: PATH_CHARS_MAX // 2]}...{path[-PATH_CHARS_MAX // 2 :]}"
    line = f"{path}: {problem.reason}" if path else problem.reason
    return replace_halves(" ".join(line.split()))[:REASON_CHARS_MAX]
