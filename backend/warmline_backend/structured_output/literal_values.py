"""Single arguments of a call between tags: strings as text, everything else as JSON.  Pure.

A value counts as text where `tool_parsers.argument_types` parses it as a string.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from warmline_backend.request.json_refs import Schema, collect_references, rebase_references, resolve_references
from warmline_backend.structured_output.json_schema import list_required_names
from warmline_backend.structured_output.lark import ANY_TEXT, LarkBuilder, escape_regex, optional, quote_literal
from warmline_backend.tool_parsers.argument_types import find_possible_types

_TEXT_LENGTH_MAX = 10_000  # a longer limit on text is left to the model
_DEFINITION_KEYS = ("$defs", "definitions")
_DEFINITION_PREFIXES = ("#/$defs/", "#/definitions/")
_WHOLE_SCHEMA_REFERENCE = "#/$defs/whole"
_ANCHORED = re.compile(r"\^((?:\[\^|[^\\|^$]|\\.)*)\$")
_SCALARS = (str, int, float, type(None))
_NON_TEXT_TYPES = ("integer", "number", "boolean")
_ANNOTATION_KEYWORDS = frozenset(
    ("title", "description", "deprecated", "readOnly", "writeOnly", "discriminator", "$comment")
)


@dataclass(frozen=True)
class ToolArgument:
    name: str
    schema: Any
    required: bool


def iter_arguments(parameters: Schema) -> Iterator[ToolArgument]:
    """Properties of a tool's parameters, in their order.  Others that the schema may allow are never given."""
    found = resolve_references(parameters, parameters) or {}
    properties, names = found.get("properties"), list_required_names(found)
    for name, schema in properties.items() if isinstance(properties, Mapping) else ():
        yield ToolArgument(name, schema, name in names)


def join_arguments(arguments: Iterator[ToolArgument], write_argument: Callable[[ToolArgument], str]) -> str:
    """Join arguments in their order, each optional unless required."""
    parts = [(argument, write_argument(argument)) for argument in arguments]
    return " ".join(part if argument.required else optional(part) for argument, part in parts)


# ---- allowed values


@dataclass(frozen=True)
class AllowedValues:
    """All that a schema's unions allow, taken together."""

    patterns: tuple[str, ...]  # of text
    constants: tuple[Any, ...]  # scalars that are listed
    json_schemas: tuple[Schema, ...]  # to be written as JSON

    @property
    def string_constants(self) -> list[str]:
        return [word for word in self.constants if isinstance(word, str)]

    @property
    def unquoted_pattern(self) -> str:
        """Pattern of text that is parsed as a string without quotes, and of null."""
        if any(other.get("type") not in _NON_TEXT_TYPES for other in self.json_schemas):
            return ANY_TEXT  # a list or an object may stand there too
        return self._join_patterns(*(["null"] if None in self.constants else []))

    @property
    def string_pattern(self) -> str:
        """Pattern of its strings alone."""
        return self._join_patterns()

    def _join_patterns(self, *more: str) -> str:
        patterns = [*self.patterns, *map(escape_regex, self.string_constants), *more]
        return ANY_TEXT if ANY_TEXT in patterns else f"(?:{'|'.join(patterns)})"


def collect_allowed_values(schema: Any, parameters: Schema) -> AllowedValues:
    patterns: list[str] = []
    words: list[Any] = []
    others: list[Schema] = []
    for branch in _iter_branches(schema, parameters):
        listed = [branch["const"]] if "const" in branch else branch.get("enum")
        if isinstance(listed, list):
            words += [word for word in listed if isinstance(word, _SCALARS)]
            if nested := [word for word in listed if not isinstance(word, _SCALARS)]:
                others.append({"enum": nested})
        elif branch.get("type") == "null":
            words.append(None)
        elif _can_be_text(branch, parameters):
            patterns.append(build_text_pattern(branch))
        else:
            others.append(branch)
    return AllowedValues(tuple(patterns), tuple(words), tuple(others))


