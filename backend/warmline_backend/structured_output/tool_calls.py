"""How each model family writes tool calls, as grammars.  Pure.

A style is keyed by the name of its `output.formats.ToolFormat`.  It writes all of an answer's calls, from the marker
that begins the first one; what a style can't write it refuses with CannotWrite, which says why.
"""

from collections.abc import Iterator, Sequence

from warmline_backend.request.json_refs import resolve_references
from warmline_backend.structured_output.base import (
    ToolCallGrammar,
    ToolSchema,
    UnsupportedToolError,
    choose_tool,
    repeat_call,
    write_json_arguments,
)
from warmline_backend.structured_output.lark import LarkBuilder, join_optional_items, optional, quote_literal
from warmline_backend.structured_output.literal_values import ToolArgument, iter_arguments
from warmline_backend.structured_output.literals import (
    PYTHON_NOTATION,
    LiteralWriter,
    create_gemma_notation,
    find_unwritable_names,
)
from warmline_backend.structured_output.tagged_tool_calls import TAGGED_TOOL_CALL_GRAMMARS

# ---- JSON


def _hermes(lark: LarkBuilder, tools: Sequence[ToolSchema], several: bool) -> str:
    def call(tool: ToolSchema) -> str:
        head, end = f'<tool_call>\n{{"name": {quote_literal(tool.name)}, "arguments": ', "}\n</tool_call>"
        return f"{lark.literal(head)} {write_json_arguments(lark, tool)} {lark.literal(end)}"

    return repeat_call(choose_tool(lark, tools, call), several, r'"\n"')


def _mistral(lark: LarkBuilder, tools: Sequence[ToolSchema], several: bool) -> str:
    """Newer ones write a header a call, older ones one list."""
    if lark.is_marker("[ARGS]"):
        return repeat_call(choose_tool(lark, tools, lambda tool: _write_mistral_call(lark, tool)), several)
    return _make_list_calls("[TOOL_CALLS]", "")(lark, tools, several)


def _write_mistral_call(lark: LarkBuilder, tool: ToolSchema) -> str:
    return f"{lark.literal(f'[TOOL_CALLS]{tool.name}[ARGS]')} {write_json_arguments(lark, tool)}"


def _make_list_calls(start: str, end: str) -> ToolCallGrammar:
    """All calls are one JSON list."""

    def written(lark: LarkBuilder, tools: Sequence[ToolSchema], several: bool) -> str:
        calls = repeat_call(
            choose_tool(lark, tools, lambda tool: _write_json_call(lark, tool, "arguments")),
            several,
            quote_literal(", "),
        )
        return f"{lark.literal(start)} {optional(quote_literal(' '))} {quote_literal('[')} {calls} {lark.literal(']' + end)}"

    return written


def _write_json_call(lark: LarkBuilder, tool: ToolSchema, key: str) -> str:
    head = f'{{"name": {quote_literal(tool.name)}, "{key}": '
    return f"{lark.literal(head)} {write_json_arguments(lark, tool)} {quote_literal('}')}"


def _llama3(lark: LarkBuilder, tools: Sequence[ToolSchema], several: bool) -> str:
    return repeat_call(
        choose_tool(lark, tools, lambda tool: _write_json_call(lark, tool, "parameters")), several, quote_literal("; ")
    )


def _kimi_k2(lark: LarkBuilder, tools: Sequence[ToolSchema], several: bool) -> str:
    def call(tool: ToolSchema) -> str:
        head = f"{lark.literal(f'<|tool_call_begin|>functions.{tool.name}:')} /[0-9]{{1,3}}/"
        body = f"{lark.literal('<|tool_call_argument_begin|>')} {write_json_arguments(lark, tool)}"
        return f"{head} {body} {lark.literal('<|tool_call_end|>')}"

    calls = repeat_call(choose_tool(lark, tools, call), several)
    return f"{lark.literal('<|tool_calls_section_begin|>')} {calls} {lark.literal('<|tool_calls_section_end|>')}"


def _deepseek_v3(lark: LarkBuilder, tools: Sequence[ToolSchema], several: bool) -> str:
    def call(tool: ToolSchema) -> str:
        head = lark.literal(f"<｜tool▁call▁begin｜>{tool.name}<｜tool▁sep｜>")  # noqa: RUF001
        return f"{head} {write_json_arguments(lark, tool)} {lark.literal('<｜tool▁call▁end｜>')}"  # noqa: RUF001

    calls = repeat_call(choose_tool(lark, tools, call), several)
    start, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
    return f"{lark.literal(start)} {calls} {lark.literal(end)}"


