"""Schemas reduced to keywords that are evaluated: nothing else in them costs time or leads elsewhere.  Pure."""

from collections.abc import Callable, Mapping
from typing import Any, Literal
from urllib.parse import unquote

from warmline_backend.request.schemas import Schema
from warmline_backend.structured_output.json_schema.formats import check_format
from warmline_backend.structured_output.json_schema.patterns import compile_check
from warmline_backend.structured_output.json_schema.validation.values import ObjectValue, convert_value, make_key

Kind = Literal[
    "schema", "schemas", "map", "count", "number", "text", "names", "types", "name lists", "flag", "values", "any"
]

KINDS: Mapping[str, Kind] = {
    "$ref": "text",
    "additionalProperties": "schema",
    "allOf": "schemas",
    "anyOf": "schemas",
    "const": "any",
    "contains": "schema",
    "dependentRequired": "name lists",
    "dependentSchemas": "map",
    "else": "schema",
    "enum": "values",
    "exclusiveMaximum": "number",
    "exclusiveMinimum": "number",
    "format": "text",
    "if": "schema",
    "items": "schema",
    "maxContains": "count",
    "maxItems": "count",
    "maxLength": "count",
    "maxProperties": "count",
    "maximum": "number",
    "minContains": "count",
    "minItems": "count",
    "minLength": "count",
    "minProperties": "count",
    "minimum": "number",
    "multipleOf": "number",
    "not": "schema",
    "oneOf": "schemas",
    "pattern": "text",
    "patternProperties": "map",
    "prefixItems": "schemas",
    "properties": "map",
    "propertyNames": "schema",
    "required": "names",
    "then": "schema",
    "type": "types",
    "unevaluatedItems": "schema",
    "unevaluatedProperties": "schema",
    "uniqueItems": "flag",
}
_TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_HAS_KIND: Mapping[Kind, Callable[[Any], bool]] = {
    "schema": lambda value: isinstance(value, bool | Mapping),
    "schemas": lambda value: isinstance(value, list) and all(isinstance(part, bool | Mapping) for part in value),
    "map": lambda value: (
        isinstance(value, Mapping) and all(isinstance(part, bool | Mapping) for part in value.values())
    ),
    "count": lambda value: _is_number(value) and value >= 0,
    "number": _is_number,
    "text": lambda value: isinstance(value, str),
    "names": _is_names,
    "types": lambda value: (_is_names([value]) and value in _TYPES) or (_is_names(value) and _TYPES.issuperset(value)),
    "name lists": lambda value: isinstance(value, Mapping) and all(_is_names(names) for names in value.values()),
    "flag": lambda value: isinstance(value, bool),
    "values": lambda value: isinstance(value, list),
    "any": lambda value: True,
}


class ReducedSchemas:
    """Copies of all parts of a schema, with known keywords of the right type only.  Unchanged once made."""

    def __init__(self, schema: Schema) -> None:
        """Raises PatternError, and LookupError for a reference without a target."""
        self._root = schema
        self._copies: dict[int, Any] = {}  # by id of the original
        self.targets: dict[str, Any] = {}  # by reference
        self.patterns: dict[str, Callable[[str], bool]] = {}
        self.formats: dict[str, Callable[[str], bool]] = {}
        self._waiting: list[str] = []
        self._copy(schema)
        for part in (schema.get(key) for key in ("$defs", "definitions")):
            if isinstance(part, Mapping):
                for inner in part.values():
                    self._copy(inner)
        while self._waiting:
            reference = self._waiting.pop()
            if reference not in self.targets:
                self.targets[reference] = self._copy(find_part(schema, unquote(reference.removeprefix("#"))))

    def get_part(self, pointer: str) -> Any:
        """Copy of the subschema at a JSON pointer.  Raises LookupError for a place that has none."""
        part = find_part(self._root, pointer)
        return part if isinstance(part, bool) else self._copies[id(part)]

    def _copy(self, schema: Any) -> Any:
        """Copy a schema, once; one without keywords allows everything."""
        if not isinstance(schema, Mapping):
            return schema is not False
        if id(schema) in self._copies:
            return self._copies[id(schema)]
        copy = ObjectValue()
        for key, value in schema.items():
            kind = KINDS.get(key)
            if kind is not None and _HAS_KIND[kind](value):
                copy[key] = self._copy_value(key, kind, value)
        self._copies[id(schema)] = copy or True
        return copy or True

    def _copy_value(self, key: str, kind: Kind, value: Any) -> Any:
        if kind == "schema":
            return self._copy(value)
        if kind == "schemas":
            return [self._copy(part) for part in value]
        if key == "patternProperties":
            self.patterns.update((pattern, compile_check(pattern)) for pattern in value)
        elif key == "pattern":
            self.patterns[value] = compile_check(value)
        elif key == "format":
            if check := check_format(value):
                self.formats[value] = check
        elif key == "$ref":
            self._waiting.append(value)
        elif key in ("const", "enum"):
            return frozenset(make_key(convert_value(part), int) for part in (value if key == "enum" else [value]))
        if kind == "map":
            return {name: self._copy(part) for name, part in value.items()}
        return convert_value(value) if kind == "number" else value


def find_part(root: Any, pointer: str) -> Any:
    """Find the part at a JSON pointer.  Raises LookupError."""
    part = root
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isascii() and name.isdecimal():
            part = part[int(name)]
        elif isinstance(part, Mapping):
            part = part[name]
        else:
            raise LookupError(f"no part at {pointer!r}")
    return part
