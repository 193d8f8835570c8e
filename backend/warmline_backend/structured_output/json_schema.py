"""JSON schemas made fit for llguidance, which takes most of the language and refuses the rest by name.  Pure.

What changes on the way never changes which JSON is valid: formats that nobody checks are left out, and "oneOf" whose
branches can't both hold becomes "anyOf".
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from warmline_backend.request.json_refs import Schema, place_of, references_in, resolve
from warmline_backend.request.params import BadRequest

SCHEMA_BYTES_MAX = 1 << 18
SCHEMA_NODES_MAX = 10_000
SCHEMA_DEPTH_MAX = 100  # of its JSON; llguidance's own reader ends at 128

# A canonical spacing: what models write most in one line, and nothing to run on with.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_LISTS = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
_SINGLES = frozenset(("items", "additionalProperties", "not", "contains", "propertyNames", "additionalItems"))
_IN_REFERENCES = "#/~%!$&'()*+,;=:@?-._"  # what stands in one as it is; llguidance wants the rest encoded
_ROUNDS_MAX = 50
JSON_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def fitted(schema: Schema, field: str) -> dict[str, Any]:
    """The schema for llguidance.  Raises BadRequest where it is too large, or no JSON can be valid and end."""
    _check_bounds(schema, field)
    if not _ends(schema):
        raise BadRequest(f"'{field}' can't be satisfied: a part of it requires itself without end", field)
    made = _fitted(schema, schema)
    assert isinstance(made, dict)
    return made


def guided(schema: Schema, **options: Any) -> dict[str, Any]:
    """With llguidance's options at its root; with `lenient` it ignores keywords that it does not know."""
    return {**schema, "x-guidance": {**SPACING, **options}}


def _check_bounds(schema: Schema, field: str) -> None:
    waiting: list[tuple[object, int]] = [(schema, 1)]
    nodes = 0
    while waiting:
        value, depth = waiting.pop()
        nodes += 1
        if depth > SCHEMA_DEPTH_MAX:
            raise BadRequest(f"'{field}' nests deeper than {SCHEMA_DEPTH_MAX} levels", field)
        if nodes > SCHEMA_NODES_MAX:
            raise BadRequest(f"'{field}' has more than {SCHEMA_NODES_MAX} parts; it is too large", field)
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        waiting.extend((part, depth + 1) for part in inner)
    if len(json.dumps(schema, ensure_ascii=False)) > SCHEMA_BYTES_MAX:
        raise BadRequest(f"'{field}' is longer than {SCHEMA_BYTES_MAX} characters; it is too large", field)


# ---- rewriting


def _fitted(schema: Any, root: Schema) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("x-guidance", "default", "examples", "example"):
            continue
        if key == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        made[key] = _fitted_under(key, value, root)
    if isinstance(branches := made.get("oneOf"), list) and "anyOf" not in made and _apart(branches, root):
        made["anyOf"] = made.pop("oneOf")
    return made


def _fitted_under(key: str, value: Any, root: Schema) -> Any:
    if key == "$ref" and isinstance(value, str):
        return quote(value, safe=_IN_REFERENCES)
    if key in _MAPS and isinstance(value, Mapping):
        return {name: _fitted(inner, root) for name, inner in value.items()}
    if key in _LISTS and isinstance(value, list):
        return [_fitted(inner, root) for inner in value]
    if key in _SINGLES:
        return [_fitted(inner, root) for inner in value] if isinstance(value, list) else _fitted(value, root)
    return value


def _apart(branches: list[Any], root: Schema) -> bool:
    """Whether no JSON can be valid under two of them: their types differ, or a property that all require does."""
    resolved = [resolve(branch, root) for branch in branches]
    if any(branch is None for branch in resolved):
        return False
    known = [branch for branch in resolved if branch is not None]
    return _disjoint(map(_types, known)) or any(
        _disjoint(_tags(branch, name, root) for branch in known) for name in required_in(known[0] if known else {})
    )


def _disjoint(sets: Iterable[frozenset[str] | None]) -> bool:
    """Looks no further than the first that is not."""
    seen: set[str] = set()
    for values in sets:
        if not values or seen & values:
            return False
        seen |= values
    return True


def _types(schema: Schema) -> frozenset[str] | None:
    """None where any type is valid.  A number may be an integer: "number" counts as both."""
    named = schema.get("type")
    types = [named] if isinstance(named, str) else named
    if not isinstance(types, list) or not all(kind in JSON_TYPES for kind in types):
        return None
    return frozenset(types) | ({"integer"} if "number" in types else frozenset())


def _tags(schema: Schema, name: str, root: Schema) -> frozenset[str] | None:
    """The values that a required property of an object may have, as JSON; None where they are not few."""
    properties = schema.get("properties")
    inner = resolve(properties.get(name), root) if isinstance(properties, Mapping) else None
    if inner is None or name not in required_in(schema) or schema.get("type") != "object":
        return None
    values = [inner["const"]] if "const" in inner else inner.get("enum")
    return frozenset(json.dumps(value, sort_keys=True) for value in values) if isinstance(values, list) else None


def required_in(schema: Schema) -> list[str]:
    """The names that an object must have."""
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


# ---- whether it ends


def _ends(schema: Schema) -> bool:
    """Whether some JSON that ends may be valid.

    A cheap look at what is required for certain: where it can't tell, it says yes.  References that can end are found
    round by round, each built on those before; what is left after the last one only requires itself.
    """
    ending: set[str] = set()
    waiting = {reference: place_of(reference, schema) for reference in references_in(schema)}
    for _ in range(_ROUNDS_MAX):
        found = [reference for reference, part in waiting.items() if _ends_by(part, ending)]
        if not found:
            return _ends_by(schema, ending)
        for reference in found:
            ending.add(reference)
            del waiting[reference]
    return True


def _ends_by(schema: Any, ending: set[str]) -> bool:
    """Whether it ends where these references do."""
    if not isinstance(schema, Mapping):
        return True
    if isinstance(reference := schema.get("$ref"), str) and reference not in ending:
        return False
    return all(_ends_by(part, ending) for part in _certain(schema)) and all(
        any(_ends_by(branch, ending) for branch in branches)
        for key in ("anyOf", "oneOf")
        if isinstance(branches := schema.get(key), list) and branches
    )


def _certain(schema: Schema) -> Iterator[Any]:
    """Parts that whatever is valid must have.  An object's only where it must be an object, an array's likewise."""
    if isinstance(parts := schema.get("allOf"), list):
        yield from parts
    properties = schema.get("properties")
    if schema.get("type") == "object" and isinstance(properties, Mapping):
        yield from (properties[name] for name in required_in(schema) if name in properties)
    count = schema.get("minItems")
    if schema.get("type") == "array" and isinstance(count, int) and count > 0:
        first = schema.get("prefixItems")
        listed = first[:count] if isinstance(first, list) else []
        yield from listed
        if count > len(listed):
            yield schema.get("items")
