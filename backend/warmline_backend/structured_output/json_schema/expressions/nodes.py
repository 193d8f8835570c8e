"""Syntax tree of a regular expression.  Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

CODE_POINT_MAX = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
Range = tuple[int, int]  # code points, both included


class PatternError(ValueError):
    """No regular expression of ECMA-262; says why, for people."""


@dataclass(frozen=True)
class Chars:
    """One character of a set."""

    ranges: tuple[Range, ...]  # sorted, disjoint
    properties: tuple[str, ...] = ()  # Unicode's, as "\\p{L}" or "\\P{L}"
    negated: bool = False  # only with properties; ranges alone are complemented
    ignores_case: bool = False  # only with properties; ranges alone hold both cases


@dataclass(frozen=True)
class Concatenation:
    """Parts one after the other; none: empty text."""

    parts: tuple["Node", ...] = ()


@dataclass(frozen=True)
class Choice:
    """One of several branches; none: nothing matches."""

    branches: tuple["Node", ...] = ()


@dataclass(frozen=True)
class Repeat:
    """A part several times."""

    part: "Node"
    count_min: int
    count_max: int | None


@dataclass(frozen=True)
class Group:
    """A part that references name; numbers begin with 1."""

    part: "Node"
    number: int


@dataclass(frozen=True)
class Reference:
    """The text of a group."""

    number: int


@dataclass(frozen=True)
class Edge:
    """Start or end of the text."""

    is_start: bool


@dataclass(frozen=True)
class WordBoundary:
    """Place between a word's character and another one, or any other place."""

    negated: bool


@dataclass(frozen=True)
class Look:
    """Assertion about the text after a place, or before it."""

    part: "Node"
    behind: bool
    negated: bool


Node = Chars | Concatenation | Choice | Repeat | Group | Reference | Edge | WordBoundary | Look

EMPTY = Concatenation()
NOTHING = Choice()
ANY_CHAR = Chars(((0, CODE_POINT_MAX),))
ANY_TEXT = Repeat(ANY_CHAR, 0, None)


def join_parts(*parts: Node) -> Node:
    """Concatenation of parts, flat."""
    flat: list[Node] = []
    for part in parts:
        if part == NOTHING:
            return NOTHING
        flat.extend(part.parts if isinstance(part, Concatenation) else [part])
    return flat[0] if len(flat) == 1 else Concatenation(tuple(flat))


def choose(*branches: Node) -> Node:
    """Choice of branches, flat and without doubles."""
    flat: dict[Node, None] = {}
    for branch in branches:
        flat.update(dict.fromkeys(branch.branches if isinstance(branch, Choice) else [branch]))
    return next(iter(flat)) if len(flat) == 1 else Choice(tuple(flat))


def repeat(part: Node, count_min: int, count_max: int | None) -> Node:
    """Repetition of a part, as simple as it gets."""
    if part == NOTHING:
        return EMPTY if count_min == 0 else NOTHING
    if count_max == 0 or part == EMPTY:
        return EMPTY
    return part if count_min == count_max == 1 else Repeat(part, count_min, count_max)


def list_parts(node: Node) -> tuple[Node, ...]:
    """Direct parts of a node."""
    match node:
        case Concatenation(parts) | Choice(parts):
            return parts
        case Repeat(part) | Group(part) | Look(part):
            return (part,)
    return ()


def replace_parts(node: Node, parts: Iterable[Node]) -> Node:
    """Copy of a node with other parts."""
    match node:
        case Concatenation():
            return join_parts(*parts)
        case Choice():
            return choose(*parts)
        case Repeat(_, count_min, count_max):
            return repeat(next(iter(parts)), count_min, count_max)
        case Group(_, number):
            return Group(next(iter(parts)), number)
        case Look(_, behind, negated):
            return Look(next(iter(parts)), behind, negated)
    return node


def count_required(node: Node) -> int:
    """Count the parts of a node, those of repetitions as often as they must match at least."""
    own = sum(map(count_required, list_parts(node))) + 1
    return own * max(node.count_min, 1) if isinstance(node, Repeat) else own
