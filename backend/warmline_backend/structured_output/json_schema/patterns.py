"""Patterns of JSON schemas: ECMA-262's regular expressions, in Unicode mode, that search a string.  Pure.

Beyond ECMA-262, inline flags as Python's are read, and its names for groups and edges; see `expressions.parser`.
Properties of characters are those of the engines' versions of Unicode, which may differ in new characters.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import regex

from warmline_backend.structured_output.json_schema.expressions.char_sets import fold_ranges
from warmline_backend.structured_output.json_schema.expressions.character_properties import (
    find_support,
    is_known_property,
)
from warmline_backend.structured_output.json_schema.expressions.nodes import (
    ANY_TEXT,
    Chars,
    Look,
    Node,
    PatternError,
    Reference,
    Repeat,
    WordBoundary,
    list_parts,
    replace_parts,
)
from warmline_backend.structured_output.json_schema.expressions.parser import parse_pattern
from warmline_backend.structured_output.json_schema.expressions.search import convert_search, convert_whole
from warmline_backend.structured_output.json_schema.expressions.writer import write_for_llguidance, write_for_regex

MATCH_TIMEOUT_S = 0.1  # of the process, whose other threads count too
CACHED_COUNT_MAX = 1024
CHEAP_COUNT_MAX = 8

__all__ = [
    "CheckTooCostlyError",
    "ForcedPattern",
    "PatternError",
    "clear_patterns",
    "compile_check",
    "force_pattern",
    "force_text",
    "simplify_pattern",
]


class CheckTooCostlyError(Exception):
    """A check was ended at its bound, without a result."""


@dataclass(frozen=True)
class ForcedPattern:
    """Pattern in llguidance's syntax."""

    patterns: tuple[str, ...]  # all must match; none: any text does
    is_exact: bool  # False: other texts match, too


@lru_cache(CACHED_COUNT_MAX)
def force_pattern(pattern: str) -> ForcedPattern:
    """Translate a pattern for llguidance.  Raises PatternError.

    Lookaheads at the start become patterns of their own.  Other assertions are left out, and references to groups match
    whatever the group does.
    """
    try:
        whole = convert_search(parse_pattern(pattern))
    except RecursionError as error:
        raise PatternError("it nests too deep") from error
    return ForcedPattern(tuple(map(_write_whole, whole.nodes)), whole.is_exact)


@lru_cache(CACHED_COUNT_MAX)
def force_text(pattern: str) -> tuple[str, ...]:
    """Translate an expression of whole texts for llguidance's grammars: all of the result must match.

    Raises PatternError, also where no grammar is exact.
    """
    node = parse_pattern(pattern)
    try:
        whole = convert_whole(node)
    except RecursionError as error:
        raise PatternError("it nests too deep") from error
    if not whole.is_exact:
        raise PatternError(f"it has {_find_obstacle(node)}, which no grammar has")
    return tuple(f"(?:{write_for_llguidance(part, in_json=False)})" for part in whole.nodes or (ANY_TEXT,))


def _find_obstacle(node: Node) -> str:
    """Find what can't be forced, the plainest kind first."""
    parts = list(_iter_nodes(node))
    looks = [part for part in parts if isinstance(part, Look)]
    if any(look.behind for look in looks):
        return "a lookbehind"
    if any(isinstance(part, Reference) for part in parts):
        return "a reference to a group"
    if any(isinstance(part, WordBoundary) for part in parts):
        return "a word boundary"
    if looks:
        return "a lookahead that is not at its start, or excludes more than some words"
    if any(isinstance(part, Chars) and part.properties for part in parts):
        return "a property of characters where case is ignored, or too many properties"
    return "a '^' or '$' within a repetition, or too many of them"


def _iter_nodes(node: Node) -> Iterator[Node]:
    yield node
    for part in list_parts(node):
        yield from _iter_nodes(part)


def simplify_pattern(pattern: str) -> str | None:
    """Cheaper pattern that matches more, of one that `force_pattern` made: without large numbers; None for none."""
    try:
        node = parse_pattern(pattern)
    except PatternError:  # what was written may be longer or nest deeper than what is read
        return None
    simple = _simplify(node)
    return None if simple == node else _write_whole(convert_search(simple).nodes[0])


@lru_cache(CACHED_COUNT_MAX)
def compile_check(pattern: str) -> Callable[[str], bool]:
    """Compile a pattern to a test of strings, which raises CheckTooCostlyError at its bound.  Raises PatternError."""
    try:
        compiled = regex.compile(write_for_regex(parse_pattern(pattern)), regex.VERSION0)
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise PatternError("it is too large or nests too deep") from error

    def search(text: str) -> bool:
        try:
            return compiled.search(text, timeout=MATCH_TIMEOUT_S, concurrent=False) is not None
        except TimeoutError as error:
            raise CheckTooCostlyError("a pattern takes too long to check") from error

    return search


def clear_patterns() -> None:
    """Delete what is kept of patterns, which are clients' texts."""
    for cached in (force_pattern, force_text, compile_check, find_support, fold_ranges, is_known_property):
        cached.cache_clear()


def _write_whole(node: Node) -> str:
    return f"^(?:{write_for_llguidance(node)})$"


def _simplify(node: Node) -> Node:
    node = replace_parts(node, map(_simplify, list_parts(node)))
    if isinstance(node, Repeat) and max(node.count_min, node.count_max or 0) > CHEAP_COUNT_MAX:
        return Repeat(node.part, min(node.count_min, CHEAP_COUNT_MAX), None)
    return node
