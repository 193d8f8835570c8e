"""Arguments in the types that a tool's JSON schema asks for, where what the model wrote can be read so in one way.

Formats that carry values as bare text leave their types to the schema; JSON that writes "5" where only an integer may
stand means 5.  What fits its schema, and what could mean several things, is left as it is.
"""

import json
from typing import Any

from warmline_backend.output.lenient import Unreadable, read_leniently

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


class Bare(str):
    """A value of which only the text is known: a string, or what this text is as JSON."""


def parameters_of(tools: list[dict[str, Any]] | None, name: str) -> Any:
    """The schema of a tool's arguments; None where there is none."""
    for tool in tools or ():
        function = tool.get("function")
        function = function if isinstance(function, dict) else tool
        if function.get("name") == name:
            return function.get("parameters")
    return None


def typed(arguments: dict[str, Any], schema: Any) -> dict[str, Any]:
    """The same arguments, in their order, as the schema has them."""
    fitted = _fit(arguments, schema, schema, 0)
    assert isinstance(fitted, dict)
    return fitted


def _fit(value: Any, schema: Any, root: Any, depth: int) -> Any:
    if depth > DEPTH_MAX:
        return value
    schema = _resolved(schema, root)
    types = _types(schema, root, depth)
    if isinstance(value, Bare):
        value = _meant(str(value), types)
    elif isinstance(value, str) and "string" not in types:
        value = _parsed(value, types)
    elif types == {"string"} and isinstance(value, int):
        value = json.dumps(value)
    elif isinstance(value, float) and "number" not in types and "integer" in types and value.is_integer():
        value = int(value)
    if isinstance(value, dict):
        return _fit_object(value, _only_branch(schema, root, "object"), root, depth)
    if isinstance(value, list):
        return _fit_array(value, _only_branch(schema, root, "array"), root, depth)
    return value


def _fit_object(value: dict[str, Any], schema: dict[str, Any], root: Any, depth: int) -> dict[str, Any]:
    known = schema.get("properties")
    known = known if isinstance(known, dict) else {}
    others = schema.get("additionalProperties")
    return {key: _fit(item, known.get(key, others), root, depth + 1) for key, item in value.items()}


def _fit_array(value: list[Any], schema: dict[str, Any], root: Any, depth: int) -> list[Any]:
    first = schema.get("prefixItems")
    first = first if isinstance(first, list) else []
    others = schema.get("items")
    schemas = [first[i] if i < len(first) else others for i in range(len(value))]
    return [_fit(item, of, root, depth + 1) for item, of in zip(value, schemas, strict=True)]


def _meant(text: str, types: frozenset[str]) -> Any:
    """What bare text stands for.  Where it may be a string it is one, unless it reads as a container or null that may
    stand there too, or nothing is known of it.
    """
    if "string" not in types:
        return _parsed(text.strip(), types)
    if types == _ALL:
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


def _resolved(schema: Any, root: Any) -> dict[str, Any]:
    """Without references to other places of the same schema; empty where nothing is known."""
    for _ in range(DEPTH_MAX):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = _at(root, reference)
    return {}


def _at(root: Any, reference: str) -> Any:
    place = root
    if not reference.startswith("#"):
        return None
    for step in reference[1:].split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        place = place.get(key) if isinstance(place, dict) else None
    return place


def _types(schema: dict[str, Any], root: Any, depth: int) -> frozenset[str]:
    """Which types may stand there; all where the schema does not say."""
    types = _ALL
    if isinstance(stated := schema.get("type"), str | list):
        named = {str(kind).lower() for kind in ([stated] if isinstance(stated, str) else stated)}
        types &= named | ({"integer"} if "number" in named else frozenset())
    if isinstance(choices := schema.get("enum"), list):
        types &= {_PYTHON_TYPES.get(type(choice), "string") for choice in choices}
    if "const" in schema:
        types &= {_PYTHON_TYPES.get(type(schema["const"]), "string")}
    for branches in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(branches, list) and branches and depth < DEPTH_MAX:
            types &= frozenset().union(*(_types(_resolved(b, root), root, depth + 1) for b in branches))
    for branch in schema.get("allOf") or () if isinstance(schema.get("allOf"), list) else ():
        if depth < DEPTH_MAX:
            types &= _types(_resolved(branch, root), root, depth + 1)
    return types or _ALL


def _only_branch(schema: dict[str, Any], root: Any, kind: str) -> dict[str, Any]:
    """The schema that an object or array must follow: its own, or that of the one branch of a union that allows it."""
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := schema.get(name), list):
            fitting = [b for b in (_resolved(b, root) for b in branches) if kind in _types(b, root, DEPTH_MAX)]
            return fitting[0] if len(fitting) == 1 else {}
    return schema
