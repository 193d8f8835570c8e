"""Instances of schemas as text in their keys' order, and small changes of them, most of which make them invalid."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from warmline_backend.request.schemas import lookup_reference

PARTS_MAX = 200  # subschemas that apply to one value
NODES_MAX = 300  # of an instance, that changes are looked for at
COMPOSING = ("allOf", "anyOf", "oneOf")
CONDITIONAL = ("then", "else", "if")
NAMED_PARTS = ("properties", "patternProperties", "$defs", "definitions")
DATA = ("enum", "const", "default", "examples", "required")
HARD = {
    *("uniqueItems", "not", "if", "then", "else", "propertyNames", "oneOf", "contains", "minContains", "maxContains"),
    *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
    *("minProperties", "maxProperties", "$dynamicAnchor", "$recursiveAnchor"),
}
Path = tuple[str | int, ...]
Schemas = list[Mapping[str, Any]]
Change = tuple[str, Path, Any]  # its kind, the place, and the new value; REMOVED for none
REMOVED = object()
OTHER_VALUES: Mapping[str, Any] = {
    "object": {},
    "array": [],
    "string": "other",
    "number": 1.5,
    "integer": 7,
    "boolean": True,
    "null": None,
}


def collect_parts(schemas: Sequence[Any], root: Any) -> Schemas:
    """Collect the subschemas that may apply to a value, references and branches followed; a bounded number."""
    parts, waiting, seen = list[Mapping[str, Any]](), list(schemas), set[int]()
    while waiting and len(parts) < PARTS_MAX:
        schema = waiting.pop(0)
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        parts.append(schema)
        if isinstance(reference := schema.get("$ref"), str):
            waiting.append(lookup_reference(reference, root))
        for key in COMPOSING:
            branches = schema.get(key)
            waiting.extend(branches if isinstance(branches, list) else ())
        waiting.extend(schema[key] for key in CONDITIONAL if key in schema)
    return parts


def get_child_schemas(parts: Schemas, key: str | int) -> list[Any]:
    """Get the subschemas of a property or of an item."""
    found = list[Any]()
    for part in parts:
        if isinstance(key, int):
            prefix = part.get("prefixItems", part.get("items") if isinstance(part.get("items"), list) else ())
            is_prefix = isinstance(prefix, list) and key < len(prefix)
            found.append(prefix[key] if is_prefix else part.get("items", part.get("additionalItems")))
        elif isinstance(properties := part.get("properties"), Mapping) and key in properties:
            found.append(properties[key])
        else:
            patterns = part.get("patternProperties")
            found.extend(patterns.values() if isinstance(patterns, Mapping) else ())
            found.append(part.get("additionalProperties"))
    return found


def order_keys(instance: Any, schemas: Sequence[Any], root: Any) -> Any:
    """Copy an instance with the keys of its objects in the order of the schema; unlisted ones follow."""
    parts = collect_parts(schemas, root)
    if isinstance(instance, list):
        return [order_keys(item, get_child_schemas(parts, i), root) for i, item in enumerate(instance)]
    if not isinstance(instance, dict):
        return instance
    listed = dict.fromkeys(
        name for part in parts if isinstance(part.get("properties"), Mapping) for name in part["properties"]
    )
    names = [name for name in listed if name in instance] + [name for name in instance if name not in listed]
    return {name: order_keys(instance[name], get_child_schemas(parts, name), root) for name in names}


def format_instance(instance: Any, schema: Any) -> str:
    return json.dumps(order_keys(instance, [schema], schema), ensure_ascii=False)


def relax_schema(schema: Any) -> Any:
    """Copy a schema without the keywords that are hard to force: it allows more, and is served by any version."""
    if isinstance(schema, list):
        return [relax_schema(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    relaxed = dict[str, Any]()
    for key, part in schema.items():
        if key in NAMED_PARTS and isinstance(part, Mapping):
            relaxed[key] = {name: relax_schema(inner) for name, inner in part.items()}
        elif key in DATA or (key not in HARD and not (key == "pattern" and "(?" in str(part))):
            relaxed[key] = part if key in DATA else relax_schema(part)
    if "anyOf" not in relaxed and isinstance(schema.get("oneOf"), list):
        relaxed["anyOf"] = relax_schema(schema["oneOf"])
    return relaxed


# ---- changes


def change_instance(instance: Any, schema: Any, draw: random.Random, count: int) -> Iterator[tuple[str, Any]]:
    """Yield some changed copies, each with the kind of its one change."""
    by_kind: dict[str, list[Change]] = {}
    for change in _iter_changes(instance, [schema], schema, ()):
        by_kind.setdefault(change[0], []).append(change)
    kinds = sorted(by_kind)
    draw.shuffle(kinds)
    for i in range(count if kinds else 0):
        kind, path, value = draw.choice(by_kind[kinds[i % len(kinds)]])
        yield kind, _apply_change(instance, path, value)


def _apply_change(instance: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    copy = json.loads(json.dumps(instance))
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    if value is REMOVED:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return copy


def _iter_changes(instance: Any, schemas: Sequence[Any], root: Any, path: Path) -> Iterator[Change]:
    waiting: list[tuple[Any, Sequence[Any], Path]] = [(instance, schemas, path)]
    for _ in range(NODES_MAX):
        if not waiting:
            return
        value, schemas, path = waiting.pop(0)
        parts = collect_parts(schemas, root)
        yield from ((kind, path, new) for kind, new in _iter_new_values(value, parts))
        if isinstance(value, dict):
            yield from (("key dropped", (*path, name), REMOVED) for name in value)
            waiting.extend((inner, get_child_schemas(parts, name), (*path, name)) for name, inner in value.items())
        elif isinstance(value, list):
            waiting.extend((inner, get_child_schemas(parts, i), (*path, i)) for i, inner in enumerate(value))


def _iter_new_values(value: Any, parts: Schemas) -> Iterator[tuple[str, Any]]:
    yield from (("type changed", other) for other in OTHER_VALUES.values() if type(other) is not type(value))
    if any("enum" in part or "const" in part for part in parts):
        yield "enum left", f"{value}x" if isinstance(value, str) else "no such value"
    if isinstance(value, dict):
        yield "key added", {**value, "unlistedKey": 1}
        yield "key added", {**value, "": None}
        for part in parts:
            for name in part.get("dependencies", part.get("dependentRequired", ())) or ():
                yield "dependent key added", {**value, name: next(iter(value.values()), 1)}
    elif isinstance(value, list):
        yield from _iter_new_lists(value, parts)
    elif isinstance(value, str):
        yield from _iter_new_strings(value, parts)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _iter_new_numbers(value, parts)


def _iter_new_lists(value: list[Any], parts: Schemas) -> Iterator[tuple[str, Any]]:
    if value:
        yield "item doubled", [*value, value[-1]]
        yield "item doubled", [value[0], *value]
        yield "item dropped", value[:-1]
        yield "list emptied", []
    for part in parts:
        count = part.get("maxItems")
        if isinstance(count, int) and count < NODES_MAX and value:
            yield "too many items", (value * (count + 1))[: count + 1]


def _iter_new_strings(value: str, parts: Schemas) -> Iterator[tuple[str, Any]]:
    for part in parts:
        if "format" in part:
            yield from (("format broken", new) for new in (f"{value}%", value[:-1], f" {value}", value.upper()))
        if isinstance(count := part.get("maxLength"), int) and count < 2000:
            yield "too long", (value or "a") * (count // max(len(value), 1) + 1) + "a"
        if isinstance(count := part.get("minLength"), int) and count:
            yield "too short", value[: count - 1]
        if "pattern" in part or "propertyNames" in part:
            yield from (("pattern broken", new) for new in (f"{value}\n", f"{value}!", f"!{value}", value[1:], ""))


def _iter_new_numbers(value: float, parts: Schemas) -> Iterator[tuple[str, Any]]:
    for part in parts:
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            bound = part.get(key)
            if isinstance(bound, int | float) and not isinstance(bound, bool):
                yield from (("bound passed", bound + step) for step in (-1, 1, 0))
        if "multipleOf" in part or part.get("type") == "integer":
            yield from (("multiple left", value + step) for step in (0.5, 0.001, 1))
