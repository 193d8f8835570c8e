"""JSON schemas adapted to llguidance, which takes most of the language and refuses the rest by name.  Pure.

The set of valid JSON stays: formats without a check are left out, and a "oneOf" of exclusive branches becomes "anyOf".
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from warmline_backend.request.json_refs import Schema, collect_references, lookup_reference, resolve_references
from warmline_backend.request.params import BadRequestError

SCHEMA_BYTES_MAX = 1 << 18
SCHEMA_NODES_MAX = 10_000
SCHEMA_DEPTH_MAX = 100  # of its JSON; llguidance's own reader ends at 128

# The spacing that models write most in one line; free spacing would let a model write spaces without end.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
_MAP_KEYWORDS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_LIST_KEYWORDS = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
_SCHEMA_KEYWORDS = frozenset(("items", "additionalProperties", "not", "contains", "propertyNames", "additionalItems"))
_REFERENCE_SAFE_CHARS = "#/~%!$&'()*+,;=:@?-._"  # unencoded in a reference; llguidance needs the rest encoded
_ROUNDS_MAX = 50
JSON_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def adapt_schema(schema: Schema, field: str) -> dict[str, Any]:
    """Adapt a schema.  Raises BadRequestError for one that is too large, or that no finite JSON can satisfy."""
    _check_bounds(schema, field)
    if not _can_end(schema):
        raise BadRequestError(f"'{field}' can't be satisfied: a part of it requires itself without end", field)
    made = _adapt(schema, schema)
    assert isinstance(made, dict)
    return made


def add_guidance_options(schema: Schema, **options: Any) -> dict[str, Any]:
    """Add llguidance's options at the root; with `lenient` it ignores unknown keywords."""
    return {**schema, "x-guidance": {**SPACING, **options}}


def _check_bounds(schema: Schema, field: str) -> None:
    waiting: list[tuple[object, int]] = [(schema, 1)]
    nodes = 0
    while waiting:
        value, depth = waiting.pop()
        nodes += 1
        if depth > SCHEMA_DEPTH_MAX:
            raise BadRequestError(f"'{field}' nests deeper than {SCHEMA_DEPTH_MAX} levels", field)
        if nodes > SCHEMA_NODES_MAX:
            raise BadRequestError(f"'{field}' has more than {SCHEMA_NODES_MAX} parts; it is too large", field)
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        waiting.extend((part, depth + 1) for part in inner)
    if len(json.dumps(schema, ensure_ascii=False)) > SCHEMA_BYTES_MAX:
        raise BadRequestError(f"'{field}' is longer than {SCHEMA_BYTES_MAX} characters; it is too large", field)


# ---- rewriting


def _adapt(schema: Any, root: Schema) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("x-guidance", "default", "examples", "example"):
            continue
        if key == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        made[key] = _adapt_keyword(key, value, root)
    if isinstance(branches := made.get("oneOf"), list) and "anyOf" not in made and _are_exclusive(branches, root):
        made["anyOf"] = made.pop("oneOf")
    return made


def _adapt_keyword(key: str, value: Any, root: Schema) -> Any:
    if key == "$ref" and isinstance(value, str):
        return quote(value, safe=_REFERENCE_SAFE_CHARS)
    if key in _MAP_KEYWORDS and isinstance(value, Mapping):
        return {name: _adapt(inner, root) for name, inner in value.items()}
    if key in _LIST_KEYWORDS and isinstance(value, list):
        return [_adapt(inner, root) for inner in value]
    if key in _SCHEMA_KEYWORDS:
        return [_adapt(inner, root) for inner in value] if isinstance(value, list) else _adapt(value, root)
    return value


def _are_exclusive(branches: list[Any], root: Schema) -> bool:
    """True where no JSON is valid under two branches: types differ, or a property that all require does."""
    resolved = [resolve_references(branch, root) for branch in branches]
    if any(branch is None for branch in resolved):
        return False
    known = [branch for branch in resolved if branch is not None]
    return _are_disjoint(map(_find_types, known)) or any(
        _are_disjoint(_find_tag_values(branch, name, root) for branch in known)
        for name in list_required_names(known[0] if known else {})
    )


def _are_disjoint(sets: Iterable[frozenset[str] | None]) -> bool:
    """True for disjoint sets; stops at the first that is not."""
    seen: set[str] = set()
    for values in sets:
        if not values or seen & values:
            return False
        seen |= values
    return True


def _find_types(schema: Schema) -> frozenset[str] | None:
    """Types of a schema; None for any.  A number may be an integer: "number" counts as both."""
    named = schema.get("type")
    types = [named] if isinstance(named, str) else named
    if not isinstance(types, list) or not all(kind in JSON_TYPES for kind in types):
        return None
    return frozenset(types) | ({"integer"} if "number" in types else frozenset())


def _find_tag_values(schema: Schema, name: str, root: Schema) -> frozenset[str] | None:
    """Values of a required property of an object, as JSON; None where they are not listed."""
    properties = schema.get("properties")
    inner = resolve_references(properties.get(name), root) if isinstance(properties, Mapping) else None
    if inner is None or name not in list_required_names(schema) or schema.get("type") != "object":
        return None
    values = [inner["const"]] if "const" in inner else inner.get("enum")
    return frozenset(json.dumps(value, sort_keys=True) for value in values) if isinstance(values, list) else None


def list_required_names(schema: Schema) -> list[str]:
    """Names that an object must have."""
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


# ---- infinite schemas


def _can_end(schema: Schema) -> bool:
    """True where some finite JSON may be valid.

    A cheap look at parts that are required for certain; in doubt, true.  References that can end are found round by
    round, each built on those before; what is left after the last round requires itself.
    """
    ending: set[str] = set()
    waiting = {reference: lookup_reference(reference, schema) for reference in collect_references(schema)}
    for _ in range(_ROUNDS_MAX):
        found = [reference for reference, part in waiting.items() if _can_end_given(part, ending)]
        if not found:
            return _can_end_given(schema, ending)
        for reference in found:
            ending.add(reference)
            del waiting[reference]
    return True


def _can_end_given(schema: Any, ending: set[str]) -> bool:
    """True for a schema that ends where these references do."""
    if not isinstance(schema, Mapping):
        return True
    if isinstance(reference := schema.get("$ref"), str) and reference not in ending:
        return False
    return all(_can_end_given(part, ending) for part in _iter_required_parts(schema)) and all(
        any(_can_end_given(branch, ending) for branch in branches)
        for key in ("anyOf", "oneOf")
        if isinstance(branches := schema.get(key), list) and branches
    )


def _iter_required_parts(schema: Schema) -> Iterator[Any]:
    """Parts that all valid JSON has.  An object's only where it must be an object, an array's likewise."""
    if isinstance(parts := schema.get("allOf"), list):
        yield from parts
    properties = schema.get("properties")
    if schema.get("type") == "object" and isinstance(properties, Mapping):
        yield from (properties[name] for name in list_required_names(schema) if name in properties)
    count = schema.get("minItems")
    if schema.get("type") == "array" and isinstance(count, int) and count > 0:
        first = schema.get("prefixItems")
        listed = first[:count] if isinstance(first, list) else []
        yield from listed
        if count > len(listed):
            yield schema.get("items")
