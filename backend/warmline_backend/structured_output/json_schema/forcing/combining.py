"""Forced schemas combined, and what is known of the values that one is used for.  Pure."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from warmline_backend.request.schemas import Schema

if TYPE_CHECKING:
    from warmline_backend.structured_output.json_schema.forcing.force import SchemaForcer

_DOMAIN_SIZE_MAX = 50

# Schemas that all hold for the values that a negation is used for.
Domain = tuple[Schema, ...]


def collect_domain(forcer: "SchemaForcer", schemas: Iterable[Any]) -> Domain:
    """Collect the schemas that hold where all of these do: their references, and the parts of their allOf."""
    found: dict[int, Schema] = {}
    waiting = [*schemas]
    while waiting and len(found) < _DOMAIN_SIZE_MAX:
        schema = waiting.pop(0)
        if isinstance(schema, Mapping) and id(schema) not in found:
            found[id(schema)] = schema
            waiting += schema.get("allOf", ())
            if "$ref" in schema:
                waiting.append(forcer.lookup(schema["$ref"]))
    return tuple(found.values())


def collect_property_domain(forcer: "SchemaForcer", domain: Domain, name: str) -> Domain:
    """Collect the schemas that hold for a property of the values of a domain."""
    return collect_domain(forcer, (schema["properties"].get(name) for schema in domain if "properties" in schema))


def spell(value: Any) -> str:
    """Spell a value so that equal ones are the same: 1.0 is 1."""
    return json.dumps(_drop_fractions(value), sort_keys=True)


def _drop_fractions(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _drop_fractions(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_drop_fractions(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def any_of(parts: list[Any]) -> Any:
    if any(part is True or part == {} for part in parts):
        return {}
    kept = [part for part in parts if part is not False]
    return {"anyOf": kept} if len(kept) > 1 else kept[0] if kept else False


def all_of(parts: list[Any]) -> Any:
    if any(part is False for part in parts):
        return False
    kept = [part for part in parts if part is not True and part != {}]
    return {"allOf": kept} if len(kept) > 1 else kept[0] if kept else {}