def _command_a(lark: LarkBuilder, tools: Sequence[ToolSchema], several: bool) -> str:
    def call(tool: ToolSchema) -> str:
        head, name = '{"tool_call_id": "', f'", "tool_name": {quote_literal(tool.name)}, "parameters": '
        return f"{quote_literal(head)} /[0-9]{{1,3}}/ {quote_literal(name)} {write_json_arguments(lark, tool)} {quote_literal('}')}"

    calls = repeat_call(choose_tool(lark, tools, call), several, quote_literal(",\n    "))
    start, end = "<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"
    return f"{lark.literal(start)} {calls} {lark.literal(end)}"


def _harmony(lark: LarkBuilder, tools: Sequence[ToolSchema], several: bool) -> str:
    """One call an answer: it ends the turn."""

    def call(tool: ToolSchema) -> str:
        head = lark.literal(f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>")
        return f"{head} {write_json_arguments(lark, tool)}"

    return choose_tool(lark, tools, call)


# ---- words of their own


def _iter_identifier_arguments(tool: ToolSchema) -> Iterator[ToolArgument]:
    for argument in iter_arguments(tool.parameters):
        if argument.name.isidentifier():
            yield argument
        elif argument.required:
            raise UnsupportedToolError(f"its calls can't name the argument {quote_literal(argument.name)}")


def _pythonic(lark: LarkBuilder, tools: Sequence[ToolSchema], several: bool) -> str:
    def call(tool: ToolSchema) -> str:
        values = LiteralWriter(lark, PYTHON_NOTATION, tool.parameters)
        items = [
            (one.required, f"{quote_literal(one.name + '=')} {values.write_value(one.schema)}")
            for one in _iter_identifier_arguments(tool)
        ]
        return f"{quote_literal(tool.name + '(')} {join_optional_items(lark, items, ', ')} {quote_literal(')')}"

    if any(not part.isidentifier() for tool in tools for part in tool.name.split(".")):
        raise UnsupportedToolError(
            "its calls name functions as Python does; send names of letters, digits and underscores"
        )
    calls = repeat_call(choose_tool(lark, tools, call), several, quote_literal(", "))
    return f"{lark.literal('<|tool_call_start|>[')} {calls} {lark.literal(']<|tool_call_end|>')}"


def _make_gemma_calls(start: str, quote: str, end: str, excluded: tuple[str, ...] = ()) -> ToolCallGrammar:
    """Calls side by side, each between markers of its own."""

    def written(lark: LarkBuilder, tools: Sequence[ToolSchema], several: bool) -> str:
        def call(tool: ToolSchema) -> str:
            if names := find_unwritable_names(tool.parameters):
                raise UnsupportedToolError(f"its calls can't name the argument {quote_literal(names[0])}")
            schema = resolve_references(tool.parameters, tool.parameters) or {}
            arguments = LiteralWriter(lark, create_gemma_notation(quote, excluded), tool.parameters).write_object(
                schema
            )
            return f"{lark.literal(f'{start}call:{tool.name}')} {arguments} {lark.literal(end)}"

        return repeat_call(choose_tool(lark, tools, call), several)

    return written


# One marker begins all calls of an answer.
SECTION_FORMATS = frozenset(
    (
        *("mistral", "phi4", "granite", "command_a", "kimi_k2", "kimi_k3", "minimax_m2", "muse_spark", "pythonic"),
        *("deepseek_v3", "deepseek_v32"),
    )
)

TOOL_CALL_GRAMMARS: dict[str, ToolCallGrammar] = {
    **TAGGED_TOOL_CALL_GRAMMARS,
    "gemma4": _make_gemma_calls("<|tool_call>", '<|"|>', "<tool_call|>"),
    "function_gemma": _make_gemma_calls("<start_function_call>", "<escape>", "<end_function_call>", ("}",)),
    "json_tools": _hermes,
    "mistral": _mistral,
    "llama3": _llama3,
    "kimi_k2": _kimi_k2,
    "harmony": _harmony,
    "deepseek_v3": _deepseek_v3,
    "command_a": _command_a,
    "phi4": _make_list_calls("<|tool_call|>", "<|/tool_call|>"),
    "granite": _make_list_calls("<|tool_call|>", ""),
    "pythonic": _pythonic,
}
