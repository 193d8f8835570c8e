"""Arguments of a call where they stand one by one: text as it is, everything else as JSON.  Pure.

What is text is what `output.schema_types` reads as such.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from warmline_backend.request.json_refs import Schema, moved, references_in, resolve
from warmline_backend.structured_output.json_schema import required_in
from warmline_backend.structured_output.lark import ANY_TEXT, Lark, in_regex, optional, quoted
from warmline_backend.tool_parsers.argument_types import possible_types

_LENGTH_COUNTED_MAX = 10_000  # a longer limit on text is left to the model
_ROOT_KEYS = ("$defs", "definitions")
_SHARED = ("#/$defs/", "#/definitions/")
_WHOLE = "#/$defs/whole"
_ANCHORED = re.compile(r"\^((?:\[\^|[^\\|^$]|\\.)*)\$")
_SCALARS = (str, int, float, type(None))
_NUMBERS = ("integer", "number", "boolean")
_NOTES = frozenset(("title", "description", "deprecated", "readOnly", "writeOnly", "discriminator", "$comment"))


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


# ---- what may stand for an argument


@dataclass(frozen=True)
class Value:
    """All that a schema's unions allow, taken together."""

    patterns: tuple[str, ...]  # of text
    words: tuple[Any, ...]  # scalars that are listed
    others: tuple[Schema, ...]  # to be written as JSON

    @property
    def strings(self) -> list[str]:
        return [word for word in self.words if isinstance(word, str)]

    @property
    def text(self) -> str:
        """A pattern of what is read as a string where strings stand without quotes, and of null."""
        if any(other.get("type") not in _NUMBERS for other in self.others):
            return ANY_TEXT  # a list or an object may stand there too
        return self._pattern(*(["null"] if None in self.words else []))

    @property
    def string(self) -> str:
        """A pattern of its strings alone."""
        return self._pattern()

    def _pattern(self, *more: str) -> str:
        patterns = [*self.patterns, *map(in_regex, self.strings), *more]
        return ANY_TEXT if ANY_TEXT in patterns else f"(?:{'|'.join(patterns)})"


def value_of(schema: Any, parameters: Schema) -> Value:
    patterns: list[str] = []
    words: list[Any] = []
    others: list[Schema] = []
    for branch in _branches(schema, parameters):
        listed = [branch["const"]] if "const" in branch else branch.get("enum")
        if isinstance(listed, list):
            words += [word for word in listed if isinstance(word, _SCALARS)]
            if nested := [word for word in listed if not isinstance(word, _SCALARS)]:
                others.append({"enum": nested})
        elif branch.get("type") == "null":
            words.append(None)
        elif _may_be_text(branch, parameters):
            patterns.append(text_pattern(branch))
        else:
            others.append(branch)
    return Value(tuple(patterns), tuple(words), tuple(others))


def _branches(schema: Any, parameters: Schema) -> Iterator[Schema]:
    """Of a union, and of those within it; each once, for they may refer to each other in any way."""
    waiting, seen = [schema], set[int]()
    while waiting:
        one = resolve(waiting.pop(), parameters)
        if one is None:
            yield {}
        elif id(one) not in seen:
            seen.add(id(one))
            kinds = one.get("type")
            if union := _union(one):
                waiting.extend(reversed(union))
            elif isinstance(kinds, list) and kinds and not {"enum", "const"} & one.keys():
                yield from ({**one, "type": kind} for kind in kinds)
            else:
                yield one


def _union(schema: Schema) -> list[Any]:
    """Its branches, where it says nothing besides."""
    said = [key for key in schema if key not in _NOTES]
    branches = schema[said[0]] if len(said) == 1 else None
    if not isinstance(branches, list):
        return []
    return branches if said[0] in ("anyOf", "oneOf") or (said[0] == "allOf" and len(branches) == 1) else []


def _may_be_text(schema: Schema, parameters: Schema) -> bool:
    """Whether a string is valid, as far as can be seen: then whatever is written is one."""
    if "type" not in schema and {"properties", "items"} & schema.keys():
        return False
    return "string" in possible_types(schema, parameters)


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


# ---- writing it


def tagged_value(
    lark: Lark, schema: Any, parameters: Schema, *, end: str, without: tuple[str, ...], lenient: bool
) -> str:
    """A value between tags, and the tag that ends it: `end`.  `without`: other tags that text may not contain."""
    value = value_of(schema, parameters)
    if value.patterns:
        return lark.text_up_to(end, without=without, pattern=value.text)
    options = [*map(lark.literal, value.strings), *json_values(lark, value, parameters, lenient)]
    return f"{lark.one_of(options)} {lark.literal(end)}"


def string_value(lark: Lark, value: Value, end: str, without: tuple[str, ...] = ()) -> str:
    """Its strings, and the tag that ends them; "" where none may stand there."""
    if value.patterns:
        return lark.text_up_to(end, without=without, pattern=value.string)
    return f"{lark.one_of(map(lark.literal, value.strings))} {lark.literal(end)}" if value.strings else ""


def json_values(lark: Lark, value: Value, parameters: Schema, lenient: bool) -> list[str]:
    """All that it may be but a string, as JSON."""
    words = [quoted(json.dumps(word)) for word in value.words if not isinstance(word, str)]
    return [*words, *(json_value(lark, other, parameters, lenient) for other in value.others)]


def json_value(lark: Lark, schema: Schema, parameters: Schema, lenient: bool) -> str:
    """A part of `parameters` as JSON; its references lead where they did."""
    if all(reference.startswith(_SHARED) for reference in references_in(parameters)):
        shared = {key: parameters[key] for key in _ROOT_KEYS if key in parameters}
    else:
        schema, shared = moved(schema, _WHOLE), {"$defs": {"whole": moved(parameters, _WHOLE)}}
    return lark.json({**schema, **shared}, lenient=lenient)
