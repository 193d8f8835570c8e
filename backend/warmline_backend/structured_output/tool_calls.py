"""How each model family writes tool calls, as grammars.  Pure.

A style is keyed by the name of its `output.formats.ToolFormat`.  It writes all of an answer's calls, from the marker
that begins the first one; what a style can't write it refuses with CannotWrite, which says why.
"""

from collections.abc import Iterator, Sequence

from warmline_backend.request.json_refs import resolve
from warmline_backend.structured_output.base import CannotWrite, Offered, Style, arguments_json, each, repeated
from warmline_backend.structured_output.lark import Lark, listed, optional, quoted
from warmline_backend.structured_output.literal_values import Argument, arguments_of
from warmline_backend.structured_output.literals import PYTHON, Values, gemma, unwritable_names
from warmline_backend.structured_output.tagged_tool_calls import TAGGED

# ---- JSON


def _hermes(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    def call(tool: Offered) -> str:
        head, end = f'<tool_call>\n{{"name": {quoted(tool.name)}, "arguments": ', "}\n</tool_call>"
        return f"{lark.literal(head)} {arguments_json(lark, tool)} {lark.literal(end)}"

    return repeated(each(lark, tools, call), several, r'"\n"')


def _mistral(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    """Newer ones write a header a call, older ones one list."""
    if lark.is_marker("[ARGS]"):
        return repeated(each(lark, tools, lambda tool: _headed(lark, tool)), several)
    return _in_list("[TOOL_CALLS]", "")(lark, tools, several)


def _headed(lark: Lark, tool: Offered) -> str:
    return f"{lark.literal(f'[TOOL_CALLS]{tool.name}[ARGS]')} {arguments_json(lark, tool)}"


def _in_list(start: str, end: str) -> Style:
    """All calls are one JSON list."""

    def written(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
        calls = repeated(each(lark, tools, lambda tool: _object(lark, tool, "arguments")), several, quoted(", "))
        return f"{lark.literal(start)} {optional(quoted(' '))} {quoted('[')} {calls} {lark.literal(']' + end)}"

    return written


def _object(lark: Lark, tool: Offered, key: str) -> str:
    head = f'{{"name": {quoted(tool.name)}, "{key}": '
    return f"{lark.literal(head)} {arguments_json(lark, tool)} {quoted('}')}"


def _llama3(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    return repeated(each(lark, tools, lambda tool: _object(lark, tool, "parameters")), several, quoted("; "))


def _kimi_k2(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    def call(tool: Offered) -> str:
        head = f"{lark.literal(f'<|tool_call_begin|>functions.{tool.name}:')} /[0-9]{{1,3}}/"
        body = f"{lark.literal('<|tool_call_argument_begin|>')} {arguments_json(lark, tool)}"
        return f"{head} {body} {lark.literal('<|tool_call_end|>')}"

    calls = repeated(each(lark, tools, call), several)
    return f"{lark.literal('<|tool_calls_section_begin|>')} {calls} {lark.literal('<|tool_calls_section_end|>')}"


def _deepseek_v3(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    def call(tool: Offered) -> str:
        head = lark.literal(f"<｜tool▁call▁begin｜>{tool.name}<｜tool▁sep｜>")  # noqa: RUF001
        return f"{head} {arguments_json(lark, tool)} {lark.literal('<｜tool▁call▁end｜>')}"  # noqa: RUF001

    calls = repeated(each(lark, tools, call), several)
    start, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
    return f"{lark.literal(start)} {calls} {lark.literal(end)}"


def _command_a(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    def call(tool: Offered) -> str:
        head, name = '{"tool_call_id": "', f'", "tool_name": {quoted(tool.name)}, "parameters": '
        return f"{quoted(head)} /[0-9]{{1,3}}/ {quoted(name)} {arguments_json(lark, tool)} {quoted('}')}"

    calls = repeated(each(lark, tools, call), several, quoted(",\n    "))
    start, end = "<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"
    return f"{lark.literal(start)} {calls} {lark.literal(end)}"


def _harmony(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    """One call an answer: it ends the turn."""

    def call(tool: Offered) -> str:
        head = lark.literal(f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>")
        return f"{head} {arguments_json(lark, tool)}"

    return each(lark, tools, call)


# ---- words of their own


def _identifiers(tool: Offered) -> Iterator[Argument]:
    for argument in arguments_of(tool.parameters):
        if argument.name.isidentifier():
            yield argument
        elif argument.required:
            raise CannotWrite(f"its calls can't name the argument {quoted(argument.name)}")


def _pythonic(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
    def call(tool: Offered) -> str:
        values = Values(lark, PYTHON, tool.parameters)
        items = [(one.required, f"{quoted(one.name + '=')} {values.value(one.schema)}") for one in _identifiers(tool)]
        return f"{quoted(tool.name + '(')} {listed(lark, items, ', ')} {quoted(')')}"

    if any(not part.isidentifier() for tool in tools for part in tool.name.split(".")):
        raise CannotWrite("its calls name functions as Python does; send names of letters, digits and underscores")
    calls = repeated(each(lark, tools, call), several, quoted(", "))
    return f"{lark.literal('<|tool_call_start|>[')} {calls} {lark.literal(']<|tool_call_end|>')}"


def _gemma(start: str, quote: str, end: str, without: tuple[str, ...] = ()) -> Style:
    """Calls side by side, each between markers of its own."""

    def written(lark: Lark, tools: Sequence[Offered], several: bool) -> str:
        def call(tool: Offered) -> str:
            if names := unwritable_names(tool.parameters):
                raise CannotWrite(f"its calls can't name the argument {quoted(names[0])}")
            schema = resolve(tool.parameters, tool.parameters) or {}
            arguments = Values(lark, gemma(quote, without), tool.parameters).object(schema)
            return f"{lark.literal(f'{start}call:{tool.name}')} {arguments} {lark.literal(end)}"

        return repeated(each(lark, tools, call), several)

    return written


# One marker begins all calls of an answer.
SECTIONS = frozenset(
    (
        *("mistral", "phi4", "granite", "command_a", "kimi_k2", "kimi_k3", "minimax_m2", "muse_spark", "pythonic"),
        *("deepseek_v3", "deepseek_v32"),
    )
)

STYLES: dict[str, Style] = {
    **TAGGED,
    "gemma4": _gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
    "function_gemma": _gemma("<start_function_call>", "<escape>", "<end_function_call>", ("}",)),
    "json_tools": _hermes,
    "mistral": _mistral,
    "llama3": _llama3,
    "kimi_k2": _kimi_k2,
    "harmony": _harmony,
    "deepseek_v3": _deepseek_v3,
    "command_a": _command_a,
    "phi4": _in_list("<|tool_call|>", "<|/tool_call|>"),
    "granite": _in_list("<|tool_call|>", ""),
    "pythonic": _pythonic,
}
