"""Validation of complete values: the jsonschema package, with a bound on its work.  Any thread.

Keywords that compare values, search with expressions or resolve references are our own (`validation.keywords`): exact
for all numbers, and they never leave the schema.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator, ValidationError, validators

from warmline_backend.request.schemas import Schema
from warmline_backend.structured_output.json_schema.keywords import escape_step
from warmline_backend.structured_output.json_schema.patterns import CheckTooCostlyError
from warmline_backend.structured_output.json_schema.validation.keywords import KEYWORDS, NAMING_KEYWORDS
from warmline_backend.structured_output.json_schema.validation.reduced_schemas import (
    KINDS,
    ReducedSchemas,
)
from warmline_backend.structured_output.json_schema.validation.values import (
    convert_value,
    count_parts,
    is_integer,
    is_number,
)

# Of some microseconds each.  A large value may take longer, since it took longer to write.
STEPS_MIN, STEPS_PER_PART, STEPS_MAX = 10_000, 40, 50_000
ERROR_STEPS = 4
STEP_SIZE = 8  # items or properties that are looked at in one step
SEARCH_CHARS_OF_STEP = 256
SEARCH_TIME_MAX_S = 0.05  # of the thread, for all patterns of a call
SEARCH_STEP_S = 1e-5  # of the thread: a longer search costs further steps

_SIZED = (list, dict)
_VALIDATES_EACH = {"contains", "oneOf"}  # which cost a step for each, whatever the subschema
# Errors that more properties, items or characters may mend.
_INCOMPLETE = {"required", "minProperties", "minItems", "minLength", "contains", "minContains", "dependentRequired"}
_MESSAGES = {
    "additionalProperties": "is no allowed property",
    "anyOf": "is valid under none of the branches",
    "const": "is not the required value",
    "contains": "has too few of the required items",
    "enum": "is none of the listed values",
    "exclusiveMaximum": "is too large",
    "exclusiveMinimum": "is too small",
    "false": "is not allowed",
    "items": "is one item too many",
    "maxContains": "has too many items of one kind",
    "maxItems": "has too many items",
    "maxLength": "is too long",
    "maxProperties": "has too many properties",
    "maximum": "is too large",
    "minContains": "has too few items of one kind",
    "minItems": "has too few items",
    "minLength": "is too short",
    "minProperties": "has too few properties",
    "minimum": "is too small",
    "multipleOf": "is no multiple of the required number",
    "not": "is valid under an excluded schema",
    "oneOf": "is not valid under exactly one of the branches",
    "pattern": "does not match the pattern",
    "type": "has the wrong type",
    "unevaluatedItems": "is no allowed item",
    "unevaluatedProperties": "is no allowed property",
    "uniqueItems": "has equal items",
}


@dataclass(frozen=True)
class SchemaError:
    """Reason why a value is invalid."""

    path: str  # JSON pointer of the invalid part within the value, "" for the whole
    keyword: str  # of the schema; "false" for a schema that allows nothing
    message: str  # one line, without the value
    is_incomplete: bool  # more of the value may mend it


class StepBudget:
    """Steps, of some microseconds each, that several calls of `find_error` may take together.

    The caller owns it, and may add to `left`; each call deducts what it takes.  Used by one thread at a time.
    """

    def __init__(self, left: int) -> None:
        self.left = left  # none are where this is 0 or below


class SchemaValidator:
    """Validator of values under subschemas of one schema of draft 2020-12, with references "#..." only.  Any thread.

    Values are as `json.loads` reads them; with `parse_float=Decimal` numbers are exact beyond a float's precision.
    """

    def __init__(self, schema: Schema) -> None:
        """Raises PatternError, and LookupError for a reference without a target."""
        self._schemas = ReducedSchemas(schema)

    def find_error(self, value: object, pointer: str = "", budget: StepBudget | None = None) -> SchemaError | None:
        """Find an error of `value` under the subschema at a JSON pointer; None for a valid value.

        Errors that more of the value can't mend come first.  Raises CheckTooCostlyError at the call's own bound, or
        where `budget` is used up; and LookupError for a pointer to no subschema.
        """
        schema = self._schemas.get_part(pointer)
        try:
            count = count_parts(value)
            steps = min(STEPS_MIN + STEPS_PER_PART * count, STEPS_MAX)
            evaluation = _Evaluation(self._schemas, steps, budget or StepBudget(STEPS_MAX))
            evaluation.spend(1 + count // STEP_SIZE)
            validator = _Validator(schema, format_checker=evaluation)
            return _choose(map(_describe, validator.iter_errors(convert_value(value))))
        except RecursionError as error:
            raise CheckTooCostlyError("the value or the schema nests too deep to be checked") from error


class _Evaluation:
    """State of one call: jsonschema's format checker, which is handed on to the validators of all subschemas."""

    def __init__(self, schemas: ReducedSchemas, steps: int, budget: StepBudget) -> None:
        self.schemas = schemas
        self._steps_left, self._budget = steps, budget
        self._search_time_left_s = SEARCH_TIME_MAX_S
        self._matches: dict[tuple[str, str], bool] = {}

    def spend(self, steps: int) -> None:
        """Count work.  Raises CheckTooCostlyError at the bound."""
        self._steps_left -= steps
        self._budget.left -= steps
        if self._steps_left < 0:
            raise CheckTooCostlyError("the value takes too long to check")
        if self._budget.left < 0:
            raise CheckTooCostlyError("the values take too long to check")

    def matches(self, pattern: str, text: str) -> bool:
        """True where the expression matches, searched once.  Raises CheckTooCostlyError."""
        if (result := self._matches.get((pattern, text))) is None:
            self.spend(1 + len(text) // SEARCH_CHARS_OF_STEP)
            start_s = time.thread_time()
            result = self._matches[pattern, text] = self.schemas.patterns[pattern](text)
            time_s = time.thread_time() - start_s
            self._search_time_left_s -= time_s
            if self._search_time_left_s < 0:
                raise CheckTooCostlyError("patterns take too long to check")
            self.spend(int(time_s / SEARCH_STEP_S))
        return result


def _count(name: str, evaluate: Callable[..., Any]) -> Callable[..., Iterator[ValidationError]]:
    """Count the work of a keyword before it is evaluated, and that of its errors."""
    unit = 1 if name in _VALIDATES_EACH else STEP_SIZE

    def evaluate_counted(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        size = len(value) if isinstance(value, _SIZED) else 0
        if isinstance(instance, _SIZED):
            size += len(instance)
        spend = validator.format_checker.spend
        spend(1 + size // unit)
        for error in evaluate(validator, value, instance, schema) or ():
            spend(ERROR_STEPS)
            yield error

    return evaluate_counted


_TYPES = Draft202012Validator.TYPE_CHECKER.redefine_many(
    {"number": lambda _, value: is_number(value), "integer": lambda _, value: is_integer(value)}
)
# Without a meta schema jsonschema takes no identifiers into account, and resolves nothing itself.
_Validator: Any = validators.create(
    meta_schema={},
    validators={
        name: _count(name, evaluate)
        for name, evaluate in {**Draft202012Validator.VALIDATORS, **KEYWORDS}.items()
        if name in KINDS
    },
    type_checker=_TYPES,
    id_of=lambda _: "",
)


def _choose(errors: Iterator[SchemaError]) -> SchemaError | None:
    incomplete = None
    for error in errors:
        if not error.is_incomplete:
            return error
        incomplete = incomplete or error
    return incomplete


def _describe(error: ValidationError) -> SchemaError:
    keyword = str(error.validator or "false")
    path = "".join("/" + escape_step(step) for step in error.absolute_path)
    message = error.message if keyword in NAMING_KEYWORDS else _MESSAGES.get(keyword, "is invalid")
    return SchemaError(path, keyword, f"{message} ({keyword})", not path and _is_incomplete(error))


def _is_incomplete(error: ValidationError) -> bool:
    """True where more of the value may mend it; for branches: where that holds for all errors of one of them."""
    if not error.context:
        return error.validator in _INCOMPLETE
    branches: dict[object, bool] = {}
    for inner in error.context:
        if not inner.relative_schema_path:  # of a branch that allows nothing
            continue
        branch = inner.relative_schema_path[0]
        branches[branch] = branches.get(branch, True) and not inner.relative_path and _is_incomplete(inner)
    return any(branches.values())