def _iter_branches(schema: Any, parameters: Schema) -> Iterator[Schema]:
    """Branches of a union and of those within it; each once, for they may refer to each other in any way."""
    waiting, seen = [schema], set[int]()
    while waiting:
        one = resolve_references(waiting.pop(), parameters)
        if one is None:
            yield {}
        elif id(one) not in seen:
            seen.add(id(one))
            kinds = one.get("type")
            if union := _find_union_branches(one):
                waiting.extend(reversed(union))
            elif isinstance(kinds, list) and kinds and not {"enum", "const"} & one.keys():
                yield from ({**one, "type": kind} for kind in kinds)
            else:
                yield one


def _find_union_branches(schema: Schema) -> list[Any]:
    """Branches of a schema that is a union and nothing else."""
    keywords = [key for key in schema if key not in _ANNOTATION_KEYWORDS]
    branches = schema[keywords[0]] if len(keywords) == 1 else None
    if not isinstance(branches, list):
        return []
    return branches if keywords[0] in ("anyOf", "oneOf") or (keywords[0] == "allOf" and len(branches) == 1) else []


def _can_be_text(schema: Schema, parameters: Schema) -> bool:
    """True where a string may be valid: then any written text is a string."""
    if "type" not in schema and {"properties", "items"} & schema.keys():
        return False
    return "string" in find_possible_types(schema, parameters)


def build_text_pattern(schema: Schema) -> str:
    """Pattern of a string's `pattern` or lengths, where plain text can follow it."""
    if schema.get("type") != "string":
        return ANY_TEXT
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and (anchored := _ANCHORED.fullmatch(pattern)):
        return re.sub(r"(?<!\\)/", r"\/", anchored[1])
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(low, int) or not isinstance(high, int) or not 0 <= low <= high <= _TEXT_LENGTH_MAX:
        return ANY_TEXT
    return f"(?s:.{{{low},{high}}})"


# ---- expressions


def write_tagged_value(
    lark: LarkBuilder, schema: Any, parameters: Schema, *, end: str, excluded: tuple[str, ...], lenient: bool
) -> str:
    """Write a value and `end`, the tag after it.  `excluded`: other tags that text may not contain."""
    value = collect_allowed_values(schema, parameters)
    if value.patterns:
        return lark.text_until(end, excluded=excluded, pattern=value.unquoted_pattern)
    options = [*map(lark.literal, value.string_constants), *write_json_values(lark, value, parameters, lenient)]
    return f"{lark.one_of(options)} {lark.literal(end)}"


def write_string_value(lark: LarkBuilder, allowed: AllowedValues, end: str, excluded: tuple[str, ...] = ()) -> str:
    """Write the allowed strings and the tag after them; "" for none."""
    if allowed.patterns:
        return lark.text_until(end, excluded=excluded, pattern=allowed.string_pattern)
    if not allowed.string_constants:
        return ""
    return f"{lark.one_of(map(lark.literal, allowed.string_constants))} {lark.literal(end)}"


def write_json_values(lark: LarkBuilder, allowed: AllowedValues, parameters: Schema, lenient: bool) -> list[str]:
    """Write all allowed values but strings, as JSON."""
    words = [quote_literal(json.dumps(word)) for word in allowed.constants if not isinstance(word, str)]
    return [*words, *(write_json_value(lark, other, parameters, lenient) for other in allowed.json_schemas)]


def write_json_value(lark: LarkBuilder, schema: Schema, parameters: Schema, lenient: bool) -> str:
    """Write a part of `parameters` as JSON, with its references intact."""
    if all(reference.startswith(_DEFINITION_PREFIXES) for reference in collect_references(parameters)):
        shared = {key: parameters[key] for key in _DEFINITION_KEYS if key in parameters}
    else:
        schema = rebase_references(schema, _WHOLE_SCHEMA_REFERENCE)
        shared = {"$defs": {"whole": rebase_references(parameters, _WHOLE_SCHEMA_REFERENCE)}}
    return lark.json({**schema, **shared}, lenient=lenient)
