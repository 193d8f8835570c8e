"""Arguments in the types that a tool's JSON schema asks for, where what the model wrote can be read so in one way.

Formats that carry values as bare text leave their types to the schema; JSON that writes "5" where only an integer may
stand means 5.  What fits its schema, and what could mean several things, is left as it is.
"""

import json
from dataclasses import dataclass
from functools import reduce
from typing import Any

from warmline_backend.request.json_refs import Schema, resolve
from warmline_backend.tool_parsers.lenient_json import Unreadable, read_leniently

DEPTH_MAX = 32
_PYTHON_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_ALL = frozenset({*_PYTHON_TYPES.values()})
_LITERALS: dict[str, Any] = {"true": True, "false": False, "True": True, "False": False, "None": None, "null": None}
_NOTHING = object()
_UNKNOWN: Schema = {}


@dataclass(frozen=True)
class _Allowed:
    """What may stand in one place."""

    types: frozenset[str]
    words: frozenset[str] | None = None  # the strings; None where they are not listed


_ANYTHING = _Allowed(_ALL)


def _both(one: _Allowed, other: _Allowed) -> _Allowed:
    words = [allowed.words for allowed in (one, other) if allowed.words is not None]
    return _Allowed(one.types & other.types, frozenset.intersection(*words) if words else None)


def _either(allowed: list[_Allowed]) -> _Allowed:
    words = [one.words for one in allowed if "string" in one.types]
    listed = [one for one in words if one is not None]
    types = frozenset[str]().union(*(one.types for one in allowed))
    return _Allowed(types, frozenset[str]().union(*listed) if len(listed) == len(words) else None)


def _listed(values: list[Any]) -> _Allowed:
    types = frozenset(_PYTHON_TYPES.get(type(value), "string") for value in values)
    return _Allowed(types, frozenset(value for value in values if isinstance(value, str)))


class Bare(str):
    """A value of which only the text is known: a string, or what this text is as JSON."""


def parameters_of(tools: list[dict[str, Any]] | None, name: str) -> Any:
    """The schema of a tool's arguments; None where there is none."""
    functions = (tool["function"] for tool in tools or ())
    return next((function.get("parameters") for function in functions if function["name"] == name), None)


def typed(arguments: dict[str, Any], schema: Any) -> dict[str, Any]:
    """The same arguments, in their order, as the schema has them."""
    fitted = _Types(schema).fit(arguments, schema, 0)
    assert isinstance(fitted, dict)
    return fitted


def possible_types(schema: Any, root: Any) -> frozenset[str]:
    """By their names in JSON schemas; all where the schema, which is a part of `root`, does not say."""
    return _Types(root).allowed(resolve(schema, root) or _UNKNOWN, 0).types


