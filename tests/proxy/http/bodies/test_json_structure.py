"""Structure of JSON, counted before parsing: equal to what a parser finds, wherever the pieces end."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmline_common.protocol.json_structure import JsonStructure, decode_json_text

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a"\\[]{},:é😀'), max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('k"\\{,', max_size=3), inner, max_size=4),
    max_leaves=12,
)


def measure(value: Any, depth: int = 0) -> dict[str, int]:
    """Counts by walking the parsed value."""
    if isinstance(value, str):
        return {"containers": 0, "strings": 1, "separators": 0, "depth": depth}
    if not isinstance(value, dict | list):
        return {"containers": 0, "strings": 0, "separators": 0, "depth": depth}
    names = len(value) if isinstance(value, dict) else 0
    inner = [measure(each, depth + 1) for each in (value.values() if isinstance(value, dict) else value)]
    return {
        "containers": 1 + sum(each["containers"] for each in inner),
        "strings": names + sum(each["strings"] for each in inner),
        "separators": max(0, len(value) - 1) + sum(each["separators"] for each in inner),
        "depth": max([depth + 1, *(each["depth"] for each in inner)]),
    }


def count(*pieces: bytes) -> dict[str, int]:
    structure = JsonStructure()
    for piece in pieces:
        structure.feed(piece)
    counts = {name: getattr(structure, name) for name in ("containers", "strings", "separators")}
    return counts | {"depth": structure.depth_max}


@given(value=VALUES, escaped=st.booleans(), size=st.integers(1, 9))
def test_counts_equal_those_of_parsed_value(value: Any, escaped: bool, size: int) -> None:
    encoded = json.dumps(value, ensure_ascii=escaped).encode()
    expected = measure(value)
    assert count(encoded) == expected
    assert count(*(encoded[start : start + size] for start in range(0, len(encoded), size)), b"") == expected


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_top_separators_are_those_of_the_outermost_object(size: int) -> None:
    encoded = b'{"a": [1, 2, {"b": 3, "c": 4}], "d": "x, [y", "e": {"f": [], "g": 1}, "h": 5}'
    structure = JsonStructure()
    for start in range(0, len(encoded), size):
        structure.feed(encoded[start : start + size])
    assert structure.top_separators == 3


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_levels_have_no_limit_of_pythons(opening: str, closing: str) -> None:
    levels = 50_000
    text = opening * levels + "1" + closing * levels
    expected = levels * (opening.count("[") + opening.count("{"))
    assert count(text.encode())["depth"] == expected
    assert count(json.dumps(text).encode())["depth"] == 0
    assert count(text.encode(), b", []")["depth"] == expected


def test_included_text_counts_but_for_its_outermost_fields() -> None:
    structure, other = JsonStructure(), JsonStructure()
    structure.feed(b'{"a": [1, 2], "b": 3}')
    other.feed(b'{"c": [[[5, "d"]]], "e": 6}')
    structure.include(other)
    assert (structure.containers, structure.strings, structure.separators) == (2 + 4, 2 + 3, 2 + 2)
    assert (structure.depth_max, structure.top_separators) == (4, 1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'"\ud83d"', "\ufffd"),
        (r'{"\udE00a": "\uD83D"}', {"\ufffda": "\ufffd"}),
        (r'"\ud83d\ude00"', "😀"),
        (r'"\\ud83d"', r"\ud83d"),
        (r'"\u00e9"', "é"),
        ('"😀"', "😀"),
    ],
)
def test_halves_of_pairs_in_json_text_are_replaced(text: str, value: object) -> None:
    assert decode_json_text(text) == value
