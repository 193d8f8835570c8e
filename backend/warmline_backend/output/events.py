"""Parts of an answer, in the order in which they come."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    """Content, which lies in the sampled tokens [start, end); -1 where these are unknown.

    `offset` characters of all text precede it; -1 where that is unknown.
    """

    text: str
    start: int = field(default=-1, compare=False)
    end: int = field(default=-1, compare=False)
    offset: int = field(default=-1, compare=False)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning, with its place as in Text."""

    text: str
    start: int = field(default=-1, compare=False)
    end: int = field(default=-1, compare=False)
    offset: int = field(default=-1, compare=False)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call; `arguments` is JSON.

    The sampled tokens [start, end) reach from the reasoning's end to this call's end; -1 where no token begins or ends.
    """

    name: str
    arguments: str
    start: int = -1
    end: int = -1


Part = Text | Reasoning | ToolCall
