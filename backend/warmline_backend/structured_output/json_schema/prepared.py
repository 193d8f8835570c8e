"""JSON schemas prepared for answers: the part that a grammar forces, and the part that is checked.  Pure."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from warmline_backend.request.params import FieldError
from warmline_backend.request.schemas import Schema, collect_references
from warmline_backend.structured_output.json_schema.bounds import check_size, find_endless
from warmline_backend.structured_output.json_schema.forcing.force import TYPES_ONLY, ForcedParts, SchemaForcer
from warmline_backend.structured_output.json_schema.forcing.unions import COMBINATORS
from warmline_backend.structured_output.json_schema.guidance import UNSATISFIABLE
from warmline_backend.structured_output.json_schema.keywords import (
    JSON_TYPES,
    escape_step,
    format_json,
    iter_subschemas,
)
from warmline_backend.structured_output.json_schema.normalize import NormalizedSchema, format_place, normalize_schema


class Trial(Enum):
    """Kind of a forced schema whose grammar is tried."""

    WHOLE_ANSWER = auto()  # an answer may follow
    PART = auto()
    STRING = auto()  # a part, which is followed further


GrammarTrial = Callable[[Schema, Trial], str]  # -> the problem of a forced schema's grammar, or ""

_ROUNDS_MAX = 16
_TRIALS_MAX = 400  # compilations in search of the costly parts of one schema
_STRINGS_TRIED_MAX = 64  # kinds of strings of one schema that are followed further; others may end an answer
_ALL_TYPES = frozenset(JSON_TYPES)
_IN_PLACE_STEPS = ("/allOf/", "/anyOf/", "/oneOf/")
_NUMBER_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


@dataclass(frozen=True)
class PreparedSchema:
    """A schema in the two forms that an answer needs."""

    forced: Schema  # for llguidance, without its options
    normalized: Schema  # 2020-12 with references "#/$defs/..." only: what an answer is validated against
    checks: frozenset[str]  # pointers into `normalized` of what `forced` leaves out; empty: nothing
    has_free_numbers: bool = False  # numbers of any size may be written, such as 1e999, which is none


def prepare_schema(
    schema: Schema, field: str, strict: bool, find_problem: GrammarTrial, is_part: bool = False
) -> PreparedSchema:
    """Prepare a schema; `is_part`: of an answer that has more than this JSON.

    Raises FieldError for one that is too large, that nothing satisfies, or, if it is strict, that has a part which can
    be neither forced nor checked.
    """
    check_size(schema, field)
    normalized = normalize_schema(schema, field, strict)
    root = normalized.schema if isinstance(normalized.schema, dict) else {} if normalized.schema else {"enum": []}
    preparation = _SchemaPreparation(root, normalized, field, find_problem)
    if (reference := find_endless(root)) is not None:
        place = preparation.describe_place(reference.removeprefix("#"))
        raise FieldError(field, f"can't be satisfied: at {place} it requires itself without end")
    try:
        return preparation.prepare(Trial.PART if is_part else Trial.WHOLE_ANSWER)
    except RecursionError as error:
        raise FieldError(field, "is too deep for answers to be held to it; send a smaller schema") from error


class _SchemaPreparation:
    def __init__(self, root: Schema, normalized: NormalizedSchema, field: str, find_problem: GrammarTrial) -> None:
        self._root, self._normalized, self._field, self._find_problem = root, normalized, field, find_problem
        self._relaxed: dict[str, int] = {}  # levels by pointer
        self._unsatisfiable: frozenset[str] = frozenset()  # references
        self._problems: dict[str, str] = {}  # by a part of the forced schema
        self._trials_left, self._strings_left = _TRIALS_MAX, _STRINGS_TRIED_MAX

    def prepare(self, trial: Trial) -> PreparedSchema:
        """Force as much as llguidance can take: what is too costly is relaxed, round by round."""
        requires_tags = True
        for _ in range(_ROUNDS_MAX):
            forcer = SchemaForcer(self._root, self._relaxed, self._unsatisfiable, requires_tags)
            forced = forcer.force_root()
            if costly := self._find_costly_strings(forcer):
                self._relax(costly)
                continue
            if not (problem := self._find_problem(forced, trial)):
                return PreparedSchema(forced, self._root, frozenset(forcer.checks), _has_free_numbers(forced))
            if problem.startswith(UNSATISFIABLE):
                if found := self._find_unsatisfiable_references(problem):
                    self._unsatisfiable |= found
                    continue
                if requires_tags:
                    requires_tags = False
                    continue
                pointer, schema = self._find_unsatisfiable(forcer)
                fault = f"can't be satisfied: at {self.describe_place(pointer)} {_describe_conflict(schema)}"
                raise FieldError(self._field, fault)
            if not (costly := self._find_costly(forcer)):
                break
            self._relax(costly)
        raise FieldError(self._field, "is too large for answers to be held to it; send a smaller schema")

    def _relax(self, pointers: list[str]) -> None:
        self._relaxed |= {pointer: self._relaxed.get(pointer, 0) + 1 for pointer in pointers}

    # ---- the search for what is too costly

    def _find_costly_strings(self, forcer: SchemaForcer) -> list[str]:
        """Strings whose own grammar has a problem, followed for some tokens: some limits are met only then."""
        return [
            pointer
            for pointer, schema in self._iter_subschemas()
            if self._relaxed.get(pointer, 0) < TYPES_ONLY
            and {"pattern", "format"} & schema.keys()
            and self._is_costly_string(_force_string(forcer, schema, pointer))
        ]

    def _is_costly_string(self, forced: Any) -> bool:
        if repr(forced) not in self._problems:
            if not self._strings_left:
                return False
            self._strings_left -= 1
        return self._is_costly(forced, Trial.STRING)

    def _find_costly(self, forcer: SchemaForcer) -> list[str]:
        """The innermost subschemas that have a problem with all references left out; else references with siblings."""
        costly: list[str] = []
        waiting: list[tuple[str, Any]] = [("", {key: value for key, value in self._root.items() if key != "$defs"})]
        waiting += [(f"/$defs/{escape_step(name)}", part) for name, part in self._root.get("$defs", {}).items()]
        while waiting and self._trials_left:
            pointer, schema = waiting.pop()
            if isinstance(schema, bool) or not self._is_costly(_drop_references(forcer.force(schema, pointer))):
                continue
            inner = [(pointer + step, part) for step, part in iter_subschemas(schema) if isinstance(part, Mapping)]
            parts = [(at, part) for at, part in inner if self._is_costly(_drop_references(forcer.force(part, at)))]
            waiting += parts
            if not parts and self._relaxed.get(pointer, 0) < TYPES_ONLY:
                costly.append(pointer)
        return costly or self._find_costly_references(forcer)

    def _find_unsatisfiable_references(self, problem: str) -> frozenset[str]:
        """References to definitions that allow no value; llguidance takes one for a fault even where it is optional."""
        forcer = SchemaForcer(self._root, self._relaxed, self._unsatisfiable, requires_tags=False)
        definitions = {f"#/$defs/{escape_step(name)}": part for name, part in forcer.force_definitions().items()}
        named = problem.rpartition(" at ")[2]
        if self._is_unsatisfiable(definitions.get(named, {})):
            return frozenset([named])
        return frozenset(name for name, part in definitions.items() if self._is_unsatisfiable(part))

    def _find_unsatisfiable(self, forcer: SchemaForcer) -> tuple[str, Schema]:
        """The innermost part that all valid values need and that allows none, with its pointer; the root in doubt."""
        pointer, schema = "", self._root
        while True:
            required = schema.get("required", ())
            needed = [
                (pointer + step, part)
                for step, part in iter_subschemas(schema)
                if step.startswith(("/allOf/", "/properties/")) and isinstance(part, Mapping)
                if step.startswith("/allOf/") or step.split("/")[2] in required
            ]
            parts = (each for each in needed if self._is_unsatisfiable(forcer.force(each[1], each[0])))
            if (found := next(parts, None)) is None:
                return pointer, schema
            pointer, schema = found

    def _is_unsatisfiable(self, forced: Any) -> bool:
        return forced is False or self._try(_drop_references(forced)).startswith(UNSATISFIABLE)

    def _find_costly_references(self, forcer: SchemaForcer) -> list[str]:
        """The subschema that combines references and has a problem with them in place; the least of several."""
        definitions = forcer.force_definitions()
        costly = []
        for pointer, schema in self._iter_subschemas():
            if (
                COMBINATORS & schema.keys()
                and len(schema) > 1
                and self._relaxed.get(pointer, 0) < TYPES_ONLY
                and collect_references(schema)
            ):
                forced = _add_definitions(forcer.force(schema, pointer), definitions)
                if self._is_costly(forced):
                    costly.append((len(repr(forced)), pointer))
        return [min(costly)[1]] if costly else []

    def _is_costly(self, forced: Any, trial: Trial = Trial.PART) -> bool:
        problem = self._try(forced, trial)
        return bool(problem) and not problem.startswith(UNSATISFIABLE)

    def _try(self, forced: Any, trial: Trial = Trial.PART) -> str:
        """Problem of a part's grammar; "" once there were too many trials."""
        if not isinstance(forced, dict):
            return ""
        key = repr(forced)
        if key not in self._problems:
            if not self._trials_left:
                return ""
            self._trials_left -= 1
            self._problems[key] = self._find_problem(forced, trial)
        return self._problems[key]

    def _iter_subschemas(self) -> Iterator[tuple[str, Schema]]:
        """Iterate over all subschemas that are objects, with their pointers."""
        waiting: list[tuple[str, Any]] = [("", self._root)]
        while waiting:
            pointer, schema = waiting.pop()
            if isinstance(schema, Mapping):
                yield pointer, schema
                waiting.extend((pointer + step, part) for step, part in iter_subschemas(schema))

    def describe_place(self, pointer: str) -> str:
        """Place of a subschema in the schema as it was sent."""
        for name, origin in self._normalized.origins.items():
            prefix = f"/$defs/{escape_step(name)}"
            if pointer == prefix or pointer.startswith(f"{prefix}/"):
                return format_place(origin + pointer.removeprefix(prefix))
        return format_place(pointer)