class _Types:
    """One schema's.  Each part of it is looked at once, by its identity: unions may refer to each other in any way."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, _Allowed] = {}
        self._branches: dict[tuple[int, str], Schema] = {}

    def fit(self, value: Any, schema: Any, depth: int) -> Any:
        if depth > DEPTH_MAX:
            return value
        schema = self._resolved(schema)
        allowed = self.allowed(schema, 0)
        types = allowed.types
        if isinstance(value, Bare):
            value = _meant(str(value), allowed)
        elif isinstance(value, str) and "string" not in types:
            value = _parsed(value, types)
        elif types == {"string"} and isinstance(value, int):
            value = json.dumps(value)
        elif isinstance(value, float) and "number" not in types and "integer" in types and value.is_integer():
            value = int(value)
        if isinstance(value, dict):
            return self._fit_object(value, self._only_branch(schema, "object"), depth)
        if isinstance(value, list):
            return self._fit_array(value, self._only_branch(schema, "array"), depth)
        return value

    def _fit_object(self, value: dict[str, Any], schema: Schema, depth: int) -> dict[str, Any]:
        known = schema.get("properties")
        known = known if isinstance(known, dict) else {}
        others = schema.get("additionalProperties")
        return {key: self.fit(item, known.get(key, others), depth + 1) for key, item in value.items()}

    def _fit_array(self, value: list[Any], schema: Schema, depth: int) -> list[Any]:
        first = schema.get("prefixItems")
        first = first if isinstance(first, list) else []
        others = schema.get("items")
        schemas = [first[i] if i < len(first) else others for i in range(len(value))]
        return [self.fit(item, of, depth + 1) for item, of in zip(value, schemas, strict=True)]

    def _resolved(self, schema: Any) -> Schema:
        return resolve(schema, self._root) or _UNKNOWN

    def allowed(self, schema: Schema, depth: int) -> _Allowed:
        """What may stand there; anything where the schema does not say."""
        if (known := self._known.get(id(schema))) is None:
            self._known[id(schema)] = _ANYTHING  # what refers to itself says nothing
            known = self._known[id(schema)] = self._stated(schema, depth)
        return known

    def _stated(self, schema: Schema, depth: int) -> _Allowed:
        said = []
        if isinstance(stated := schema.get("type"), str | list):
            named = {str(kind).lower() for kind in ([stated] if isinstance(stated, str) else stated)}
            said.append(_Allowed(frozenset(named | ({"integer"} if "number" in named else set()))))
        if isinstance(choices := schema.get("enum"), list):
            said.append(_listed(choices))
        if "const" in schema:
            said.append(_listed([schema["const"]]))
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(branches := schema.get(key), list) and branches and depth < DEPTH_MAX:
                each = [self.allowed(self._resolved(branch), depth + 1) for branch in branches]
                said += each if key == "allOf" else [_either(each)]
        allowed = reduce(_both, said, _ANYTHING)
        return allowed if allowed.types else _ANYTHING

    def _only_branch(self, schema: Schema, kind: str) -> Schema:
        """The schema that an object or array must follow: its own, or that of the one branch of a union that allows
        it.
        """
        if (key := (id(schema), kind)) not in self._branches:
            self._branches[key] = self._chosen_branch(schema, kind)
        return self._branches[key]

    def _chosen_branch(self, schema: Schema, kind: str) -> Schema:
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(branches := schema.get(name), list):
                fitting = [b for b in map(self._resolved, branches) if kind in self.allowed(b, 0).types]
                return fitting[0] if len(fitting) == 1 else _UNKNOWN
        return schema


def _meant(text: str, allowed: _Allowed) -> Any:
    """What bare text stands for.  Where it may be a string it is one, unless it reads as a container or null that may
    stand there too, or nothing is known of it, or it is none of the strings that are listed.
    """
    types, words = allowed.types, allowed.words
    if "string" not in types:
        return _parsed(text.strip(), types)
    if words is not None and (word := next((word for word in (text, text.strip()) if word in words), None)) is not None:
        return word
    if types == _ALL or words is not None:
        return _parsed(text.strip(), types - {"string"}, otherwise=text)
    return _parsed(text.strip(), types & {"null", "array", "object"}, otherwise=text)


def _parsed(text: str, types: frozenset[str], otherwise: Any = _NOTHING) -> Any:
    """`text` as a value of one of `types`; as it is where it can't be."""
    value = _value_in(text)
    if value is not _NOTHING and not isinstance(value, str):
        kind = _PYTHON_TYPES[type(value)]
        if kind in types or (kind == "integer" and "number" in types):
            return value
        if isinstance(value, float) and value.is_integer() and "integer" in types:
            return int(value)
    return text if otherwise is _NOTHING else otherwise


def _value_in(text: str) -> Any:
    if text in _LITERALS:
        return _LITERALS[text]
    if text[:1] not in ("{", "[", "-") and not text[:1].isdecimal():
        return _NOTHING
    try:
        value, end = read_leniently(text)
    except Unreadable:
        return _NOTHING
    return value if end == len(text) else _NOTHING
