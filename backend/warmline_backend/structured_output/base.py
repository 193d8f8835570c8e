"""What all styles of writing calls are made of.  Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warmline_backend.request.json_refs import Schema
from warmline_backend.request.response_format import Tool
from warmline_backend.structured_output.lark import Lark


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


def repeated(one: str, several: bool, between: str = "") -> str:
    """One call, or more of them with `between` in between."""
    return f"{one} ({between} {one})*" if several else one


def each(lark: Lark, tools: Sequence[Offered], written: Callable[[Offered], str]) -> str:
    """A call of one of the tools."""
    return lark.one_of(written(tool) for tool in tools)


def arguments_json(lark: Lark, tool: Offered) -> str:
    """A call's arguments as one JSON object."""
    return lark.json(tool.parameters, lenient=tool.lenient)
