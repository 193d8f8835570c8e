"""What all styles of writing calls are made of.  Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warmline_backend.request.json_refs import Schema
from warmline_backend.request.response_format import CallableTool
from warmline_backend.structured_output.lark import LarkBuilder


class UnsupportedToolError(Exception):
    """A tool or an argument has no form in this family's calls."""


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


ToolCallGrammar = Callable[[LarkBuilder, Sequence[ToolSchema], bool], str]
"""(grammar, tools, whether there may be several calls) -> an expression"""


def repeat_call(one: str, several: bool, separator: str = "") -> str:
    """One call, or more of them with `between` in between."""
    return f"{one} ({separator} {one})*" if several else one


def choose_tool(lark: LarkBuilder, tools: Sequence[ToolSchema], write_call: Callable[[ToolSchema], str]) -> str:
    """A call of one of the tools."""
    return lark.one_of(write_call(tool) for tool in tools)


def write_json_arguments(lark: LarkBuilder, tool: ToolSchema) -> str:
    """A call's arguments as one JSON object."""
    return lark.json(tool.parameters, lenient=tool.lenient)
