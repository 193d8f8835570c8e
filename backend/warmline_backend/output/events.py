"""What an answer is made of, in the order in which it comes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Content: text for whoever asked."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call of a tool.

    `arguments` is JSON.  The sampled tokens [start, end) hold all that came after the reasoning, up to this call's end;
    -1 where they can't be told apart from what is around them.
    """

    name: str
    arguments: str
    start: int = -1
    end: int = -1


Part = Text | Reasoning | ToolCall