_CONFLICT_KEYWORDS_MAX = 6


def _describe_conflict(schema: Schema) -> str:
    """Say why no value is valid under a schema, as far as its own keywords tell."""
    names, required = schema.get("properties", {}), schema.get("required", ())
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    for name in required:
        if names.get(name) is False or (closed and name not in names):
            return f"the property {format_json(name)} is required, and not allowed"
    if "enum" in schema or "const" in schema:
        return "no listed value is valid under its other keywords" if len(schema) > 1 else "no value is listed"
    keywords = [f"'{key}'" for key in schema if key != "$defs"]
    if len(keywords) == 1:
        return f"{keywords[0]} allows no value"
    return f"no value is valid under {', '.join(keywords[:_CONFLICT_KEYWORDS_MAX])} together"


def _force_string(forcer: SchemaForcer, schema: Schema, pointer: str) -> Any:
    """Forced form of the keywords that concern strings."""
    built = ForcedParts({"type": "string"}, [])
    forcer.force_string(schema, pointer, built)
    return built.build()


def _drop_references(forced: Any) -> Any:
    """Copy a forced schema with references that allow anything."""
    if isinstance(forced, list):
        return [_drop_references(part) for part in forced]
    if not isinstance(forced, dict):
        return forced
    return {key: _drop_references(part) for key, part in forced.items() if key != "$ref" or not isinstance(part, str)}


