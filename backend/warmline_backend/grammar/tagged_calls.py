"""Calls whose arguments stand one by one, between tags.  Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from warmline_backend.grammar.lark import Lark, optional, quoted
from warmline_backend.grammar.schemas import JSON_TYPES
from warmline_backend.grammar.style import Offered, Style, each, repeated
from warmline_backend.grammar.values import (
    Argument,
    arguments_of,
    is_text,
    may_be_text,
    sequence_of,
    tagged_value,
    text_pattern,
    words_of,
)
from warmline_backend.schema_references import resolve


@dataclass(frozen=True)
class _Tags:
    """How a tagged call is written: `{}` is the name, a form feed a line break that some models leave out."""

    start: str
    argument: str  # before an argument's value
    argument_end: str
    end: str
    banned: tuple[str, ...]  # tags that text may not contain
    empty: str = ""  # how a call without arguments is written, where that is different: all of it


def _tagged(tags: _Tags) -> Callable[[Lark, Sequence[Offered]], str]:
    def written(lark: Lark, tools: Sequence[Offered]) -> str:
        return each(lark, tools, lambda tool: _tagged_call(lark, tags, tool))

    return written


def _tagged_call(lark: Lark, tags: _Tags, tool: Offered) -> str:
    def argument(one: Argument) -> str:
        end, gap, _ = tags.argument_end.partition("\f")
        value = tagged_value(lark, one.schema, tool.parameters, end=end, without=tags.banned, lenient=tool.lenient)
        return f"{_spaced(lark, tags.argument.format(one.name))} {value} {_spaced(lark, gap)}"

    arguments = list(arguments_of(tool.parameters))
    if not arguments and tags.empty:
        return lark.literal(tags.empty.format(tool.name))
    given = sequence_of(iter(arguments), argument)
    return f"{_spaced(lark, tags.start.format(tool.name))} {given} {_spaced(lark, tags.end)}"


def _spaced(lark: Lark, text: str) -> str:
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


def _dsml(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    """Each argument says whether it is text."""
    mark = "｜DSML｜"  # noqa: RUF001
    banned = (f"</{mark}invoke>",)

    def argument(tool: Offered, one: Argument) -> str:
        text = is_text(one.schema, tool.parameters)
        end = f"</{mark}parameter>"
        value = tagged_value(lark, one.schema, tool.parameters, end=end, without=banned, lenient=tool.lenient)
        head = lark.literal(f'<{mark}parameter name="{one.name}" string="{str(text).lower()}">')
        return f"{head} {value} {quoted(chr(10))}"

    def call(tool: Offered) -> str:
        given = sequence_of(arguments_of(tool.parameters), lambda one: argument(tool, one))
        head, end = f'<{mark}invoke name="{tool.name}">\n', f"</{mark}invoke>\n"
        return f"{lark.literal(head)} {given} {lark.literal(end)}"

    calls = repeated(each(lark, tools, call), several)
    start, end = f"<{mark}function_calls>\n", f"</{mark}function_calls>"
    return f"{lark.literal(start)} {calls} {lark.literal(end)}"


def _by_one(tags: _Tags, between: str) -> Style:
    """Each call has markers of its own."""

    def written(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
        return repeated(_tagged(tags)(lark, tools), several, between)

    return written


def _in_section(start: str, tags: _Tags, end: str) -> Style:
    """One pair of markers holds all calls."""

    def written(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
        calls = repeated(_tagged(tags)(lark, tools), several)
        return f"{lark.literal(start)} {calls} {lark.literal(end)}"

    return written


def _minicpm5(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    def argument(tool: Offered, one: Argument) -> str:
        head, end = f'<param name="{one.name}">', "</param>"
        found = resolve(one.schema, tool.parameters) or {}
        if words_of(found) is not None or not may_be_text(found, tool.parameters):
            value = tagged_value(lark, one.schema, tool.parameters, end=end, without=(), lenient=tool.lenient)
            return f"{quoted(head)} {value}"
        pattern = text_pattern(found)
        plain = lark.terminal(f"/[^<&\\n]*/ & /{pattern}/")
        held = lark.text_up_to(f"]]>{end}", without=("]]>",), pattern=pattern)
        quoted_text = f"{quoted('<![CDATA[')} {held}"
        return f"{quoted(head)} ({plain} {quoted(end)} | {quoted_text})"

    def call(tool: Offered) -> str:
        given = sequence_of(arguments_of(tool.parameters), lambda one: argument(tool, one))
        head, end = f'<function name="{tool.name}">', "</function>"
        return f"{lark.literal(head)} {given} {lark.literal(end)}"

    return repeated(each(lark, tools, call), several, optional(r'"\n"'))


def _kimi_k3(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    """Each argument says of what type it is."""
    end = "<|close|>argument<|sep|>"

    def typed(tool: Offered, one: Argument, kind: str, schema: Any) -> str:
        head = f'<|open|>argument key="{one.name}" type="{"number" if kind == "integer" else kind}"<|sep|>'
        value = tagged_value(lark, schema, tool.parameters, end=end, without=(), lenient=tool.lenient)
        return f"{lark.literal(head)} {value}"

    def argument(tool: Offered, one: Argument) -> str:
        found = resolve(one.schema, tool.parameters) or {}
        kinds = found.get("type")
        if is_text(one.schema, tool.parameters) and not isinstance(kinds, list):
            return typed(tool, one, "string", one.schema)
        kinds = [kinds] if isinstance(kinds, str) else kinds or JSON_TYPES
        return lark.one_of(typed(tool, one, kind, {**found, "type": kind}) for kind in kinds)

    def call(tool: Offered) -> str:
        head, middle = f'<|open|>call tool="{tool.name}" index="', '"<|sep|>'
        given = sequence_of(arguments_of(tool.parameters), lambda one: argument(tool, one))
        begun = f"{lark.literal(head)} /[1-9][0-9]{{0,2}}/ {lark.literal(middle)}"
        return f"{begun} {given} {lark.literal('<|close|>call<|sep|>')}"

    calls = repeated(each(lark, tools, call), several)
    return f"{lark.literal('<|open|>tools<|sep|>')} {calls} {lark.literal('<|close|>tools<|sep|>')}"


TAGGED: dict[str, Style] = {
    "deepseek_v32": _dsml,
    "seed_oss": _by_one(_SEED, r'"\n"'),
    "qwen3_coder": _by_one(_QWEN3_CODER, r'"\n"'),
    "glm47": _by_one(_GLM, r'("\n")?'),
    "laguna": _by_one(_GLM, r'("\n")?'),
    "longcat": _by_one(_LONGCAT, r'"\n"'),
    "minimax_m2": _in_section("<minimax:tool_call>\n", _MINIMAX, "</minimax:tool_call>"),
    "muse_spark": _in_section("<atem:function_calls>\n", _MUSE, "</atem:function_calls>"),
    "minicpm5": _minicpm5,
    "kimi_k3": _kimi_k3,
}
