"""JSON schemas adapted to llguidance, which takes most of the language and refuses the rest by name.  Pure.

The set of valid JSON stays: formats without a check are left out, and a "oneOf" of exclusive branches becomes "anyOf".
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from warmline_backend.request import schemas
from warmline_backend.request.params import FieldError
from warmline_backend.request.schemas import Schema

SCHEMA_BYTES_MAX = 1 << 18
SCHEMA_NODES_MAX = 10_000
SCHEMA_DEPTH_MAX = 100  # of its JSON; llguidance's own reader ends at 128

# The spacing that models write most in one line; free spacing would let a model write spaces without end.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"}
_MAP_KEYWORDS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_LIST_KEYWORDS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SCHEMA_KEYWORDS = {"items", "additionalProperties", "not", "contains", "propertyNames", "additionalItems"}
_UNCHECKED_KEYWORDS = {"x-guidance", "default", "examples", "example"}
_REFERENCE_SAFE_CHARS = "#/~%!$&'()*+,;=:@?-._"  # unencoded in a reference; llguidance needs the rest encoded
_ROUNDS_MAX = 50
JSON_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def adapt_schema(schema: Schema, field: str) -> dict[str, Any]:
    """Adapt a schema.  Raises BadRequestError for one that is too large, or that no finite JSON can satisfy."""
    _check_bounds(schema, field)
    if not _can_end(schema):
        raise FieldError(field, "can't be satisfied: a part of it requires itself without end")
    return dict(_adapt(schema, schema))


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
            raise FieldError(field, f"nests deeper than {SCHEMA_DEPTH_MAX} levels")
        if nodes > SCHEMA_NODES_MAX:
            raise FieldError(field, f"has more than {SCHEMA_NODES_MAX} parts; it is too large")
        waiting.extend((part, depth + 1) for part in schemas.list_parts(value))
    if len(json.dumps(schema, ensure_ascii=False)) > SCHEMA_BYTES_MAX:
        raise FieldError(field, f"is longer than {SCHEMA_BYTES_MAX} characters; it is too large")


# ---- rewriting


def _adapt(schema: Any, root: Schema) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    adapted: dict[str, Any] = {}
    for key, value in schema.items():
        is_unknown_format = key == "format" and isinstance(value, str) and value not in _FORMATS
        if key not in _UNCHECKED_KEYWORDS and not is_unknown_format:
            adapted[key] = _adapt_keyword(key, value, root)
    branches = adapted.get("oneOf")
    if isinstance(branches, list) and "anyOf" not in adapted and _are_exclusive(branches, root):
        adapted["anyOf"] = adapted.pop("oneOf")
    return adapted


def _adapt_keyword(key: str, value: Any, root: Schema) -> Any:
    if key == "$ref" and isinstance(value, str):
        return quote(value, safe=_REFERENCE_SAFE_CHARS)
    if key in _MAP_KEYWORDS and isinstance(value, Mapping):
        return {name: _adapt(inner, root) for name, inner in value.items()}
    if key in _LIST_KEYWORDS | _SCHEMA_KEYWORDS and isinstance(value, list):
        return [_adapt(inner, root) for inner in value]
    return _adapt(value, root) if key in _SCHEMA_KEYWORDS else value


def _are_exclusive(branches: list[Any], root: Schema) -> bool:
    """True where no JSON is valid under two branches: types differ, or a property that all require does."""
    resolved = [schemas.resolve_references(branch, root) or {} for branch in branches]
    return _are_disjoint(map(_find_types, resolved)) or any(
        _are_disjoint(_find_tag_values(branch, name, root) for branch in resolved)
        for name in schemas.list_required_names(resolved[0])
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
    value = schema.get("type")
    types = [value] if isinstance(value, str) else value
    if not isinstance(types, list) or not all(kind in JSON_TYPES for kind in types):
        return None
    return frozenset(types) | ({"integer"} if "number" in types else frozenset())


def _find_tag_values(schema: Schema, name: str, root: Schema) -> frozenset[str] | None:
    """Values of a required property of an object, as JSON; None where they are not listed."""
    inner = schemas.resolve_references(schemas.get_typed(schema, "properties", dict).get(name), root)
    if inner is None or name not in schemas.list_required_names(schema) or schema.get("type") != "object":
        return None
    values = [inner["const"]] if "const" in inner else inner.get("enum")
    return frozenset(json.dumps(value, sort_keys=True) for value in values) if isinstance(values, list) else None


# ---- infinite schemas


def _can_end(schema: Schema) -> bool:
    """True where some finite JSON may be valid.

    A cheap look at parts that are required for certain; in doubt, true.  References that can end are found round by
    round, each built on those before; what is left after the last round requires itself.
    """
    ending: set[str] = set()
    parts = {reference: schemas.lookup_reference(reference, schema) for reference in schemas.collect_references(schema)}
    for _ in range(_ROUNDS_MAX):
        found = {reference for reference in parts.keys() - ending if _can_end_given(parts[reference], ending)}
        if not found:
            return _can_end_given(schema, ending)
        ending |= found
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
    """Parts that all valid JSON has; parts of objects and arrays only where the type is required."""
    yield from schemas.get_typed(schema, "allOf", list)
    if schema.get("type") == "object":
        properties = schemas.get_typed(schema, "properties", dict)
        yield from (properties[name] for name in schemas.list_required_names(schema) if name in properties)
    count = schema.get("minItems")
    if schema.get("type") == "array" and isinstance(count, int) and count > 0:
        first = schemas.get_typed(schema, "prefixItems", list)[:count]
        yield from first
        if count > len(first):
            yield schema.get("items")
