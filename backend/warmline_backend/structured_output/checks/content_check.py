"""Check of content that is JSON: each value that a check concerns is validated once it is complete."""

import io
import json
from collections.abc import Callable, Collection, Iterable
from copy import copy
from dataclasses import dataclass

from warmline_backend.request.schemas import Schema
from warmline_backend.structured_output.checks.json_reader import JsonEvent, JsonReader
from warmline_backend.structured_output.checks.places import NO_PLACE, CheckPlaces, Place
from warmline_backend.structured_output.checks.value_validation import (
    Problem,
    ValueValidation,
    Violation,
    format_reason,
)
from warmline_backend.structured_output.json_schema.keywords import escape_step
from warmline_backend.structured_output.json_schema.patterns import CheckTooCostlyError, compile_check
from warmline_backend.structured_output.json_schema.validator import SchemaValidator

NUMBER_STARTS = "-0123456789"
SHORT_NUMBER_CHARS = 3  # no number is out of range with so few


class ContentCheck:
    """Checks of content that is JSON.  Immutable; any thread.

    `checks` are pointers to the subschemas of a normalized schema that have a keyword to be checked.
    """

    def __init__(self, schema: Schema, checks: Collection[str]) -> None:
        """Raises PatternError, and LookupError for a reference without a target."""
        self.validator = SchemaValidator(schema)
        self.places = CheckPlaces(schema, checks, compile_check)

    @property
    def has_checks(self) -> bool:
        """False where numbers alone are looked at."""
        return self.places.root is not NO_PLACE


@dataclass(slots=True)
class _OpenValue:
    """A value of the content that is not complete."""

    place: Place
    start: int  # offset in the content
    token: int  # the answer's, with which it begins
    step: str | int  # of the present property, or of the present item
    known: set[object] | None = None  # names of an object that is checked, or keys of items that have to differ
    comma_token: int = 0  # with the last comma
    is_number: bool = False

    def copy(self) -> "_OpenValue":
        made = copy(self)
        made.known = None if self.known is None else self.known.copy()
        return made


class ContentState:
    """State of the content's check after some tokens."""

    def __init__(self, check: ContentCheck, validation: ValueValidation) -> None:
        self._check, self._validation = check, validation
        self._reader = JsonReader()
        self._open: list[_OpenValue] = []
        self._text = io.StringIO()  # shared by all copies, each of which writes at its own end
        self._length = 0
        self._start = -1  # token with which the value begins
        self._is_complete = False
        self.held_token = -1  # with which the outermost open value begins that a check concerns; -1 for none
        self._held_depth = 0  # of that value

    def copy(self) -> "ContentState":
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
        return Violation(max(self._start, 0), format_reason("", problem), is_cut) if problem else None

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
            return Violation(token, format_reason(self._format_pointer(), Problem(str(error))), is_final=True)
        return None

    def _begin_value(self, event: JsonEvent, token: int) -> None:
        places = self._check.places
        place = places.find_child(self._open[-1].place, self._open[-1].step) if self._open else places.root
        is_known = place.is_checked if event.text == "{" else place.has_unique_items and event.text == "["
        is_number = event.text in NUMBER_STARTS
        step: str | int = 0 if event.text == "[" else ""
        self._open.append(_OpenValue(place, event.offset, token, step, set() if is_known else None, 0, is_number))
        if (place.is_checked or is_number) and self.held_token < 0:
            self.held_token, self._held_depth = token, len(self._open)
        self._start = token if self._start < 0 else self._start

    def _begin_property(self, value: _OpenValue, name: str) -> Violation | None:
        value.step = name
        if value.known is not None:
            if name in value.known:
                problem = Problem(f"repeats the key {json.dumps(name, ensure_ascii=False)}")
                return Violation(value.comma_token, format_reason(self._format_pointer(), problem))
            value.known.add(name)
        return None

    def _end_value(self, end: int) -> Violation | None:
        value = self._open[-1]
        problem = None
        if value.is_number and end - value.start > SHORT_NUMBER_CHARS:
            problem = self._validate(value.start, end, [])  # 1e999 is no number that a reader knows
        if not problem and value.place.is_checked:
            problem = self._validate(value.start, end, value.place.pointers)
        if not problem and len(self._open) > 1:
            problem = self._add_item(self._open[-2], value.start, end)
        if problem:
            reason = format_reason(self._format_pointer(), problem)
            return Violation(value.token, reason, problem.is_incomplete, problem.is_final)
        if len(self._open) == self._held_depth:
            self.held_token, self._held_depth = -1, 0
        self._open.pop()
        self._is_complete = not self._open
        return None

    def _add_item(self, array: _OpenValue, start: int, end: int) -> Problem | None:
        """Add an item to those of its array that have to differ: a repeated one is found before the array's end."""
        if array.known is None or isinstance(array.step, str):
            return None
        try:
            key = self._validation.make_key(self._read(start, end))
        except CheckTooCostlyError as error:
            return Problem(str(error), is_final=True)
        if key in array.known:
            return Problem("is equal to an earlier item (uniqueItems)")
        array.known.add(key)
        return None

    def _read(self, start: int, end: int) -> str:
        self._text.seek(start)
        return self._text.read(end - start)

    def _validate(self, start: int, end: int, pointers: Iterable[str]) -> Problem | None:
        return self._validation.find_problem(self._check.validator, self._read(start, end), pointers)

    def _format_pointer(self) -> str:
        """JSON pointer of the innermost open value."""
        return "".join(f"/{escape_step(value.step)}" for value in self._open[:-1])
