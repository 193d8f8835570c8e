"""Custom tools of chat bodies as functions, and the model's calls of them as custom ones.  Pure.

tools                    {"type": "custom", "custom": {name, description, format}}
tool_choice              {"type": "custom", "custom": {name}}, also among the `allowed_tools`
messages[].tool_calls    {"id", "type": "custom", "custom": {name, input}}
"""

from collections.abc import Callable, Iterable
from typing import Any

from warmline_proxy.api.base import Fields
from warmline_proxy.api.custom_tools import JsonObject, build_function, decode_input, encode_arguments
from warmline_proxy.errors import bad_request
from warmline_proxy.http.body_fields import decode_body

CUSTOM, FUNCTION = "custom", "function"
Converter = Callable[[JsonObject, str], JsonObject]  # from a `custom` object and its place to a `function`
_MARK = b'"custom"'  # in each value that has something to convert, and in few others


def convert_custom_tools(fields: Fields) -> tuple[Fields, frozenset[str]]:
    """A raw body without custom tools, and the names of those that it had.  Raises ClientError 400.

    Values without them stay the bytes that came.
    """
    raw = {name: bytes(fields[name]) for name in ("tools", "tool_choice", "messages") if name in fields}
    found = {name: decode_body(value, Any) for name, value in raw.items() if _MARK in value}
    if not found:
        return fields, frozenset()
    converted: Fields = {}
    if "tools" in found:
        converted["tools"] = _convert_list(found["tools"], "tools", _convert_tool)
    if "tool_choice" in found:
        converted["tool_choice"] = _convert_choice(found["tool_choice"])
    if "messages" in found:
        converted["messages"] = _convert_messages(found["messages"])
    tools = found.get("tools")
    names = (tool[CUSTOM]["name"] for tool in tools if _is_custom(tool)) if isinstance(tools, list) else ()
    return {**fields, **converted}, frozenset(names)


def convert_calls(calls: Iterable[JsonObject], names: frozenset[str]) -> list[JsonObject]:
    """Whole calls of an answer, those of the custom tools of these names in their form."""
    return [_convert_answered_call(call) if call[FUNCTION]["name"] in names else call for call in calls]


def _convert_answered_call(call: JsonObject) -> JsonObject:
    custom = {"name": call[FUNCTION]["name"], "input": decode_input(call[FUNCTION]["arguments"])}
    return {**_omit(call, FUNCTION), "type": CUSTOM, CUSTOM: custom}


# ---- reading; what has another shape is refused by the backend


def _convert_list(values: Any, where: str, convert: Converter) -> Any:
    """Convert the custom ones of a list, each with its `custom` object."""
    if not isinstance(values, list):
        return values
    return [_convert(value, f"{where}[{i}]", convert) if _is_custom(value) else value for i, value in enumerate(values)]


def _convert(value: JsonObject, where: str, convert: Converter) -> JsonObject:
    if not isinstance(custom := value.get(CUSTOM), dict):
        raise bad_request(f"'{where}.custom' must be an object with a name.", param=f"{where}.custom")
    _get_string(custom, "name", where)  # an empty one is refused by the backend
    return {**_omit(value, CUSTOM), "type": FUNCTION, FUNCTION: convert(custom, where)}


def _convert_tool(custom: JsonObject, where: str) -> JsonObject:
    form = custom.get("format")
    grammar = form.get("grammar") if isinstance(form, dict) and form.get("type") == "grammar" else None
    return build_function(custom["name"], custom.get("description"), grammar if isinstance(grammar, dict) else None)


def _convert_name(custom: JsonObject, where: str) -> JsonObject:
    return {"name": custom["name"]}


def _convert_call(custom: JsonObject, where: str) -> JsonObject:
    return {"name": custom["name"], "arguments": encode_arguments(_get_string(custom, "input", where))}


def _convert_choice(choice: Any) -> Any:
    if _is_custom(choice):
        return _convert(choice, "tool_choice", _convert_name)
    if not isinstance(choice, dict) or not isinstance(allowed := choice.get("allowed_tools"), dict):
        return choice
    tools = _convert_list(allowed.get("tools"), "tool_choice.allowed_tools.tools", _convert_name)
    return {**choice, "allowed_tools": {**allowed, "tools": tools}}


def _convert_messages(messages: Any) -> Any:
    if not isinstance(messages, list):
        return messages
    return [
        {**message, "tool_calls": _convert_list(message["tool_calls"], f"messages[{i}].tool_calls", _convert_call)}
        if isinstance(message, dict) and "tool_calls" in message
        else message
        for i, message in enumerate(messages)
    ]


def _is_custom(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == CUSTOM


def _omit(value: JsonObject, name: str) -> JsonObject:
    return {key: each for key, each in value.items() if key != name}


def _get_string(custom: JsonObject, name: str, where: str) -> str:
    if isinstance(text := custom.get(name), str):
        return text
    raise bad_request(f"'{where}.custom.{name}' must be a string.", param=f"{where}.custom.{name}")