def _add_definitions(forced: Any, definitions: Schema) -> Any:
    """Add the definitions that a forced schema needs."""
    if not isinstance(forced, dict):
        return forced
    needed: dict[str, Any] = {}
    waiting = [forced]
    while waiting:
        for reference in collect_references(waiting.pop()):
            name = reference.removeprefix("#/$defs/")
            if name not in needed:
                needed[name] = definitions[name]
                waiting.append(definitions[name])
    return {**forced, "$defs": needed} if needed else forced


def _has_free_numbers(forced: Any) -> bool:
    """True where a forced schema has a part that allows numbers without bounds; in doubt, true."""
    waiting: list[tuple[Any, frozenset[str]]] = [(forced, _ALL_TYPES)]  # each with the types that its place allows
    while waiting:
        schema, types = waiting.pop()
        if schema is True:
            return True
        if not isinstance(schema, Mapping):
            continue
        if "type" in schema:
            types &= frozenset([schema["type"]] if isinstance(schema["type"], str) else schema["type"])
        if _allows_free_numbers(schema, types):
            return True
        for step, part in iter_subschemas(schema):
            waiting.append((part, types if step.startswith(_IN_PLACE_STEPS) else _ALL_TYPES))
    return False


def _allows_free_numbers(schema: Schema, types: frozenset[str]) -> bool:
    """True where a subschema itself, or an item or property that it does not mention, may be any number."""
    if "enum" in schema or COMBINATORS & schema.keys():  # of those, the parts are looked at
        return False
    return (
        ("number" in types and not _NUMBER_BOUNDS & schema.keys())
        or ("object" in types and "additionalProperties" not in schema)
        or ("array" in types and "items" not in schema)
    )
