"""Conversion of arguments to the types of a tool's JSON schema, where a value can be read in one way only.

Formats that carry values as bare text leave their types to the schema; JSON that writes "5" where only an integer may
stand means 5.  Values that fit their schema, and ambiguous ones, are left as they are.
"""

import json
from dataclasses import dataclass
from functools import reduce
from itertools import chain, repeat
from typing import Any

from warmline_backend.request.params import Tools
from warmline_backend.request.schemas import Schema, get_typed, resolve_references
from warmline_backend.tool_parsers.lenient_json import CONSTANTS, ToolCallParseError, parse_lenient_json

DEPTH_MAX = 32
_PYTHON_TYPES: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number"}
_PYTHON_TYPES |= {list: "array", dict: "object", type(None): "null"}
_ALL_TYPES = frozenset({*_PYTHON_TYPES.values()})
_MISSING = object()
_ANY_SCHEMA: Schema = {}


@dataclass(frozen=True)
class _AllowedTypes:
    """Allowed types and strings of one value."""

    types: frozenset[str]
    strings: frozenset[str] | None = None  # the strings; None where they are not listed


_ALLOW_ANY = _AllowedTypes(_ALL_TYPES)


def _intersect(one: _AllowedTypes, other: _AllowedTypes) -> _AllowedTypes:
    words = [allowed.strings for allowed in (one, other) if allowed.strings is not None]
    return _AllowedTypes(one.types & other.types, frozenset.intersection(*words) if words else None)


def _unite(allowed: list[_AllowedTypes]) -> _AllowedTypes:
    words = [one.strings for one in allowed if "string" in one.types]
    listed = [one for one in words if one is not None]
    types = frozenset[str]().union(*(one.types for one in allowed))
    return _AllowedTypes(types, frozenset[str]().union(*listed) if len(listed) == len(words) else None)


def _allow_values(values: list[Any]) -> _AllowedTypes:
    types = frozenset(_PYTHON_TYPES.get(type(value), "string") for value in values)
    return _AllowedTypes(types, frozenset(value for value in values if isinstance(value, str)))


class BareText(str):
    """A value of unknown type: a string, or JSON."""


def find_parameters(tools: Tools, name: str) -> Any:
    """Schema of a tool's arguments; None for none."""
    functions = (tool["function"] for tool in tools or ())
    return next((function.get("parameters") for function in functions if function["name"] == name), None)


def convert_arguments(arguments: dict[str, Any], schema: Any) -> dict[str, Any]:
    """Convert arguments to the types of the schema, in their order."""
    converted = _SchemaTypes(schema).convert_value(arguments, schema, 0)
    assert isinstance(converted, dict)
    return converted


def find_possible_types(schema: Any, root: Any) -> frozenset[str]:
    """JSON types of a schema, which is a part of `root`; all where it names none."""
    return _SchemaTypes(root).find_allowed(resolve_references(schema, root) or _ANY_SCHEMA, 0).types


