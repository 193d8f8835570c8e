"""Calls whose arguments stand one by one, between tags.  Pure."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from warmline_backend.structured_output.base import Offered, Style, each, repeated
from warmline_backend.structured_output.lark import Lark, optional, quoted
from warmline_backend.structured_output.literal_values import (
    Argument,
    Value,
    arguments_of,
    json_value,
    json_values,
    sequence_of,
    string_value,
    tagged_value,
    value_of,
)
from warmline_backend.tool_parsers.argument_types import possible_types


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

    def head(one: Argument, is_string: str) -> str:
        return lark.literal(f'<{mark}parameter name="{one.name}" string="{is_string}">')

    def argument(tool: Offered, one: Argument) -> str:
        end, value = f"</{mark}parameter>", value_of(one.schema, tool.parameters)
        string = string_value(lark, value, end, banned)
        others = json_values(lark, value, tool.parameters, tool.lenient)
        options = [f"{head(one, 'true')} {string}"] if string else []
        if others:
            options.append(f"{head(one, 'false')} {lark.one_of(others)} {lark.literal(end)}")
        return f"{lark.one_of(options)} {quoted(chr(10))}"

    def call(tool: Offered) -> str:
        given = sequence_of(arguments_of(tool.parameters), lambda one: argument(tool, one))
        start, end = f'<{mark}invoke name="{tool.name}">\n', f"</{mark}invoke>\n"
        return f"{lark.literal(start)} {given} {lark.literal(end)}"

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
        value = value_of(one.schema, tool.parameters)
        if not value.patterns:
            written = tagged_value(lark, one.schema, tool.parameters, end=end, without=(), lenient=tool.lenient)
            return f"{quoted(head)} {written}"
        plain = lark.terminal(f"/[^<&\\n]*/ & /{value.text}/")
        held = lark.text_up_to(f"]]>{end}", without=("]]>",), pattern=value.string)
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

    def head(one: Argument, kind: str) -> str:
        return lark.literal(f'<|open|>argument key="{one.name}" type="{kind}"<|sep|>')

    def argument(tool: Offered, one: Argument) -> str:
        value = value_of(one.schema, tool.parameters)
        kinds = {"string": string_value(lark, value, end)} | {
            kind: f"{lark.one_of(options)} {lark.literal(end)}" for kind, options in _by_kind(lark, value, tool).items()
        }
        return lark.one_of(f"{head(one, kind)} {written}" for kind, written in kinds.items() if written)

    def call(tool: Offered) -> str:
        start, middle = f'<|open|>call tool="{tool.name}" index="', '"<|sep|>'
        given = sequence_of(arguments_of(tool.parameters), lambda one: argument(tool, one))
        begun = f"{lark.literal(start)} /[1-9][0-9]{{0,2}}/ {lark.literal(middle)}"
        return f"{begun} {given} {lark.literal('<|close|>call<|sep|>')}"

    calls = repeated(each(lark, tools, call), several)
    return f"{lark.literal('<|open|>tools<|sep|>')} {calls} {lark.literal('<|close|>tools<|sep|>')}"


def _by_kind(lark: Lark, value: Value, tool: Offered) -> dict[str, list[str]]:
    """What is no string as JSON, by its type; an integer is a number."""
    written: dict[str, list[str]] = {}
    for word in value.words:
        if not isinstance(word, str):
            kind = "null" if word is None else "boolean" if isinstance(word, bool) else "number"
            written.setdefault(kind, []).append(quoted(json.dumps(word)))
    for schema in value.others:
        types = possible_types(schema, tool.parameters) - {"string"}
        for kind in sorted(types - ({"integer"} if "number" in types else set())):
            one = json_value(lark, {**schema, "type": kind}, tool.parameters, tool.lenient)
            written.setdefault("number" if kind == "integer" else kind, []).append(one)
    return written


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
