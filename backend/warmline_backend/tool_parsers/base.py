"""Parsing of calls: `RawToolCall`s and the text between them; JSON calls.

Every parser takes the text between a call's markers, and whether the answer was cut off there: then nothing that is
missing may be added.  Raises ToolCallParseError where the text is no call.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from warmline_backend.tool_parsers import lenient_json
from warmline_backend.tool_parsers.lenient_json import ToolCallParseError

NAME_CHARS_MAX = 256

_NAME = re.compile(r"[\w.$/:@-]+")
_NAME_KEYS = ("name", "function", "tool_name", "tool")
_ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True)
class RawToolCall:
    """A call as the model wrote it; `BareText` values have no type yet."""

    name: str
    arguments: dict[str, Any]


ParsedItems = list[RawToolCall | str]  # text between calls stays in its place
CallParser = Callable[[str, bool], ParsedItems]


def parse_json_calls(text: str, cut: bool) -> ParsedItems:
    """Parse one object, several, or a list of them."""
    text = lenient_json.strip_code_fence(text).strip()
    items: ParsedItems = []
    position = 0
    while position < len(text):
        value, position = parse_value(text, position, cut)
        items += [_parse_call_object(one) for one in (value if isinstance(value, list) else [value])]
        position += len(text[position:]) - len(text[position:].lstrip(" \t\r\n,;"))
        if not text[position:].strip("}] \n"):
            break
    return require_calls(items)


def list_text(text: str) -> ParsedItems:
    """Text between calls as an item; none for white space."""
    return [text] if text.strip() else []


def require_calls(items: ParsedItems) -> ParsedItems:
    """Return `items`.  Raises ToolCallParseError where there is no call among them."""
    if not any(isinstance(item, RawToolCall) for item in items):
        raise ToolCallParseError("no call")
    return items


def parse_value(text: str, position: int, cut: bool) -> tuple[Any, int]:
    """Parse one JSON value; returns it and its end."""
    return lenient_json.parse_strict_json(text, position) if cut else lenient_json.parse_lenient_json(text, position)


def _parse_call_object(value: Any) -> RawToolCall:
    """Parse a call under any of the key names that models use."""
    if not isinstance(value, dict):
        raise ToolCallParseError("a call must be an object")
    for key in _NAME_KEYS:
        inner = value.get(key)
        if isinstance(inner, dict):
            return _parse_call_object({**{k: v for k, v in value.items() if k in _ARGUMENT_KEYS}, **inner})
        if isinstance(inner, str) and inner.strip():
            return RawToolCall(normalize_name(inner), _parse_call_arguments(value))
    raise ToolCallParseError("a call without a name")


def _parse_call_arguments(value: dict[str, Any]) -> dict[str, Any]:
    arguments = next((value[key] for key in _ARGUMENT_KEYS if key in value), None)
    if isinstance(arguments, str):
        arguments = parse_arguments(arguments)
    if arguments is None and not set(value) - {*_NAME_KEYS, *_ARGUMENT_KEYS, "id", "type", "tool_call_id"}:
        return {}
    if not isinstance(arguments, dict):
        raise ToolCallParseError("arguments must be an object")
    return arguments


def parse_arguments(text: str, quote: str = "") -> dict[str, Any]:
    """Parse a JSON object and nothing else.  Raises ToolCallParseError."""
    text = lenient_json.strip_code_fence(text).strip()
    if not text:
        return {}
    value, end = lenient_json.parse_lenient_json(text, quote=quote)
    if not isinstance(value, dict) or text[end:].strip("} \n"):
        raise ToolCallParseError("arguments must be one object")
    return value


def normalize_name(name: str) -> str:
    """Strip a function's name.  Raises ToolCallParseError for any other text."""
    name = name.strip("\"' \t\r\n").removeprefix("functions.")
    if not 0 < len(name) <= NAME_CHARS_MAX or not _NAME.fullmatch(name):
        raise ToolCallParseError(f"{name[:40]!r} is no function's name")
    return name
