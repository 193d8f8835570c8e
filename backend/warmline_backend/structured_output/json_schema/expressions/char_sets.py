"""Sets of characters as ranges of code points.  Pure."""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import cache, lru_cache

from warmline_backend.structured_output.json_schema.expressions.nodes import CODE_POINT_MAX, Range

CASED_CHAR_MAX = 0x1E943
DOTLESS_I = 0x131  # folds to nothing, although its upper case is I
ALL_CHARS: tuple[Range, ...] = ((0, CODE_POINT_MAX),)
DIGITS: tuple[Range, ...] = ((0x30, 0x39),)
WORD_CHARS: tuple[Range, ...] = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
LINE_ENDS: tuple[Range, ...] = ((0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029))
SPACES: tuple[Range, ...] = (
    (0x9, 0xD),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
)


def merge_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sort ranges, and join those that touch."""
    merged: list[Range] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Complement of merged ranges."""
    gaps, start = list[Range](), 0
    for low, high in ranges:
        if start < low:
            gaps.append((start, low - 1))
        start = high + 1
    return (*gaps, (start, CODE_POINT_MAX)) if start <= CODE_POINT_MAX else tuple(gaps)


def remove_range(ranges: Iterable[Range], removed: Range) -> tuple[Range, ...]:
    """Remove a range from merged ranges."""
    return complement_ranges(merge_ranges([*complement_ranges(ranges), removed]))


def contains_code(ranges: tuple[Range, ...], code: int) -> bool:
    """True for a member of merged ranges."""
    index = bisect_right(ranges, (code, CODE_POINT_MAX))
    return index > 0 and ranges[index - 1][1] >= code


@lru_cache(512)
def fold_ranges(ranges: tuple[Range, ...]) -> tuple[tuple[Range, ...], int]:
    """Add the other cases of all characters, by simple case folding; returns the steps that this took, too."""
    cases = _load_cases()
    count = sum(high - low + 1 for low, high in ranges)
    if count <= len(cases):
        found = [code for low, high in ranges for code in range(low, high + 1) if code in cases]
    else:
        found = [code for code in cases if contains_code(ranges, code)]
    added = ((other, other) for code in found for other in cases[code])
    return merge_ranges([*ranges, *added]), min(count, len(cases))


@cache
def _load_cases() -> dict[int, tuple[int, ...]]:
    """Characters that have cases, each with all that are equal to it but for case: K, k and the Kelvin sign are."""
    groups: dict[str, list[int]] = {}
    for code in range(CASED_CHAR_MAX + 1):
        upper = _map_char(chr(code), str.upper) if code != DOTLESS_I else chr(code)
        groups.setdefault(_map_char(upper, str.lower), []).append(code)
    return {code: tuple(group) for group in groups.values() if len(group) > 1 for code in group}


def _map_char(char: str, convert: Callable[[str], str]) -> str:
    """Other case of a character, where that is one character."""
    converted = convert(char)
    return converted if len(converted) == 1 else char
