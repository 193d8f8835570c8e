"""Grammars of tool calls, written from the syntax of a model family (`tool_parsers.registry.CallSyntax`).  Pure.

A grammar covers all of an answer's calls, from the marker that begins the first one.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from warmline_backend.request.schemas import resolve_references
from warmline_backend.structured_output.grammars import literal_values, literals
from warmline_backend.structured_output.grammars.lark import LarkBuilder, join_optional_items, quote_literal
from warmline_backend.structured_output.grammars.literal_values import AllowedValues, ToolSchema
from warmline_backend.tool_parsers.argument_types import find_possible_types
from warmline_backend.tool_parsers.registry import ArgumentSyntax, CallSyntax

_PATTERNS = {"%d": "/[0-9]{1,3}/", "%i": "/[1-9][0-9]{0,2}/", "%b": r'("\n")?', "%s": '(" ")?'}
_PATTERN_CODE = re.compile(f"({'|'.join(_PATTERNS)})")
_NAME_CODE = re.compile("%[nqk]")

ObjectWriter = Callable[[LarkBuilder, ArgumentSyntax, ToolSchema], str]  # of all arguments
TagWriter = Callable[[LarkBuilder, ArgumentSyntax, ToolSchema, str, AllowedValues], str]  # of one, by its name


class UnsupportedToolError(Exception):
    """A tool or an argument can't be written in this family's calls."""


def write_calls(lark: LarkBuilder, syntax: CallSyntax, tools: Sequence[ToolSchema], several: bool) -> str:
    """Expression of one call of `tools`, or of `several`.  Raises UnsupportedToolError."""
    if syntax.variant and syntax.variant[0] in lark.markers:
        syntax = syntax.variant[1]
    calls = lark.one_of(_write_call(lark, syntax, tool) for tool in tools)
    if several and not syntax.is_single:
        calls = f"{calls} ({_write_template(lark, syntax.separator)} {calls})*"
    return _join(_write_template(lark, syntax.start), calls, _write_template(lark, syntax.end))


def _write_call(lark: LarkBuilder, syntax: CallSyntax, tool: ToolSchema) -> str:
    if syntax.empty_call and not literal_values.list_arguments(tool):
        return _write_template(lark, syntax.empty_call, tool.name)
    head, _, end = syntax.call.partition("%a")
    write_object = _OBJECT_WRITERS.get(syntax.arguments.style, _write_tags)
    arguments = write_object(lark, syntax.arguments, tool)
    return _join(_write_template(lark, head, tool.name), arguments, _write_template(lark, end))


def _write_template(lark: LarkBuilder, template: str, name: str = "", kind: str = "") -> str:
    """Expression of a template of CallSyntax or ArgumentSyntax; "" for an empty one."""
    words = {"%n": name, "%q": quote_literal(name), "%k": kind}
    insert_words = partial(_NAME_CODE.sub, lambda code: words[code[0]])
    pieces = filter(None, _PATTERN_CODE.split(template))
    return _join(*(_PATTERNS.get(piece) or lark.literal(insert_words(piece)) for piece in pieces))


def _join(*expressions: str) -> str:
    return " ".join(filter(None, expressions))


# ---- arguments between tags of their own


def _write_tags(lark: LarkBuilder, syntax: ArgumentSyntax, tool: ToolSchema) -> str:
    """Tags of all arguments in their order, each optional unless required."""
    tags = []
    for argument in literal_values.list_arguments(tool):
        allowed = literal_values.collect_allowed_values(argument.schema, tool.parameters)
        tag = _TAG_WRITERS[syntax.style](lark, syntax, tool, argument.name, allowed)
        tags.append(tag if argument.required else f"({tag})?")
    return " ".join(tags)


def _write_tag(lark: LarkBuilder, syntax: ArgumentSyntax, tool: ToolSchema, name: str, allowed: AllowedValues) -> str:
    end, gap, _ = syntax.end.partition("%b")
    value = literal_values.write_tagged_value(lark, allowed, tool, end, syntax.banned)
    return _join(_write_template(lark, syntax.start, name), value, _write_template(lark, gap))


def _write_flagged(
    lark: LarkBuilder, syntax: ArgumentSyntax, tool: ToolSchema, name: str, allowed: AllowedValues
) -> str:
    """Tags of the kinds "true", for strings, and "false", for JSON."""
    end = syntax.end.removesuffix("\n")
    others = literal_values.write_json_values(lark, allowed, tool)
    values = {
        "true": literal_values.write_string_value(lark, allowed, end, syntax.banned),
        "false": f"{lark.one_of(others)} {lark.literal(end)}" if others else "",
    }
    return f'{_write_kinds(lark, syntax, name, values)} "\\n"'


def _write_typed(lark: LarkBuilder, syntax: ArgumentSyntax, tool: ToolSchema, name: str, allowed: AllowedValues) -> str:
    """Tags with the JSON type of the value as their kind."""
    values = {"string": literal_values.write_string_value(lark, allowed, syntax.end)}
    for kind, options in _group_by_type(lark, allowed, tool).items():
        values[kind] = f"{lark.one_of(options)} {lark.literal(syntax.end)}"
    return _write_kinds(lark, syntax, name, values)


def _write_kinds(lark: LarkBuilder, syntax: ArgumentSyntax, name: str, values: Mapping[str, str]) -> str:
    """Alternatives of a tag of a kind and its values; a kind without values is left out."""
    kinds = [kind for kind, value in values.items() if value]
    return lark.one_of(f"{_write_template(lark, syntax.start, name, kind)} {values[kind]}" for kind in kinds)


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
            value = literal_values.write_json_value(lark, {**schema, "type": kind}, tool)
            written.setdefault("number" if kind == "integer" else kind, []).append(value)
    return written


def _write_cdata(lark: LarkBuilder, syntax: ArgumentSyntax, tool: ToolSchema, name: str, allowed: AllowedValues) -> str:
    """Tags around text that is plain where it can be, and in a CDATA section else."""
    if not allowed.patterns:
        return _write_tag(lark, syntax, tool, name, allowed)
    plain = lark.add_terminal(f"/[^<&\\n]*/ & /{allowed.unquoted_pattern}/")
    quoted = lark.text_until(f"]]>{syntax.end}", excluded=("]]>",), pattern=allowed.string_pattern)
    value = f"({plain} {quote_literal(syntax.end)} | {quote_literal('<![CDATA[')} {quoted})"
    return f"{_write_template(lark, syntax.start, name)} {value}"


# ---- arguments as one object


def _write_json(lark: LarkBuilder, _: ArgumentSyntax, tool: ToolSchema) -> str:
    return lark.json(tool.parameters)


def _write_python(lark: LarkBuilder, _: ArgumentSyntax, tool: ToolSchema) -> str:
    if not all(part.isidentifier() for part in tool.name.split(".")):
        advice = "send names of letters, digits and underscores"
        raise UnsupportedToolError(f"its calls name functions as Python does; {advice}")
    writer = literals.LiteralWriter(lark, literals.PYTHON_NOTATION, tool.parameters)
    items = []
    for argument in literal_values.list_arguments(tool):
        if argument.name.isidentifier():
            value = writer.write_value(argument.schema)
            items.append((argument.required, f"{quote_literal(argument.name + '=')} {value}"))
        elif argument.required:
            raise UnsupportedToolError(f"its calls can't name the argument {quote_literal(argument.name)}")
    return join_optional_items(lark, items, ", ")


def _write_gemma(lark: LarkBuilder, syntax: ArgumentSyntax, tool: ToolSchema) -> str:
    if names := literals.find_unwritable_names(tool.parameters):
        raise UnsupportedToolError(f"its calls can't name the argument {quote_literal(names[0])}")
    notation = literals.create_gemma_notation(syntax.quote, syntax.banned)
    schema = resolve_references(tool.parameters, tool.parameters) or {}
    return literals.LiteralWriter(lark, notation, tool.parameters).write_object(schema)


_OBJECT_WRITERS: dict[str, ObjectWriter] = {"json": _write_json, "python": _write_python, "gemma": _write_gemma}
_TAG_WRITERS: dict[str, TagWriter] = {
    "tags": _write_tag,
    "flagged": _write_flagged,
    "typed": _write_typed,
    "cdata": _write_cdata,
}
