"""Search expressions as expressions that match whole texts, without assertions and references.  Pure.

What can't be expressed so is left out: more texts match then, and the result says so.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from warmline_backend.structured_output.json_schema.expressions.char_sets import complement_ranges
from warmline_backend.structured_output.json_schema.expressions.character_properties import Support, find_support
from warmline_backend.structured_output.json_schema.expressions.nodes import (
    ANY_CHAR,
    ANY_TEXT,
    EMPTY,
    NOTHING,
    Chars,
    Choice,
    Concatenation,
    Edge,
    Group,
    Look,
    Node,
    Reference,
    Repeat,
    WordBoundary,
    choose,
    join_parts,
    list_parts,
    repeat,
    replace_parts,
)

EDGES_MAX = 40
SIZE_MAX = 40_000
VARIANTS_SIZE_MAX = 60_000  # of all that are made on the way
LOOKS_MAX = 100
PROPERTY_SETS_MAX = 50  # which take milliseconds each
EXCLUDED_LENGTH_MAX = 50  # each nests deeper
EXCLUDED_TEXTS_MAX = 30
# Needs the text's start, needs its end -> expression.  At most one of each kind.
Variants = Mapping[tuple[bool, bool], Node]


@dataclass(frozen=True)
class WholeMatch:
    """Expressions that a text must match whole, all of them."""

    nodes: tuple[Node, ...]
    is_exact: bool


class _TooLargeError(Exception):
    """The expression grows too large without its edges."""


def convert_whole(node: Node) -> WholeMatch:
    """Convert an expression that matches a whole text, which is no string of JSON, to such ones without assertions."""
    whole = join_parts(Edge(is_start=True), _drop_groups_of_one(node), Edge(is_start=False))
    return convert_search(whole, in_json=False)


def convert_search(node: Node, in_json: bool = True) -> WholeMatch:
    """Convert an expression that searches a text to expressions of whole texts.

    `in_json`: the text is written as a string of JSON.
    """
    required, rest, is_exact = _take_leading_looks(_drop_groups_of_one(node))
    nodes = list[Node]()
    for part in (*required, rest):
        plain, is_plain = _remove_assertions(part, in_json)
        whole, is_whole = _expand(plain)
        is_exact = is_exact and is_plain and is_whole
        if whole != ANY_TEXT and whole not in nodes:
            nodes.append(whole)
    return WholeMatch(tuple(nodes), is_exact)


def measure_size(nodes: Iterable[Node]) -> int:
    """Count the parts of expressions and the ranges of their sets, up to a little more than SIZE_MAX."""
    waiting, count = list(nodes), 0
    while waiting and count <= SIZE_MAX:
        node = waiting.pop()
        count += len(node.ranges) if isinstance(node, Chars) else 1
        waiting.extend(list_parts(node))
    return count


# ---- assertions


def _take_leading_looks(node: Node) -> tuple[list[Node], Node, bool]:
    """Split lookaheads off the start: searches that must succeed as well, the rest, and if that is exact."""
    parts = node.parts if isinstance(node, Concatenation) else (node,)
    count = next((index for index, part in enumerate(parts) if not _is_leading(part)), len(parts))
    is_anchored = any(isinstance(part, Edge) for part in parts[:count])
    start = (Edge(is_start=True),) if is_anchored else ()
    looks = [part for part in parts[:count] if isinstance(part, Look)]
    found, is_exact = list[Node](), len(looks) <= LOOKS_MAX
    for look in looks[:LOOKS_MAX]:
        if look.negated:
            excluded = _exclude(look.part) if is_anchored else None
            is_exact = is_exact and excluded is not None
            found.extend(join_parts(*start, part, Edge(is_start=False)) for part in excluded or ())
        else:
            is_exact = is_exact and is_anchored
            found.append(join_parts(*start, look.part))
    return found, join_parts(*start, *parts[count:]), is_exact


def _is_leading(node: Node) -> bool:
    return (isinstance(node, Edge) and node.is_start) or (isinstance(node, Look) and not node.behind)


def _exclude(node: Node) -> list[Node] | None:
    """Expressions of whole texts that do not begin with a match of `node`; None where this is not simple."""
    branches = _distribute(node)
    if branches is None:
        return None
    excluded = [
        _exclude_sequence(branch.parts if isinstance(branch, Concatenation) else (branch,)) for branch in branches
    ]
    return None if None in excluded else [part for part in excluded if part is not None]


def _distribute(node: Node) -> list[Node] | None:
    """Branches of choices, also of those within a sequence; None for too many."""
    node = _drop_groups(node)
    if isinstance(node, Choice):
        lists = [_distribute(branch) for branch in node.branches]
        found = [branch for branches in lists for branch in branches or ()]
        return None if None in lists or len(found) > EXCLUDED_TEXTS_MAX else found
    found = [EMPTY]
    for part in node.parts if isinstance(node, Concatenation) else (node,):
        branches = _distribute(part) if isinstance(part, Choice) else [part]
        if branches is None or len(found) * len(branches) > EXCLUDED_TEXTS_MAX:
            return None
        found = [join_parts(first, branch) for first in found for branch in branches]
    return found


def _exclude_sequence(parts: tuple[Node, ...]) -> Node | None:
    """Exclude texts that begin with some characters; or that consist of them, possibly of any number of one kind."""
    whole = bool(parts) and parts[-1] == Edge(is_start=False)
    chars = parts[:-1] if whole else parts
    match chars:
        case (Repeat(Chars() as kind, count_min, None),) if whole and count_min <= 1:
            other = join_parts(ANY_TEXT, _complement(kind), ANY_TEXT)
            return choose(EMPTY, other) if count_min else other
    if len(chars) > EXCLUDED_LENGTH_MAX or not all(isinstance(part, Chars) for part in chars):
        return None
    rest: Node = repeat(ANY_CHAR, 1, None) if whole else NOTHING
    for part in reversed(chars):
        assert isinstance(part, Chars)
        rest = repeat(choose(join_parts(_complement(part), ANY_TEXT), join_parts(part, rest)), 0, 1)
    return rest


def _complement(chars: Chars) -> Node:
    if chars.properties:
        return Chars(chars.ranges, chars.properties, not chars.negated, chars.ignores_case)
    ranges = complement_ranges(chars.ranges)
    return Chars(ranges) if ranges else NOTHING


def _drop_groups(node: Node) -> Node:
    while isinstance(node, Group):
        node = node.part
    return replace_parts(node, map(_drop_groups, list_parts(node)))


def _drop_groups_of_one(node: Node) -> Node:
    """Drop a group around the whole expression, unless something refers to it."""
    while isinstance(node, Group):
        node = node.part
    return node


def _remove_assertions(node: Node, in_json: bool) -> tuple[Node, bool]:
    """Remove all but edges; references become the expressions of their groups.  True where nothing was lost."""
    remover = _AssertionRemover({"exact"} if in_json else {"exact", "partial"})
    return remover.remove(node, is_certain=True), remover.is_exact


class _AssertionRemover:
    def __init__(self, exact: Collection[Support]) -> None:
        self.is_exact, self._exact = True, exact
        self._groups: dict[int, Node] = {}
        self._size_left = SIZE_MAX // 10
        self._property_sets_left = PROPERTY_SETS_MAX

    def remove(self, node: Node, is_certain: bool) -> Node:
        """Remove the assertions of a part; `is_certain`: each match has a match of this part."""
        match node:
            case Look() | WordBoundary():
                self.is_exact = False
                return EMPTY
            case Reference(number):
                self.is_exact = False
                group = self._groups.get(number, ANY_TEXT)
                self._size_left -= measure_size([group])
                return group if self._size_left >= 0 else ANY_TEXT
            case Chars(properties=properties) if properties:
                self._property_sets_left -= 1
                support = find_support(node) if self._property_sets_left >= 0 else "none"
                self.is_exact = self.is_exact and support in self._exact
                return ANY_CHAR if support == "none" else node
            case Group(part, number):
                plain = self.remove(part, is_certain)
                self._groups[number] = plain if is_certain else repeat(plain, 0, 1)
                return plain
        is_certain = is_certain and not (isinstance(node, Choice) or (isinstance(node, Repeat) and not node.count_min))
        return replace_parts(node, [self.remove(part, is_certain) for part in list_parts(node)])


# ---- edges


def _expand(node: Node) -> tuple[Node, bool]:
    """Expression of the whole texts in which `node` is found, and if it is exact.  It has no other assertions."""
    try:
        if _count_edges(node) > EDGES_MAX:
            raise _TooLargeError
        variants, is_exact = _EdgeRemover().find_variants(node), True
    except _TooLargeError:
        variants, is_exact = {(False, False): _drop_edges(node)}, False
    if any(_is_nullable(variant) for edges, variant in variants.items() if edges != (True, True)):
        return ANY_TEXT, is_exact
    branches = [
        join_parts(*(() if starts else (ANY_TEXT,)), variant, *(() if ends else (ANY_TEXT,)))
        for (starts, ends), variant in variants.items()
    ]
    return choose(*branches), is_exact


class _EdgeRemover:
    """Raises _TooLargeError at the bound."""

    def __init__(self) -> None:
        self._size_left = VARIANTS_SIZE_MAX

    def find_variants(self, node: Node) -> Variants:
        """Edge-free expressions of a node by the edges that it needs at its own start and end."""
        if not _count_edges(node):
            return {(False, False): node}
        match node:
            case Edge(is_start):
                return {(is_start, not is_start): EMPTY}
            case Choice(branches):
                return self._merge_variants(item for branch in branches for item in self.find_variants(branch).items())
            case Repeat():
                return self._repeat_variants(node)
        found: Variants = {(False, False): EMPTY}
        for part in list_parts(node):
            found = self._join_variants(found, self.find_variants(part))
        return found

    def _merge_variants(self, items: Iterable[tuple[tuple[bool, bool], Node]]) -> Variants:
        branches: dict[tuple[bool, bool], list[Node]] = {}
        for key, node in items:
            if node != NOTHING:
                branches.setdefault(key, []).append(node)
        merged = {key: choose(*nodes) for key, nodes in branches.items()}
        self._size_left -= measure_size(merged.values())
        if self._size_left < 0:
            raise _TooLargeError
        return merged

    def _join_variants(self, first: Variants, second: Variants) -> Variants:
        """Join two parts.  What comes before a start, or after an end, must be empty."""
        return self._merge_variants(
            (
                (starts or inner_starts, ends or inner_ends),
                join_parts(EMPTY if inner_starts else before, EMPTY if inner_ends else after),
            )
            for (starts, inner_ends), before in first.items()
            for (inner_starts, ends), after in second.items()
            if (not inner_starts or _is_nullable(before)) and (not inner_ends or _is_nullable(after))
        )

    def _repeat_variants(self, node: Repeat) -> Variants:
        variants = self.find_variants(node.part)
        plain = variants.get((False, False), NOTHING)
        if (node.count_min, node.count_max) == (0, 1):
            return self._merge_variants([((False, False), EMPTY), *variants.items()])
        if node.count_min > 1 or node.count_max is not None:
            raise _TooLargeError
        more, starting, ending = (
            repeat(plain, 0, None),
            variants.get((True, False), NOTHING),
            variants.get((False, True), NOTHING),
        )
        return self._merge_variants(
            [
                ((False, False), repeat(plain, node.count_min, None)),
                ((True, False), join_parts(starting, more)),
                ((False, True), join_parts(more, ending)),
                ((True, True), join_parts(starting, more, ending)),
                ((True, True), variants.get((True, True), NOTHING)),
            ]
        )


def _count_edges(node: Node) -> int:
    return isinstance(node, Edge) or sum(map(_count_edges, list_parts(node)))


def _drop_edges(node: Node) -> Node:
    return EMPTY if isinstance(node, Edge) else replace_parts(node, map(_drop_edges, list_parts(node)))


def _is_nullable(node: Node) -> bool:
    match node:
        case Concatenation(parts):
            return all(map(_is_nullable, parts))
        case Choice(branches):
            return any(map(_is_nullable, branches))
        case Repeat(part, count_min):
            return count_min == 0 or _is_nullable(part)
    return False
