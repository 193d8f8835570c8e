"""How each model family writes tool calls, as grammars.  Pure.

A style is keyed by the name of its `output.formats.ToolFormat`.  It writes all of an answer's calls, from the marker
that begins the first one; what a style can't write it refuses with CannotWrite, which says why.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from warmline_backend.grammar.asked import Tool
from warmline_backend.grammar.gemma import Notation, names_in
from warmline_backend.grammar.lark import Lark, listed, optional, quoted
from warmline_backend.grammar.schemas import Schema, resolve
from warmline_backend.grammar.values import (
    Argument,
    arguments_of,
    json_value,
    may_be_text,
    sequence_of,
    tagged_value,
    text_pattern,
)


class CannotWrite(Exception):
    """A tool or an argument has no form in this family's calls."""


@dataclass(frozen=True)
class Offered:
    """A tool with parameters that are fit for a grammar."""

    tool: Tool
    parameters: Schema

    @property
    def name(self) -> str:
        return self.tool.name

    @property
    def lenient(self) -> bool:
        return not self.tool.strict


Style = Callable[[Lark, Sequence[Offered], bool], str]
"""(grammar, tools, whether there may be several calls) -> an expression"""


def _repeated(one: str, several: bool, between: str = "") -> str:
    return f"{one} ({between} {one})*" if several else one


def _each(lark: Lark, tools: Sequence[Offered], written: Callable[[Offered], str]) -> str:
    return lark.one_of(written(tool) for tool in tools)


def _arguments(lark: Lark, tool: Offered) -> str:
    return lark.json(tool.parameters, lenient=tool.lenient)


# ---- JSON


