"""Names that look misspelt, and what they were meant to be."""

import pytest

from warmline_common.protocol.misspelling import NAMES_COMPARED_MAX, explain_missing, find_similar


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("contnt", "content"),
        ("Content", "content"),
        ("con-tent", "content"),
        ("content", None),
        ("text", None),
        ("contnt\n", None),
        ("c" * 41, None),
    ],
)
def test_missing_field_is_explained_by_similar_name(given: str, meant: str | None) -> None:
    expected = f"is missing; this message has '{given}': write it 'content'" if meant else None
    assert explain_missing("content", ["role", given], "message") == expected


def test_number_of_compared_names_is_bounded() -> None:
    names = [f"field_{number}" for number in range(NAMES_COMPARED_MAX)]
    assert explain_missing("content", [*names, "contnt"], "message") is None


@pytest.mark.parametrize(
    ("name", "similar"), [("X-Warmline-Totl-Timeout", "X-Warmline-Total-Timeout"), ("X-Other", None), ("", None)]
)
def test_similar_name(name: str, similar: str | None) -> None:
    assert find_similar(name, ["X-Warmline-Stall-Timeout", "X-Warmline-Total-Timeout"]) == similar
