"""Validation of an answer's values, within the work that a token and an answer may take.  Engine thread."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from warmline_backend.structured_output.json_schema.patterns import CheckTooCostlyError
from warmline_backend.structured_output.json_schema.validation.values import convert_value, make_key
from warmline_backend.structured_output.json_schema.validator import SchemaValidator, StepBudget
from warmline_backend.tool_parsers.lenient_json import ToolCallParseError, parse_strict_json
from warmline_common.protocol.surrogates import replace_halves

REASON_CHARS_MAX = 300
PATH_CHARS_MAX = 120
VALIDATION_TIME_MAX_S = 0.2  # of the thread, for all values that end with one token
# For all values of an answer: each is bounded, but others' tokens wait for their sum.
ANSWER_STEPS, STEPS_PER_TOKEN, ANSWER_STEPS_MAX = 100_000, 300, 200_000


@dataclass(frozen=True)
class Violation:
    """Fault of an answer."""

    start: int  # answer tokens before the first token of the invalid value
    reason: str  # for people, one line
    is_incomplete: bool = False  # more of the value may mend it
    is_final: bool = False  # no other value would do: it is the schema that is too costly


@dataclass(frozen=True)
class Problem:
    """Why a value can't be shown to be valid."""

    reason: str
    path: str = ""  # JSON pointer within the value
    is_incomplete: bool = False
    is_final: bool = False


class ValueValidation:
    """Validation of one answer's values, within the work that a token and the answer may take."""

    def __init__(self) -> None:
        self.is_off = False  # while tokens are added again that are known to be valid
        self._start_s = 0.0  # of the thread, before the first value that ends with the token; 0 for none
        self._budget = StepBudget(ANSWER_STEPS)

    def begin_token(self) -> None:
        """Begin a token that was drawn; it adds to the steps that are left."""
        self._start_s = 0.0
        self._budget.left = min(self._budget.left + STEPS_PER_TOKEN, ANSWER_STEPS_MAX)

    def make_key(self, text: str) -> object:
        """Make a key that equal JSON values share, and no others.  Raises CheckTooCostlyError."""
        try:
            value = convert_value(parse_strict_json(text)[0])
        except ToolCallParseError as parse_error:
            raise CheckTooCostlyError(f"an item can't be read: {parse_error}") from parse_error
        try:
            return make_key(value, lambda steps: None)
        except RecursionError as error:
            raise CheckTooCostlyError("an item nests too deep to be compared") from error

    def find_problem(self, validator: SchemaValidator, text: str, pointers: Iterable[str]) -> Problem | None:
        """Find a problem of a JSON value under the subschemas at `pointers`; first one that more of it can't mend."""
        if self.is_off:
            return None
        self._start_s = self._start_s or time.thread_time()
        try:
            value, end = parse_strict_json(text)
        except ToolCallParseError as parse_error:
            return Problem(f"can't be read: {parse_error}")
        if text[end:].strip():
            return Problem("is followed by more text")
        incomplete: Problem | None = None
        for pointer in pointers:
            problem = self._find_problem_under(validator, value, pointer)
            if problem and not problem.is_incomplete:
                return problem
            incomplete = incomplete or problem
        return incomplete

    def _find_problem_under(self, validator: SchemaValidator, value: object, pointer: str) -> Problem | None:
        if time.thread_time() - self._start_s > VALIDATION_TIME_MAX_S:
            return Problem("the values that end here take too long to check", is_final=True)
        try:
            error = validator.find_error(value, pointer, self._budget)
        except CheckTooCostlyError as costly_error:
            return Problem(str(costly_error), is_final=True)
        return Problem(error.message, error.path, error.is_incomplete) if error else None


def format_reason(place: str, problem: Problem) -> str:
    """One line for people: where, and what."""
    path = place + problem.path
    if len(path) > PATH_CHARS_MAX:
        path = f"{path[: PATH_CHARS_MAX // 2]}...{path[-PATH_CHARS_MAX // 2 :]}"
    line = f"{path}: {problem.reason}" if path else problem.reason
    return replace_halves(" ".join(line.split()))[:REASON_CHARS_MAX]
