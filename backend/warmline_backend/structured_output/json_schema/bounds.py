"""Bounds of JSON schemas: their size, and whether any finite JSON can satisfy them.  Pure."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from warmline_backend.request import schemas
from warmline_backend.request.params import FieldError
from warmline_backend.request.schemas import Schema

SCHEMA_BYTES_MAX = 1 << 20
SCHEMA_NODES_MAX = 50_000
SCHEMA_DEPTH_MAX = 100  # of its JSON; llguidance's own reader ends at 128
_ROUNDS_MAX = 50


def check_size(schema: Schema, field: str) -> None:
    """Raise FieldError for a schema that is too large or too deep."""
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


def find_endless(schema: Schema) -> str | None:
    """Find what of a normalized schema requires itself: a reference, "#" for the root.  None for nothing.

    A cheap look at parts that are required for certain; in doubt, None.  References that can end are found round by
    round, each built on those before; what is left after the last round requires itself, so that no finite JSON is
    valid.
    """
    ending: set[str] = set()
    parts = {reference: schemas.lookup_reference(reference, schema) for reference in schemas.collect_references(schema)}
    for _ in range(_ROUNDS_MAX):
        found = {reference for reference in parts.keys() - ending if _can_end_given(parts[reference], ending)}
        if not found:
            return None if _can_end_given(schema, ending) else min(parts.keys() - ending, default="#")
        ending |= found
    return None


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
