"""Grammars of tool calls, written from the syntax of a model family (`tool_parsers.registry.CallSyntax`).  Pure.

A grammar covers all of an answer's calls, from the marker that begins the first one.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from warmline_backend.request.json_refs import Schema, resolve_references
from warmline_backend.request.response_format import CallableTool
from warmline_backend.structured_output.lark import LarkBuilder, join_optional_items, quote_literal
from warmline_backend.structured_output.literal_values import (
    AllowedValues,
    ToolArgument,
    collect_allowed_values,
    iter_arguments,
    join_arguments,
    write_json_value,
    write_json_values,
    write_string_value,
    write_tagged_value,
)
from warmline_backend.structured_output.literals import (
    PYTHON_NOTATION,
    LiteralWriter,
    create_gemma_notation,
    find_unwritable_names,
)
from warmline_backend.tool_parsers.argument_types import find_possible_types
from warmline_backend.tool_parsers.registry import ArgumentSyntax, CallSyntax

_PATTERNS = {"%d": "/[0-9]{1,3}/", "%i": "/[1-9][0-9]{0,2}/", "%b": r'("\n")?', "%s": '(" ")?'}
_PATTERN_CODE = re.compile(f"({'|'.join(_PATTERNS)})")
_NAME_CODE = re.compile("%[nqk]")


class UnsupportedToolError(Exception):
    """A tool or an argument can't be written in this family's calls."""


@dataclass(frozen=True)
class ToolSchema:
    """A tool with parameters that are fit for a grammar."""

    tool: CallableTool
    parameters: Schema

    @property
    def name(self) -> str:
        return self.tool.name

    @property
    def lenient(self) -> bool:
        return not self.tool.strict


ArgumentWriter = Callable[[LarkBuilder, ArgumentSyntax, ToolSchema], str]


def write_calls(lark: LarkBuilder, syntax: CallSyntax, tools: Sequence[ToolSchema], several: bool) -> str:
    """Expression of one call of `tools`, or of `several`.  Raises UnsupportedToolError."""
    if syntax.variant and lark.is_marker(syntax.variant[0]):
        syntax = syntax.variant[1]
    calls = lark.one_of(_write_call(lark, syntax, tool) for tool in tools)
    if several and not syntax.is_single:
        calls = f"{calls} ({_write_template(lark, syntax.separator)} {calls})*"
    return _join(_write_template(lark, syntax.start), calls, _write_template(lark, syntax.end))


def _write_call(lark: LarkBuilder, syntax: CallSyntax, tool: ToolSchema) -> str:
    if syntax.empty_call and not any(iter_arguments(tool.parameters)):
        return _write_template(lark, syntax.empty_call, tool.name)
    head, _, end = syntax.call.partition("%a")
    arguments = _ARGUMENT_WRITERS[syntax.arguments.style](lark, syntax.arguments, tool)
    return _join(_write_template(lark, head, tool.name), arguments, _write_template(lark, end))


def _write_template(lark: LarkBuilder, template: str, name: str = "", kind: str = "") -> str:
    """Expression of a template of CallSyntax or ArgumentSyntax; "" for an empty one."""
    words = {"%n": name, "%q": quote_literal(name), "%k": kind}
    pieces = (piece for piece in _PATTERN_CODE.split(template) if piece)
    return _join(
        *(_PATTERNS.get(piece) or lark.literal(_NAME_CODE.sub(lambda m: words[m[0]], piece)) for piece in pieces)
    )


def _join(*expressions: str) -> str:
    return " ".join(filter(None, expressions))


# ---- arguments by style


def _write_json(lark: LarkBuilder, _: ArgumentSyntax, tool: ToolSchema) -> str:
    return lark.json(tool.parameters, lenient=tool.lenient)


def _write_tags(lark: LarkBuilder, syntax: ArgumentSyntax, tool: ToolSchema) -> str:
    end, gap, _ = syntax.end.partition("%b")

    def write_argument(argument: ToolArgument) -> str:
        value = write_tagged_value(
            lark, argument.schema, tool.parameters, end=end, excluded=syntax.banned, lenient=tool.lenient
        )
        return _join(_write_template(lark, syntax.start, argument.name), value, _write_template(lark, gap))

    return join_arguments(iter_arguments(tool.parameters), write_argument)


def _write_flagged(lark: LarkBuilder, syntax: ArgumentSyntax, tool: ToolSchema) -> str:
    """Tags whose kind is "true" for strings and "false" for JSON."""
    end = syntax.end.removesuffix("\n")

    def write_values(allowed: AllowedValues) -> dict[str, str]:
        others = write_json_values(lark, allowed, tool.parameters, tool.lenient)
        return {
            "true": write_string_value(lark, allowed, end, syntax.banned),
            "false": f"{lark.one_of(others)} {lark.literal(end)}" if others else "",
        }

    return _write_kinds(lark, syntax, tool, write_values, r'"\n"')


def _write_typed(lark: LarkBuilder, syntax: ArgumentSyntax, tool: ToolSchema) -> str:
    """Tags whose kind is the JSON type of the value."""

    def write_values(allowed: AllowedValues) -> dict[str, str]:
        return {"string": write_string_value(lark, allowed, syntax.end)} | {
            kind: f"{lark.one_of(options)} {lark.literal(syntax.end)}"
            for kind, options in _group_by_type(lark, allowed, tool).items()
        }

    return _write_kinds(lark, syntax, tool, write_values)


def _write_kinds(
    lark: LarkBuilder,
    syntax: ArgumentSyntax,
    tool: ToolSchema,
    write_values: Callable[[AllowedValues], Mapping[str, str]],
    gap: str = "",
) -> str:
    """Arguments as alternatives of a tag of a kind and its values; a kind without values is left out."""

    def write_argument(argument: ToolArgument) -> str:
        values = write_values(collect_allowed_values(argument.schema, tool.parameters))
        options = (
            f"{_write_template(lark, syntax.start, argument.name, kind)} {value}"
            for kind, value in values.items()
            if value
        )
        return _join(lark.one_of(options), gap)

    return join_arguments(iter_arguments(tool.parameters), write_argument)


def _group_by_type(lark: LarkBuilder, allowed: AllowedValues, tool: ToolSchema) -> dict[str, list[str]]:
    """JSON expressions of values that are no strings, by their type; an integer is a number."""
    written: dict[str, list[str]] = {}
    for word in allowed.constants:
        if not isinstance(word, str):
            kind = "null" if word is None else "boolean" if isinstance(word, bool) else "number"
            written.setdefault(kind, []).append(quote_literal(json.dumps(word)))
    for schema in allowed.json_schemas:
        types = find_possible_types(schema, tool.parameters) - {"string"}
        for kind in sorted(types - ({"integer"} if "number" in types else set())):
            one = write_json_value(lark, {**schema, "type": kind}, tool.parameters, tool.lenient)
            written.setdefault("number" if kind == "integer" else kind, []).append(one)
    return written


def _write_cdata(lark: LarkBuilder, syntax: ArgumentSyntax, tool: ToolSchema) -> str:
    """Tags around text that is plain where it can be, and in a CDATA section else."""

    def write_argument(argument: ToolArgument) -> str:
        head = _write_template(lark, syntax.start, argument.name)
        value = collect_allowed_values(argument.schema, tool.parameters)
        if not value.patterns:
            written = write_tagged_value(
                lark, argument.schema, tool.parameters, end=syntax.end, excluded=(), lenient=tool.lenient
            )
            return f"{head} {written}"
        plain = lark.add_terminal(f"/[^<&\\n]*/ & /{value.unquoted_pattern}/")
        quoted = lark.text_until(f"]]>{syntax.end}", excluded=("]]>",), pattern=value.string_pattern)
        return f"{head} ({plain} {quote_literal(syntax.end)} | {quote_literal('<![CDATA[')} {quoted})"

    return join_arguments(iter_arguments(tool.parameters), write_argument)


def _write_python(lark: LarkBuilder, _: ArgumentSyntax, tool: ToolSchema) -> str:
    if not all(part.isidentifier() for part in tool.name.split(".")):
        raise UnsupportedToolError(
            "its calls name functions as Python does; send names of letters, digits and underscores"
        )
    values = LiteralWriter(lark, PYTHON_NOTATION, tool.parameters)
    items = [
        (argument.required, f"{quote_literal(argument.name + '=')} {values.write_value(argument.schema)}")
        for argument in _iter_identifier_arguments(tool)
    ]
    return join_optional_items(lark, items, ", ")


def _iter_identifier_arguments(tool: ToolSchema) -> Iterator[ToolArgument]:
    for argument in iter_arguments(tool.parameters):
        if argument.name.isidentifier():
            yield argument
        elif argument.required:
            raise UnsupportedToolError(f"its calls can't name the argument {quote_literal(argument.name)}")


def _write_gemma(lark: LarkBuilder, syntax: ArgumentSyntax, tool: ToolSchema) -> str:
    if names := find_unwritable_names(tool.parameters):
        raise UnsupportedToolError(f"its calls can't name the argument {quote_literal(names[0])}")
    notation = create_gemma_notation(syntax.quote, syntax.banned)
    schema = resolve_references(tool.parameters, tool.parameters) or {}
    return LiteralWriter(lark, notation, tool.parameters).write_object(schema)


_ARGUMENT_WRITERS: dict[str, ArgumentWriter] = {
    "json": _write_json,
    "tags": _write_tags,
    "flagged": _write_flagged,
    "typed": _write_typed,
    "cdata": _write_cdata,
    "python": _write_python,
    "gemma": _write_gemma,
}