def _hermes(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    def call(tool: Offered) -> str:
        head, end = f'<tool_call>\n{{"name": {quoted(tool.name)}, "arguments": ', "}\n</tool_call>"
        return f"{lark.literal(head)} {_arguments(lark, tool)} {lark.literal(end)}"

    return _repeated(_each(lark, tools, call), several, r'"\n"')


def _mistral(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    """Newer ones write a header a call, older ones one list."""
    if lark.is_marker("[ARGS]"):
        return _repeated(_each(lark, tools, lambda tool: _headed(lark, tool)), several)
    calls = _repeated(_each(lark, tools, lambda tool: _object(lark, tool, "arguments")), several, quoted(", "))
    return f"{lark.literal('[TOOL_CALLS]')} {optional(quoted(' '))} {quoted('[')} {calls} {quoted(']')}"


def _headed(lark: Lark, tool: Offered) -> str:
    return f"{lark.literal(f'[TOOL_CALLS]{tool.name}[ARGS]')} {_arguments(lark, tool)}"


def _object(lark: Lark, tool: Offered, key: str) -> str:
    head = f'{{"name": {quoted(tool.name)}, "{key}": '
    return f"{lark.literal(head)} {_arguments(lark, tool)} {quoted('}')}"


def _llama3(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    return _each(lark, tools, lambda tool: _object(lark, tool, "parameters"))


def _kimi_k2(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    def call(tool: Offered) -> str:
        head = f"{lark.literal(f'<|tool_call_begin|>functions.{tool.name}:')} /[0-9]{{1,3}}/"
        body = f"{lark.literal('<|tool_call_argument_begin|>')} {_arguments(lark, tool)}"
        return f"{head} {body} {lark.literal('<|tool_call_end|>')}"

    calls = _repeated(_each(lark, tools, call), several)
    return f"{lark.literal('<|tool_calls_section_begin|>')} {calls} {lark.literal('<|tool_calls_section_end|>')}"


def _harmony(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    """One call an answer: it ends the turn."""

    def call(tool: Offered) -> str:
        head = lark.literal(f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>")
        return f"{head} {_arguments(lark, tool)}"

    return _each(lark, tools, call)


# ---- tags around every argument


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
        return _each(lark, tools, lambda tool: _tagged_call(lark, tags, tool))

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


def _by_one(tags: _Tags, between: str) -> Style:
    """Each call has markers of its own."""

    def written(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
        return _repeated(_tagged(tags)(lark, tools), several, between)

    return written


def _in_section(start: str, tags: _Tags, end: str) -> Style:
    """One pair of markers holds all calls."""

    def written(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
        calls = _repeated(_tagged(tags)(lark, tools), several)
        return f"{lark.literal(start)} {calls} {lark.literal(end)}"

    return written


def _minicpm5(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    def argument(tool: Offered, one: Argument) -> str:
        head, end = f'<param name="{one.name}">', "</param>"
        if not may_be_text(resolve(one.schema, tool.parameters) or {}, tool.parameters):
            value = tagged_value(lark, one.schema, tool.parameters, end=end, without=(), lenient=tool.lenient)
            return f"{quoted(head)} {value}"
        pattern = text_pattern(resolve(one.schema, tool.parameters) or {})
        plain = lark.terminal(f"/[^<&\\n]*/ & /{pattern}/")
        held = lark.text_up_to(f"]]>{end}", without=("]]>",), pattern=pattern)
        quoted_text = f"{quoted('<![CDATA[')} {held}"
        return f"{quoted(head)} ({plain} {quoted(end)} | {quoted_text})"

    def call(tool: Offered) -> str:
        given = sequence_of(arguments_of(tool.parameters), lambda one: argument(tool, one))
        head, end = f'<function name="{tool.name}">', "</function>"
        return f"{quoted(head)} {given} {quoted(end)}"

    return _repeated(_each(lark, tools, call), several, optional(r'"\n"'))


def _kimi_k3(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    def call(tool: Offered) -> str:
        head, number = f'<|open|>call tool={quoted(tool.name)} index="', "/[1-9][0-9]{0,2}/"
        middle, end = '"<|sep|><|open|>json type="object"<|sep|>', "<|close|>json<|sep|><|close|>call<|sep|>"
        return f"{lark.literal(head)} {number} {lark.literal(middle)} {_arguments(lark, tool)} {lark.literal(end)}"

    calls = _repeated(_each(lark, tools, call), several)
    return f"{lark.literal('<|open|>tools<|sep|>')} {calls} {lark.literal('<|close|>tools<|sep|>')}"


# ---- words of their own


def _identifiers(tool: Offered) -> Iterator[Argument]:
    for argument in arguments_of(tool.parameters):
        if argument.name.isidentifier():
            yield argument
        elif argument.required:
            raise CannotWrite(f"its calls can't name the argument {quoted(argument.name)}")


def _pythonic(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    def call(tool: Offered) -> str:
        def item(one: Argument) -> str:
            return f"{quoted(one.name + '=')} {json_value(lark, one.schema, tool.parameters, tool.lenient)}"

        items = [(one.required, item(one)) for one in _identifiers(tool)]
        return f"{quoted(tool.name + '(')} {listed(lark, items, ', ')} {quoted(')')}"

    if any(not part.isidentifier() for tool in tools for part in tool.name.split(".")):
        raise CannotWrite("its calls name functions as Python does; send names of letters, digits and underscores")
    calls = _repeated(_each(lark, tools, call), several, quoted(", "))
    return f"{lark.literal('<|tool_call_start|>[')} {calls} {lark.literal(']<|tool_call_end|>')}"


def _gemma(start: str, quote: str, end: str, without: tuple[str, ...] = ()) -> Style:
    """Calls side by side, each between markers of its own."""

    def written(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
        def call(tool: Offered) -> str:
            if unnamed := names_in(tool.parameters):
                raise CannotWrite(f"its calls can't name the argument {quoted(unnamed[0])}")
            schema = resolve(tool.parameters, tool.parameters) or {}
            arguments = Notation(lark, tool.parameters, quote, without).object(schema)
            return f"{lark.literal(f'{start}call:{tool.name}')} {arguments} {lark.literal(end)}"

        return _repeated(_each(lark, tools, call), several)

    return written


STYLES: dict[str, Style] = {
    "gemma4": _gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
    "function_gemma": _gemma("<start_function_call>", "<escape>", "<end_function_call>", ("}",)),
    "json_tools": _hermes,
    "mistral": _mistral,
    "llama3": _llama3,
    "kimi_k2": _kimi_k2,
    "harmony": _harmony,
    "qwen3_coder": _by_one(_QWEN3_CODER, r'"\n"'),
    "glm47": _by_one(_GLM, ""),
    "laguna": _by_one(_GLM, ""),
    "longcat": _by_one(_LONGCAT, r'"\n"'),
    "minimax_m2": _in_section("<minimax:tool_call>\n", _MINIMAX, "</minimax:tool_call>"),
    "muse_spark": _in_section("<atem:function_calls>\n", _MUSE, "</atem:function_calls>"),
    "minicpm5": _minicpm5,
    "kimi_k3": _kimi_k3,
    "pythonic": _pythonic,
}
