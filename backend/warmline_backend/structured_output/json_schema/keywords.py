"""Keywords of JSON Schema (2020-12): which hold schemas, and which values each may have.  Pure."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from warmline_backend.request.schemas import Schema

JSON_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
MAP_KEYWORDS = frozenset({"properties", "patternProperties", "$defs", "dependentSchemas"})
LIST_KEYWORDS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
SCHEMA_KEYWORDS = frozenset(
    {"items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else"}
    | {"unevaluatedProperties", "unevaluatedItems"}
)


def is_schema(value: object) -> bool:
    return isinstance(value, Mapping | bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)  # type: ignore[operator, call-overload]


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_types(value: object) -> bool:
    types = value if isinstance(value, list) else [value]
    return bool(types) and all(isinstance(name, str) and name in JSON_TYPES for name in types)


_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_Kind = tuple[Callable[[object], bool], str]  # whether a value is of it, and its name for people
_COUNT: _Kind = (_is_count, "a whole number, not negative")
_NUMBER: _Kind = (_is_number, "a number")
_TEXT: _Kind = (lambda value: isinstance(value, str), "a string")
_BOOLEAN: _Kind = (lambda value: isinstance(value, bool), "true or false")
_SCHEMA: _Kind = (is_schema, "a schema: an object, true or false")
_SCHEMA_MAP: _Kind = (
    lambda value: isinstance(value, Mapping) and all(map(is_schema, value.values())),
    "an object of schemas",
)
_SCHEMA_LIST: _Kind = (
    lambda value: isinstance(value, list) and bool(value) and all(map(is_schema, value)),
    "a list of schemas, not empty",
)

VALUE_KINDS: Mapping[str, _Kind] = {
    "type": (_is_types, f"one of {', '.join(JSON_TYPES)}, or a list of these"),
    "enum": (lambda value: isinstance(value, list), "a list"),
    "const": (lambda value: True, ""),
    "required": (_is_names, "a list of names"),
    "dependentRequired": (
        lambda value: isinstance(value, Mapping) and all(map(_is_names, value.values())),
        "an object of lists of names",
    ),
    "uniqueItems": _BOOLEAN,
    "pattern": _TEXT,
    "format": _TEXT,
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),  # type: ignore[operator]
    **dict.fromkeys((*_COUNTS, "minContains", "maxContains"), _COUNT),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    **dict.fromkeys(MAP_KEYWORDS, _SCHEMA_MAP),
    **dict.fromkeys(LIST_KEYWORDS, _SCHEMA_LIST),
    **dict.fromkeys(SCHEMA_KEYWORDS, _SCHEMA),
}


def iter_subschemas(schema: Schema) -> Iterator[tuple[str, Any]]:
    """Iterate over a normalized schema's direct subschemas, each with its pointer from here ("/items")."""
    for key, value in schema.items():
        if key in MAP_KEYWORDS:
            yield from ((f"/{key}/{escape_step(name)}", part) for name, part in value.items())
        elif key in LIST_KEYWORDS:
            yield from ((f"/{key}/{n}", part) for n, part in enumerate(value))
        elif key in SCHEMA_KEYWORDS:
            yield f"/{key}", value


def escape_step(name: object) -> str:
    """Name of a property or number of an item as a step of a JSON pointer."""
    return str(name).replace("~", "~0").replace("/", "~1")


def format_json(value: object) -> str:
    """Format a value for people, as short JSON."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