class _SchemaTypes:
    """Types of one schema's parts, each computed once: unions may refer to each other in any way."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._allowed_cache: dict[int, _AllowedTypes] = {}
        self._branches: dict[tuple[int, str], Schema] = {}

    def convert_value(self, value: Any, schema: Any, depth: int) -> Any:
        if depth > DEPTH_MAX:
            return value
        schema = self._resolve(schema)
        allowed = self.find_allowed(schema, 0)
        types = allowed.types
        if isinstance(value, BareText):
            value = _interpret_bare(str(value), allowed)
        elif isinstance(value, str) and "string" not in types:
            value = _parse_as(value, types)
        elif types == {"string"} and isinstance(value, int):
            value = json.dumps(value)
        elif isinstance(value, float) and "number" not in types and "integer" in types and value.is_integer():
            value = int(value)
        if isinstance(value, dict):
            schema = self._find_branch(schema, "object")
            fields, others = get_typed(schema, "properties", dict), schema.get("additionalProperties")
            return {key: self.convert_value(part, fields.get(key, others), depth + 1) for key, part in value.items()}
        if isinstance(value, list):
            schema = self._find_branch(schema, "array")
            schemas = chain(get_typed(schema, "prefixItems", list), repeat(schema.get("items")))
            return [self.convert_value(*pair, depth + 1) for pair in zip(value, schemas, strict=False)]
        return value

    def _resolve(self, schema: Any) -> Schema:
        return resolve_references(schema, self._root) or _ANY_SCHEMA

    def find_allowed(self, schema: Schema, depth: int) -> _AllowedTypes:
        """Allowed types; anything where the schema names none."""
        if id(schema) not in self._allowed_cache:
            self._allowed_cache[id(schema)] = _ALLOW_ANY  # a self-reference allows anything
            self._allowed_cache[id(schema)] = self._compute_allowed(schema, depth)
        return self._allowed_cache[id(schema)]

    def _compute_allowed(self, schema: Schema, depth: int) -> _AllowedTypes:
        limits = []
        if isinstance(kinds := schema.get("type"), str | list):
            names = {str(kind).lower() for kind in ([kinds] if isinstance(kinds, str) else kinds)}
            limits.append(_AllowedTypes(frozenset(names | ({"integer"} if "number" in names else set()))))
        if isinstance(choices := schema.get("enum"), list):
            limits.append(_allow_values(choices))
        if "const" in schema:
            limits.append(_allow_values([schema["const"]]))
        for key in ("anyOf", "oneOf", "allOf") if depth < DEPTH_MAX else ():
            if branches := get_typed(schema, key, list):
                each = [self.find_allowed(self._resolve(branch), depth + 1) for branch in branches]
                limits += each if key == "allOf" else [_unite(each)]
        allowed = reduce(_intersect, limits, _ALLOW_ANY)
        return allowed if allowed.types else _ALLOW_ANY

    def _find_branch(self, schema: Schema, kind: str) -> Schema:
        """Schema of an object or array: its own, or that of the one branch of a union that allows the kind."""
        if (key := (id(schema), kind)) not in self._branches:
            self._branches[key] = self._choose_branch(schema, kind)
        return self._branches[key]

    def _choose_branch(self, schema: Schema, kind: str) -> Schema:
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(branches := schema.get(name), list):
                fitting = [b for b in map(self._resolve, branches) if kind in self.find_allowed(b, 0).types]
                return fitting[0] if len(fitting) == 1 else _ANY_SCHEMA
        return schema


def _interpret_bare(text: str, allowed: _AllowedTypes) -> Any:
    """Convert bare text: to a string where strings are allowed, unless the text reads as an allowed container or null,
    or the type is unknown, or the text is none of the listed strings.
    """
    types, words = allowed.types, allowed.strings
    if "string" not in types:
        return _parse_as(text.strip(), types)
    if words is not None and (word := next((word for word in (text, text.strip()) if word in words), None)) is not None:
        return word
    if types == _ALL_TYPES or words is not None:
        return _parse_as(text.strip(), types - {"string"}, default=text)
    return _parse_as(text.strip(), types & {"null", "array", "object"}, default=text)


def _parse_as(text: str, types: frozenset[str], default: Any = _MISSING) -> Any:
    """Parse `text` as one of `types`; unchanged where it can't be."""
    value = _parse_literal(text)
    if value is not _MISSING and not isinstance(value, str):
        kind = _PYTHON_TYPES[type(value)]
        if kind in types or (kind == "integer" and "number" in types):
            return value
        if isinstance(value, float) and value.is_integer() and "integer" in types:
            return int(value)
    return text if default is _MISSING else default


def _parse_literal(text: str) -> Any:
    if text in CONSTANTS:
        return CONSTANTS[text]
    if text[:1] not in ("{", "[", "-") and not text[:1].isdecimal():
        return _MISSING
    try:
        value, end = parse_lenient_json(text)
    except ToolCallParseError:
        return _MISSING
    return value if end == len(text) else _MISSING
