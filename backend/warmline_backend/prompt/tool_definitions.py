"""Definitions of tools, completed where a template fails without their optional fields.  Pure."""

from collections.abc import Callable, Iterator
from typing import Any

JsonObject = dict[str, Any]


def complete_tool(tool: JsonObject, is_rendered: Callable[[JsonObject], bool]) -> JsonObject | None:
    """The tool with as little added as makes the template render it; None where it refuses all forms.

    What is added says nothing: an empty description, an object without properties, one type in place of several.
    """
    return next(filter(is_rendered, _list_forms(tool)), None)


def _list_forms(tool: JsonObject) -> Iterator[JsonObject]:
    """Forms of the tool, from the client's own to the one with the most added."""
    function: JsonObject = tool["function"]
    description = {"description": function.get("description") or ""}
    parameters = {"parameters": _complete_schema(function.get("parameters") or {})}
    single_types = {"parameters": _select_first_types(parameters["parameters"])}
    additions: tuple[JsonObject, ...] = (
        {},
        description,
        parameters,
        description | parameters,
        single_types,
        description | single_types,
    )
    for added in additions:
        yield {**tool, "function": function | added}


def _complete_schema(schema: JsonObject) -> JsonObject:
    """Schema of an object with properties, without nulls."""
    return {"type": "object", "properties": {}} | {key: value for key, value in schema.items() if value is not None}


def _select_first_types(schema: Any) -> Any:
    """The schema with the first type in place of a list of them, null aside, at every depth."""
    if isinstance(schema, list):
        return [_select_first_types(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    selected = {key: _select_first_types(value) for key, value in schema.items()}
    if isinstance(types := schema.get("type"), list):
        selected["type"] = next((name for name in types if name != "null"), "null")
    return selected
