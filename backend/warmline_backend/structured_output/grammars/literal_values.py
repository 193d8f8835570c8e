"""Single arguments of a call between tags: strings as text, everything else as JSON.  Pure.

A value counts as text where `tool_parsers.argument_types` parses it as a string.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from warmline_backend.request import schemas
from warmline_backend.request.schemas import Schema
from warmline_backend.structured_output.grammars.lark import ANY_TEXT, LarkBuilder, escape_regex, quote_literal
from warmline_backend.tool_parsers.argument_types import find_possible_types

_TEXT_LENGTH_MAX = 10_000  # a longer limit on text is left to the model
_DEFINITION_KEYS = ("$defs", "definitions")
_DEFINITION_PREFIXES = ("#/$defs/", "#/definitions/")
_WHOLE_SCHEMA_REFERENCE = "#/$defs/whole"
_ANCHORED = re.compile(r"\^((?:\[\^|[^\\|^$]|\\.)*)\$")
_SCALARS = (str, int, float, type(None))
_NON_TEXT_TYPES = ("integer", "number", "boolean")
_ANNOTATION_KEYWORDS = {"title", "description", "deprecated", "readOnly", "writeOnly", "discriminator", "$comment"}


@dataclass(frozen=True)
class ToolSchema:
    """A tool with parameters that are fit for a grammar."""

    name: str
    parameters: Schema


@dataclass(frozen=True)
class ToolArgument:
    name: str
    schema: Any
    required: bool


def list_arguments(tool: ToolSchema) -> list[ToolArgument]:
    """Properties of a tool's parameters, in their order.  Others that the schema may allow are never given."""
    schema = schemas.resolve_references(tool.parameters, tool.parameters) or {}
    names, properties = schemas.list_required_names(schema), schemas.get_typed(schema, "properties", dict)
    return [ToolArgument(name, part, name in names) for name, part in properties.items() if part is not False]


# ---- allowed values


@dataclass(frozen=True)
class AllowedValues:
    """All that a schema's unions allow, taken together."""

    patterns: list[str]  # of text
    constants: list[Any]  # scalars that are listed
    json_schemas: list[Schema]  # to be written as JSON

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
    allowed = AllowedValues([], [], [])
    for branch in _iter_branches(schema, parameters):
        if (values := schemas.list_values(branch)) is not None:
            allowed.constants.extend(value for value in values if isinstance(value, _SCALARS))
            if nested := [value for value in values if not isinstance(value, _SCALARS)]:
                allowed.json_schemas.append({"enum": nested})
        elif branch.get("type") == "null":
            allowed.constants.append(None)
        elif _can_be_text(branch, parameters):
            allowed.patterns.append(build_text_pattern(branch))
        else:
            allowed.json_schemas.append(branch)
    return allowed


def _iter_branches(schema: Any, parameters: Schema) -> Iterator[Schema]:
    """Branches of a union and of those within it; each once, for they may refer to each other in any way."""
    waiting, seen = [schema], set[int]()
    while waiting:
        branch = schemas.resolve_references(waiting.pop(), parameters)
        if branch is None:
            yield {}
        elif id(branch) not in seen:
            seen.add(id(branch))
            types = schemas.get_typed(branch, "type", list)
            if union := _find_union_branches(branch):
                waiting.extend(reversed(union))
            elif types and not {"enum", "const"} & branch.keys():
                yield from ({**branch, "type": name} for name in types)
            else:
                yield branch


def _find_union_branches(schema: Schema) -> list[Any]:
    """Branches of a schema that is a union and nothing else."""
    keywords = schema.keys() - _ANNOTATION_KEYWORDS
    branches = schemas.get_typed(schema, min(keywords), list) if len(keywords) == 1 else []
    return branches if keywords <= {"anyOf", "oneOf"} or (keywords == {"allOf"} and len(branches) == 1) else []


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
    lark: LarkBuilder, allowed: AllowedValues, tool: ToolSchema, end: str, excluded: tuple[str, ...] = ()
) -> str:
    """Write the allowed values and `end`, the tag after them.  `excluded`: other tags that text may not contain."""
    if allowed.patterns:
        return lark.text_until(end, excluded=excluded, pattern=allowed.unquoted_pattern)
    options = [*map(lark.literal, allowed.string_constants), *write_json_values(lark, allowed, tool)]
    return f"{lark.one_of(options)} {lark.literal(end)}"


def write_string_value(lark: LarkBuilder, allowed: AllowedValues, end: str, excluded: tuple[str, ...] = ()) -> str:
    """Write the allowed strings and the tag after them; "" for none."""
    if allowed.patterns:
        return lark.text_until(end, excluded=excluded, pattern=allowed.string_pattern)
    if not allowed.string_constants:
        return ""
    return f"{lark.one_of(map(lark.literal, allowed.string_constants))} {lark.literal(end)}"


def write_json_values(lark: LarkBuilder, allowed: AllowedValues, tool: ToolSchema) -> list[str]:
    """Write all allowed values but strings, as JSON."""
    constants = [quote_literal(json.dumps(value)) for value in allowed.constants if not isinstance(value, str)]
    return [*constants, *(write_json_value(lark, schema, tool) for schema in allowed.json_schemas)]


def write_json_value(lark: LarkBuilder, schema: Schema, tool: ToolSchema) -> str:
    """Write a part of the tool's parameters as JSON, with its references intact."""
    parameters = tool.parameters
    if all(reference.startswith(_DEFINITION_PREFIXES) for reference in schemas.collect_references(parameters)):
        shared = {key: parameters[key] for key in _DEFINITION_KEYS if key in parameters}
    else:
        schema = schemas.rebase_references(schema, _WHOLE_SCHEMA_REFERENCE)
        shared = {"$defs": {"whole": schemas.rebase_references(parameters, _WHOLE_SCHEMA_REFERENCE)}}
    return lark.json({**schema, **shared})
