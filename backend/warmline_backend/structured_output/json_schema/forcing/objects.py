"""Keywords of objects in the forced schema.  Pure."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from warmline_backend.request.schemas import Schema, list_required_names, list_values
from warmline_backend.structured_output.json_schema.forcing import unions
from warmline_backend.structured_output.json_schema.forcing.combining import all_of
from warmline_backend.structured_output.json_schema.formats import force_format
from warmline_backend.structured_output.json_schema.keywords import escape_step
from warmline_backend.structured_output.json_schema.patterns import CheckTooCostlyError, compile_check, force_pattern

if TYPE_CHECKING:
    from warmline_backend.structured_output.json_schema.forcing.force import ForcedParts, SchemaForcer

CHOICES_MAX = 24  # branches that a count of properties becomes
PATTERNS_MAX = 32  # of names, of which llguidance compares each two
DEPENDENCIES_MAX = 5  # each doubles the branches
_NO_OBJECT = {"type": ["array", "boolean", "null", "number", "string"]}
_ESCAPED_CHARS = re.compile(r'["\\\x00-\x1f\x7f]')
_ANY_NAME_PATTERNS = {"", ".*", "^.*$", "^.*", ".*$", "^", "$", r"[\s\S]*", r"^[\s\S]*$"}


@dataclass
class _Keys:
    """Keys of an object: the schemas of listed ones, of those that match a pattern, and of the others."""

    properties: dict[str, Any]
    patterns: dict[str, Any]
    others: Any
    required: list[str] = field(default_factory=list)

    @property
    def is_closed(self) -> bool:
        return self.others is False and not self.patterns

    @property
    def possible(self) -> list[str]:
        return [name for name, part in self.properties.items() if part is not False]


def force_object(forcer: "SchemaForcer", schema: Schema, pointer: str, built: "ForcedParts", level: int) -> None:
    keys = _Keys(
        {
            name: forcer.force(part, f"{pointer}/properties/{escape_step(name)}")
            for name, part in schema.get("properties", {}).items()
        },
        {
            name: forcer.force(part, f"{pointer}/patternProperties/{escape_step(name)}")
            for name, part in schema.get("patternProperties", {}).items()
        },
        forcer.force(schema.get("additionalProperties", True), f"{pointer}/additionalProperties"),
        list(dict.fromkeys(list_required_names(schema))),
    )
    _merge_patterns_of_any_name(keys)
    if not _force_patterns(keys) or (level and keys.patterns) or len(keys.patterns) > PATTERNS_MAX:
        forcer.checks.add(pointer)
        keys.patterns, keys.others = {}, True
    if "propertyNames" in schema and not _force_names(forcer, forcer.resolve(schema["propertyNames"]), keys):
        forcer.checks.add(pointer)
    if keys.others is not False and any(map(_ESCAPED_CHARS.search, keys.properties)):
        forcer.checks.add(pointer)  # another spelling of the name is taken for another name
    _force_dependencies(forcer, schema, pointer, keys, built)
    _force_counts(forcer, schema, pointer, keys, built)
    if "unevaluatedProperties" in schema and "additionalProperties" not in schema:
        _force_unevaluated(forcer, schema, pointer, built)
    made = built.made
    if keys.properties:
        made["properties"] = keys.properties
    if keys.patterns:
        made["patternProperties"] = keys.patterns
    if keys.others not in (True, {}):
        made["additionalProperties"] = keys.others
    if keys.required:
        made["required"] = keys.required


# ---- patterns and names


def _merge_patterns_of_any_name(keys: _Keys) -> None:
    """Apply patterns that every name matches to all keys."""
    for pattern in [pattern for pattern in keys.patterns if pattern in _ANY_NAME_PATTERNS]:
        part = keys.patterns.pop(pattern)
        keys.properties = {name: all_of([own, part]) for name, own in keys.properties.items()}
        keys.patterns = {name: all_of([own, part]) for name, own in keys.patterns.items()}
        keys.others = part  # no key is left to additionalProperties


def _force_patterns(keys: _Keys) -> bool:
    """Write the patterns as llguidance reads them; False where one has no exact form."""
    written: dict[str, Any] = {}
    for pattern, part in keys.patterns.items():
        forced = force_pattern(pattern)
        if not forced.is_exact or len(forced.patterns) != 1 or forced.patterns[0] in written:
            return False
        written[forced.patterns[0]] = part
    keys.patterns = written
    return True


def _force_names(forcer: "SchemaForcer", names: Any, keys: _Keys) -> bool:
    """Apply `propertyNames`; False where a check has to."""
    if isinstance(names, bool):
        if not names:
            keys.properties, keys.patterns, keys.others = dict.fromkeys(keys.properties, False), {}, False
        return True
    names = {key: value for key, value in names.items() if (key, value) != ("type", "string")}
    values = list_values(names)
    if values is not None and not names.keys() - {"enum", "const"}:
        return _allow_names(keys, [value for value in values if isinstance(value, str)])
    excluded = names["not"] if names.keys() == {"not"} else {}
    if isinstance(excluded, Mapping) and excluded and excluded.keys() <= {"enum", "const"}:
        keys.properties |= {name: False for name in list_values(excluded) or () if isinstance(name, str)}
        return True
    return _allow_matching_names(names, keys)


def _allow_names(keys: _Keys, names: Sequence[str]) -> bool:
    """Allow these names alone."""
    if keys.patterns:
        return False
    given = {name: part if name in names else False for name, part in keys.properties.items()}
    keys.properties = given | {name: keys.others for name in names if name not in given}
    keys.others = False
    return True


def _allow_matching_names(names: Schema, keys: _Keys) -> bool:
    """Allow names of one pattern."""
    pattern = _build_name_pattern(names)
    if pattern is None or keys.patterns:
        return not names
    matches = compile_check(pattern)
    try:
        keys.properties = {name: part if matches(name) else False for name, part in keys.properties.items()}
    except CheckTooCostlyError:
        return False
    if keys.others is False:
        return True
    if keys.properties:  # a pattern would apply to them, too
        return False
    keys.patterns, keys.others = {pattern: keys.others}, False
    return True


def _build_name_pattern(names: Schema) -> str | None:
    """Pattern, exact, of the names that a schema of `pattern`, `format` or lengths allows."""
    if not names or names.keys() - {"pattern", "format", "minLength", "maxLength"}:
        return None
    if names.keys() <= {"minLength", "maxLength"}:
        most = int(names["maxLength"]) if "maxLength" in names else ""
        return f"^(?s:.){{{int(names.get('minLength', 0))},{most}}}$"
    if len(names) > 1:
        return None
    forced = force_pattern(names["pattern"]) if "pattern" in names else force_format(names["format"])
    if forced is None or not forced.is_exact or len(forced.patterns) != 1:
        return None
    return forced.patterns[0]


# ---- dependencies


def _force_dependencies(
    forcer: "SchemaForcer", schema: Schema, pointer: str, keys: _Keys, built: "ForcedParts"
) -> None:
    branches: list[Any] = []
    for name, names in schema.get("dependentRequired", {}).items():
        if name in keys.required:
            keys.required += [other for other in names if other not in keys.required]
        elif names:
            branches.append({"anyOf": [{"properties": {name: False}}, {"required": [name, *names]}]})
    for name, part in schema.get("dependentSchemas", {}).items():
        forced = forcer.force(part, f"{pointer}/dependentSchemas/{escape_step(name)}")
        if name in keys.required and schema.get("type") == "object":
            built.parts.append(forced)
        elif forced not in (True, {}):
            present = all_of([{"required": [name]}, forced])
            branches.append(
                {"anyOf": [{"properties": {name: False}}, present]} if present else {"properties": {name: False}}
            )
    if len(branches) > DEPENDENCIES_MAX:
        forcer.checks.add(pointer)
    else:
        built.parts += branches


# ---- counts


def _force_counts(forcer: "SchemaForcer", schema: Schema, pointer: str, keys: _Keys, built: "ForcedParts") -> None:
    least, most = int(schema.get("minProperties", 0)), schema.get("maxProperties")
    count = len(keys.required)
    if most is not None and most < count:
        built.parts.append(_NO_OBJECT)
    if keys.is_closed:
        _force_counts_of_listed(forcer, pointer, keys, built, (least, None if most is None else int(most)))
    elif least <= count and most is None:
        return
    elif set(keys.possible) <= set(keys.required):
        limits = {"minProperties": least, "maxProperties": most}
        built.made |= {key: int(value) for key, value in limits.items() if value}
        if most == 0:
            keys.properties, keys.patterns, keys.others = {}, {}, False
        if least > count:  # the grammar counts a key that is written twice as two
            forcer.checks.add(pointer)
    else:
        forcer.checks.add(pointer)


def _force_counts_of_listed(
    forcer: "SchemaForcer", pointer: str, keys: _Keys, built: "ForcedParts", limits: tuple[int, int | None]
) -> None:
    """Force the count of properties of an object that has only listed ones, as a choice of those there or missing."""
    (least, most), possible = limits, keys.possible
    optional = [name for name in possible if name not in keys.required]
    fixed = len(possible) - len(optional)
    if least > len(possible):
        built.parts.append(_NO_OBJECT)
    elif least == len(possible):
        keys.required += optional
    elif least > fixed and not _add_choices(built, optional, least - fixed, lambda names: {"required": names}):
        forcer.checks.add(pointer)
    if most is None or most >= len(possible):
        return
    missing = len(possible) - max(most, fixed)
    if not _add_choices(built, optional, missing, lambda names: {"properties": dict.fromkeys(names, False)}):
        forcer.checks.add(pointer)


def _add_choices(built: "ForcedParts", names: list[str], count: int, make: Any) -> bool:
    if math.comb(len(names), count) > CHOICES_MAX:
        return False
    built.parts.append({"anyOf": [make(list(chosen)) for chosen in itertools.combinations(names, count)]})
    return True


# ---- unevaluated properties


def _force_unevaluated(forcer: "SchemaForcer", schema: Schema, pointer: str, built: "ForcedParts") -> None:
    """Apply `unevaluatedProperties` to all keys but those that any part of the schema may evaluate."""
    forced = forcer.force(schema["unevaluatedProperties"], f"{pointer}/unevaluatedProperties")
    evaluated = _collect_evaluated(forcer, schema)
    if not evaluated.is_certain:
        forcer.checks.add(pointer)
    if evaluated.has_all or forced in (True, {}):
        return
    patterns = [force_pattern(pattern) for pattern in evaluated.patterns]
    if any(not each.is_exact or len(each.patterns) != 1 for each in patterns):
        forcer.checks.add(pointer)
        return
    part: dict[str, Any] = {"properties": {name: {} for name in evaluated.names}, "additionalProperties": forced}
    if patterns:
        part["patternProperties"] = {each.patterns[0]: {} for each in patterns}
    built.parts.append(part)


@dataclass
class _Evaluated:
    """Keys that a schema evaluates."""

    names: dict[str, None] = field(default_factory=dict)
    patterns: list[str] = field(default_factory=list)
    has_all: bool = False
    is_certain: bool = True  # false: only if some branch holds


def _collect_evaluated(forcer: "SchemaForcer", schema: Schema) -> _Evaluated:
    evaluated, seen, waiting = _Evaluated(), set[int](), [schema]
    while waiting:
        part = waiting.pop(0)
        if isinstance(part, bool) or id(part) in seen:
            continue
        seen.add(id(part))
        evaluated.names |= dict.fromkeys(part.get("properties", ()))
        evaluated.patterns += [name for name in part.get("patternProperties", ()) if name not in evaluated.patterns]
        evaluated.has_all |= "additionalProperties" in part or (len(seen) > 1 and "unevaluatedProperties" in part)
        evaluated.is_certain &= not unions.CONDITIONAL_KEYWORDS & part.keys()
        waiting += _iter_in_place(forcer, part)
    return evaluated


def _iter_in_place(forcer: "SchemaForcer", schema: Schema) -> Iterator[Any]:
    """Iterate over subschemas that apply to the same value, if only under a condition."""
    if "$ref" in schema:
        yield forcer.lookup(schema["$ref"])
    for key in ("allOf", "anyOf", "oneOf"):
        yield from schema.get(key, ())
    yield from (schema[key] for key in ("if", "then", "else") if key in schema)
    yield from schema.get("dependentSchemas", {}).values()
