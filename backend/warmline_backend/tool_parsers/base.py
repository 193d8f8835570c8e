"""The text of calls, as each family writes it, read: `Written` calls, and what is left of the text between them.

Every reader takes the text between a call's markers, and whether the answer was cut off there: then nothing that is
missing may be added.  Raises Unreadable where the text is no call.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from warmline_backend.tool_parsers.lenient_json import Unreadable, read_leniently, read_strictly, unfenced

NAME_CHARS_MAX = 256

_NAME = re.compile(r"[\w.$/:@-]+")
_NAME_KEYS = ("name", "function", "tool_name", "tool")
_ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True)
class Written:
    """A call as the model wrote it; values that are `Bare` have no type yet."""

    name: str
    arguments: dict[str, Any]


Items = list[Written | str]  # text that belongs to no call stays where it stood
Reader = Callable[[str, bool], Items]


def read_json_calls(text: str, cut: bool) -> Items:
    """One object, several, or a list of them."""
    text = unfenced(text).strip()
    items: Items = []
    at = 0
    while at < len(text):
        value, at = read_value(text, at, cut)
        items += [_call_in(one) for one in (value if isinstance(value, list) else [value])]
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n,;"))
        if not text[at:].strip("}] \n"):
            break
    if not items:
        raise Unreadable("no call")
    return items


def read_value(text: str, at: int, cut: bool) -> tuple[Any, int]:
    """One JSON value, and where it ends."""
    return read_strictly(text, at) if cut else read_leniently(text, at)


def _call_in(value: Any) -> Written:
    """The call that an object tells of, under whatever names models use."""
    if not isinstance(value, dict):
        raise Unreadable("a call must be an object")
    for key in _NAME_KEYS:
        inner = value.get(key)
        if isinstance(inner, dict):
            return _call_in({**{k: v for k, v in value.items() if k in _ARGUMENT_KEYS}, **inner})
        if isinstance(inner, str) and inner.strip():
            return Written(plain_name(inner), _arguments_in(value))
    raise Unreadable("a call without a name")


def _arguments_in(value: dict[str, Any]) -> dict[str, Any]:
    given = next((value[key] for key in _ARGUMENT_KEYS if key in value), None)
    if isinstance(given, str):
        given = read_arguments(given)
    if given is None and not set(value) - {*_NAME_KEYS, *_ARGUMENT_KEYS, "id", "type", "tool_call_id"}:
        return {}
    if not isinstance(given, dict):
        raise Unreadable("arguments must be an object")
    return given


def read_arguments(text: str, quote: str = "") -> dict[str, Any]:
    """A JSON object and nothing else.  Raises Unreadable."""
    text = unfenced(text).strip()
    if not text:
        return {}
    value, end = read_leniently(text, quote=quote)
    if not isinstance(value, dict) or text[end:].strip("} \n"):
        raise Unreadable("arguments must be one object")
    return value


def plain_name(name: str) -> str:
    """Raises Unreadable where it can't be a function's."""
    name = name.strip("\"' \t\r\n").removeprefix("functions.")
    if not 0 < len(name) <= NAME_CHARS_MAX or not _NAME.fullmatch(name):
        raise Unreadable(f"{name[:40]!r} is no function's name")
    return name
