"""Calls whose arguments stand one by one, between tags.  Pure."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from warmline_backend.structured_output.base import ToolCallGrammar, ToolSchema, choose_tool, repeat_call
from warmline_backend.structured_output.lark import LarkBuilder, optional, quote_literal
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
from warmline_backend.tool_parsers.argument_types import find_possible_types


@dataclass(frozen=True)
class _Tags:
    """How a tagged call is written: `{}` is the name, a form feed a line break that some models leave out."""

    start: str
    argument: str  # before an argument's value
    argument_end: str
    end: str
    banned: tuple[str, ...]  # tags that text may not contain
    empty: str = ""  # how a call without arguments is written, where that is different: all of it


def _make_call_writer(tags: _Tags) -> Callable[[LarkBuilder, Sequence[ToolSchema]], str]:
    def written(lark: LarkBuilder, tools: Sequence[ToolSchema]) -> str:
        return choose_tool(lark, tools, lambda tool: _write_tagged_call(lark, tags, tool))

    return written


def _write_tagged_call(lark: LarkBuilder, tags: _Tags, tool: ToolSchema) -> str:
    def argument(one: ToolArgument) -> str:
        end, gap, _ = tags.argument_end.partition("\f")
        value = write_tagged_value(
            lark, one.schema, tool.parameters, end=end, excluded=tags.banned, lenient=tool.lenient
        )
        return f"{_write_line_breaks(lark, tags.argument.format(one.name))} {value} {_write_line_breaks(lark, gap)}"

    arguments = list(iter_arguments(tool.parameters))
    if not arguments and tags.empty:
        return lark.literal(tags.empty.format(tool.name))
    given = join_arguments(iter(arguments), argument)
    return f"{_write_line_breaks(lark, tags.start.format(tool.name))} {given} {_write_line_breaks(lark, tags.end)}"


def _write_line_breaks(lark: LarkBuilder, text: str) -> str:
    """`text` with its form feeds as line breaks that may be left out."""
    return r' ("\n")? '.join(lark.literal(part) for part in text.split("\f"))


_QWEN3_CODER = _Tags(
    "<tool_call>\n<function={}>\n",
    "<parameter={}>\n",
    "\n</parameter>\n",
    "</function>\n</tool_call>",
    ("</parameter>", "</function>", "</tool_call>"),
)
_SEED = replace(
    _QWEN3_CODER,
    start="<seed:tool_call>\n<function={}>\n",
    end="</function>\n</seed:tool_call>",
    banned=("</parameter>", "</function>", "</seed:tool_call>"),
)
_GLM = _Tags(
    "<tool_call>{}\f",
    "<arg_key>{}</arg_key>\f<arg_value>",
    "</arg_value>\f",
    "</tool_call>",
    ("</arg_key>", "<arg_key>", "</tool_call>"),
)
_LONGCAT = _Tags(
    "<longcat_tool_call>{}\n",
    "<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>",
    "</longcat_arg_value>\n",
    "</longcat_tool_call>",
    ("<longcat_arg_key>", "</longcat_arg_key>", "</longcat_tool_call>"),
    empty='<longcat_tool_call>{{"name": "{}", "arguments": {{}}}}</longcat_tool_call>',
)
_MINIMAX = _Tags(
    '<invoke name="{}">\n',
    '<parameter name="{}">',
    "</parameter>\n",
    "</invoke>\n",
    ("</invoke>", "</minimax:tool_call>"),
)
_MUSE = _Tags(
    '<atem:invoke name="{}">\n',
    '<atem:parameter name="{}">',
    "</atem:parameter>\n",
    "</atem:invoke>\n",
    ("</atem:invoke>", "</atem:function_calls>"),
)


def _dsml(lark: LarkBuilder, tools: Sequence[ToolSchema], several: bool) -> str:
    """Each argument says whether it is text."""
    mark = "｜DSML｜"  # noqa: RUF001
    banned = (f"</{mark}invoke>",)

    def head(one: ToolArgument, is_string: str) -> str:
        return lark.literal(f'<{mark}parameter name="{one.name}" string="{is_string}">')

    def argument(tool: ToolSchema, one: ToolArgument) -> str:
        end, value = f"</{mark}parameter>", collect_allowed_values(one.schema, tool.parameters)
        string = write_string_value(lark, value, end, banned)
        others = write_json_values(lark, value, tool.parameters, tool.lenient)
        options = [f"{head(one, 'true')} {string}"] if string else []
        if others:
            options.append(f"{head(one, 'false')} {lark.one_of(others)} {lark.literal(end)}")
        return f"{lark.one_of(options)} {quote_literal(chr(10))}"

    def call(tool: ToolSchema) -> str:
        given = join_arguments(iter_arguments(tool.parameters), lambda one: argument(tool, one))
        start, end = f'<{mark}invoke name="{tool.name}">\n', f"</{mark}invoke>\n"
        return f"{lark.literal(start)} {given} {lark.literal(end)}"

    calls = repeat_call(choose_tool(lark, tools, call), several)
    start, end = f"<{mark}function_calls>\n", f"</{mark}function_calls>"
    return f"{lark.literal(start)} {calls} {lark.literal(end)}"


def _make_separate_calls(tags: _Tags, separator: str) -> ToolCallGrammar:
    """Each call has markers of its own."""

    def written(lark: LarkBuilder, tools: Sequence[ToolSchema], several: bool) -> str:
        return repeat_call(_make_call_writer(tags)(lark, tools), several, separator)

    return written


def _make_section_calls(start: str, tags: _Tags, end: str) -> ToolCallGrammar:
    """One pair of markers holds all calls."""

    def written(lark: LarkBuilder, tools: Sequence[ToolSchema], several: bool) -> str:
        calls = repeat_call(_make_call_writer(tags)(lark, tools), several)
        return f"{lark.literal(start)} {calls} {lark.literal(end)}"

    return written


def _minicpm5(lark: LarkBuilder, tools: Sequence[ToolSchema], several: bool) -> str:
    def argument(tool: ToolSchema, one: ToolArgument) -> str:
        head, end = f'<param name="{one.name}">', "</param>"
        value = collect_allowed_values(one.schema, tool.parameters)
        if not value.patterns:
            written = write_tagged_value(lark, one.schema, tool.parameters, end=end, excluded=(), lenient=tool.lenient)
            return f"{quote_literal(head)} {written}"
        plain = lark.add_terminal(f"/[^<&\\n]*/ & /{value.unquoted_pattern}/")
        held = lark.text_until(f"]]>{end}", excluded=("]]>",), pattern=value.string_pattern)
        quoted_text = f"{quote_literal('<![CDATA[')} {held}"
        return f"{quote_literal(head)} ({plain} {quote_literal(end)} | {quoted_text})"

    def call(tool: ToolSchema) -> str:
        given = join_arguments(iter_arguments(tool.parameters), lambda one: argument(tool, one))
        head, end = f'<function name="{tool.name}">', "</function>"
        return f"{lark.literal(head)} {given} {lark.literal(end)}"

    return repeat_call(choose_tool(lark, tools, call), several, optional(r'"\n"'))


def _kimi_k3(lark: LarkBuilder, tools: Sequence[ToolSchema], several: bool) -> str:
    """Each argument says of what type it is."""
    end = "<|close|>argument<|sep|>"

    def head(one: ToolArgument, kind: str) -> str:
        return lark.literal(f'<|open|>argument key="{one.name}" type="{kind}"<|sep|>')

    def argument(tool: ToolSchema, one: ToolArgument) -> str:
        value = collect_allowed_values(one.schema, tool.parameters)
        kinds = {"string": write_string_value(lark, value, end)} | {
            kind: f"{lark.one_of(options)} {lark.literal(end)}"
            for kind, options in _group_by_type(lark, value, tool).items()
        }
        return lark.one_of(f"{head(one, kind)} {written}" for kind, written in kinds.items() if written)

    def call(tool: ToolSchema) -> str:
        start, middle = f'<|open|>call tool="{tool.name}" index="', '"<|sep|>'
        given = join_arguments(iter_arguments(tool.parameters), lambda one: argument(tool, one))
        begun = f"{lark.literal(start)} /[1-9][0-9]{{0,2}}/ {lark.literal(middle)}"
        return f"{begun} {given} {lark.literal('<|close|>call<|sep|>')}"

    calls = repeat_call(choose_tool(lark, tools, call), several)
    return f"{lark.literal('<|open|>tools<|sep|>')} {calls} {lark.literal('<|close|>tools<|sep|>')}"


def _group_by_type(lark: LarkBuilder, allowed: AllowedValues, tool: ToolSchema) -> dict[str, list[str]]:
    """What is no string as JSON, by its type; an integer is a number."""
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


TAGGED_TOOL_CALL_GRAMMARS: dict[str, ToolCallGrammar] = {
    "deepseek_v32": _dsml,
    "seed_oss": _make_separate_calls(_SEED, r'"\n"'),
    "qwen3_coder": _make_separate_calls(_QWEN3_CODER, r'"\n"'),
    "glm47": _make_separate_calls(_GLM, r'("\n")?'),
    "laguna": _make_separate_calls(_GLM, r'("\n")?'),
    "longcat": _make_separate_calls(_LONGCAT, r'"\n"'),
    "minimax_m2": _make_section_calls("<minimax:tool_call>\n", _MINIMAX, "</minimax:tool_call>"),
    "muse_spark": _make_section_calls("<atem:function_calls>\n", _MUSE, "</atem:function_calls>"),
    "minicpm5": _minicpm5,
    "kimi_k3": _kimi_k3,
}
