"""Arguments of a call where they stand one by one: text as it is, everything else as JSON.  Pure."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from warmline_backend.grammar.lark import ANY_TEXT, Lark, optional
from warmline_backend.grammar.schemas import required_in
from warmline_backend.schema_references import Schema, resolve

_LENGTH_COUNTED_MAX = 10_000  # a longer limit on text is left to the model
_BRANCHES_DEPTH_MAX = 4
_ROOT_KEYS = ("$defs", "definitions")
_ANCHORED = re.compile(r"\^((?:\[\^|[^\\|^$]|\\.)*)\$")


@dataclass(frozen=True)
class Argument:
    name: str
    schema: Any
    required: bool


def arguments_of(parameters: Schema) -> Iterator[Argument]:
    """The properties of a tool's parameters, in their order.  Others that the schema may allow are never given."""
    found = resolve(parameters, parameters) or {}
    properties, names = found.get("properties"), required_in(found)
    for name, schema in properties.items() if isinstance(properties, Mapping) else ():
        yield Argument(name, schema, name in names)


def sequence_of(arguments: Iterator[Argument], written: Callable[[Argument], str]) -> str:
    """One after the other, optional ones or not."""
    parts = [(argument, written(argument)) for argument in arguments]
    return " ".join(part if argument.required else optional(part) for argument, part in parts)


def json_value(lark: Lark, schema: Any, parameters: Schema, lenient: bool) -> str:
    """A part of `parameters` as JSON; its references lead where they did."""
    shared = {key: parameters[key] for key in _ROOT_KEYS if key in parameters}
    return lark.json({**(schema if isinstance(schema, Mapping) else {}), **shared}, lenient=lenient)


def is_text(schema: Any, parameters: Schema) -> bool:
    """Whether a value is written as text, without quotes."""
    found = resolve(schema, parameters) or {}
    return words_of(found) is not None or may_be_text(found, parameters)


def words_of(schema: Schema) -> list[str] | None:
    """The strings that are valid, where no others are."""
    words = [schema["const"]] if "const" in schema else schema.get("enum")
    return words if isinstance(words, list) and words and all(isinstance(word, str) for word in words) else None


def tagged_value(
    lark: Lark, schema: Any, parameters: Schema, *, end: str, without: tuple[str, ...], lenient: bool
) -> str:
    """A value between tags, and the tag that ends it: `end`.  `without`: other tags that text may not contain."""
    found = resolve(schema, parameters) or {}
    if (words := words_of(found)) is not None:
        return f"({' | '.join(lark.literal(word) for word in words)}) {lark.literal(end)}"
    if may_be_text(found, parameters):
        return lark.text_up_to(end, without=without, pattern=text_pattern(found))
    return f"{json_value(lark, schema, parameters, lenient)} {lark.literal(end)}"


def may_be_text(schema: Schema, parameters: Schema, depth: int = 0) -> bool:
    """Whether a string is valid, as far as can be seen: then whatever is written is one."""
    if depth > _BRANCHES_DEPTH_MAX:
        return True
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        return "string" in kinds
    branches = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    if branches:
        return any(may_be_text(resolve(branch, parameters) or {}, parameters, depth + 1) for branch in branches[0])
    return not any(key in schema for key in ("properties", "items", "enum", "const", "allOf"))


def text_pattern(schema: Schema) -> str:
    """What a string's pattern and lengths say, where that can be said of plain text."""
    if schema.get("type") != "string":
        return ANY_TEXT
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and (anchored := _ANCHORED.fullmatch(pattern)):
        return re.sub(r"(?<!\\)/", r"\/", anchored[1])
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(low, int) or not isinstance(high, int) or not 0 <= low <= high <= _LENGTH_COUNTED_MAX:
        return ANY_TEXT
    return f"(?s:.{{{low},{high}}})"
