"""Incremental reading of JSON: the same events however the text is split, and no error whatever it is."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmline_backend.structured_output.checks.json_reader import JsonEvent, JsonReader

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-200, 200) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def read(pieces: list[str]) -> list[JsonEvent]:
    reader = JsonReader()
    return [event for piece in pieces for event in reader.feed(piece)] + reader.finish()


def list_events(value: Any, offset: int, ascii_only: bool) -> Iterator[JsonEvent]:
    """Events of a value whose text begins at an offset."""
    text = json.dumps(value, ensure_ascii=ascii_only)
    yield JsonEvent("begin", offset, text[0])
    position = offset + 1
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for index, (name, part) in enumerate(members):
        if index:
            yield JsonEvent("comma", position)
            position += len(", ")
        if isinstance(name, str):
            position += len(json.dumps(name, ensure_ascii=ascii_only))
            yield JsonEvent("key", position, name)
            position += len(": ")
        yield from list_events(part, position, ascii_only)
        position += len(json.dumps(part, ensure_ascii=ascii_only))
    yield JsonEvent("end", offset + len(text))


@given(VALUES, st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_events_do_not_depend_on_pieces(value: Any, ascii_only: bool, data: st.DataObject) -> None:
    text = " " + json.dumps(value, ensure_ascii=ascii_only) + data.draw(st.sampled_from(["", "\n", " }x", ", 1"]))
    expected = list(list_events(value, 1, ascii_only))
    assert read([text]) == read([*text]) == expected
    cut = data.draw(st.integers(0, len(text)))
    assert read([text[:cut], "", text[cut:]]) == expected


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("12", ["begin", "end"]),
        ("-1.5e+3 ", ["begin", "end"]),
        ('"\\\\"', ["begin", "end"]),
        ('"\\"', ["begin"]),
        ("[]", ["begin", "end"]),
        ('{"a":[{}],"b":""}', ["begin", "key", "begin", "begin", "end", "end", "comma", "key", "begin", "end", "end"]),
        ("[1,]", ["begin", "begin", "end", "comma"]),
        ('{"a": }', ["begin", "key"]),
        ('{"a"}', ["begin", "key"]),
        ("{1: 2}", ["begin"]),
        ("[1}", ["begin", "begin", "end"]),
        ("[1 2]", ["begin", "begin", "end"]),
        ("[12", ["begin", "begin"]),
        ("]", []),
        ("", []),
        ("?1", []),
    ],
)
def test_texts(text: str, kinds: list[str]) -> None:
    for pieces in ([text], [*text]):
        assert [event.kind for event in read(pieces)] == kinds, pieces


def test_names_are_decoded() -> None:
    text = '{"a\\"\\u00e9\\n": 1, "\\q": 2}'
    for pieces in ([text], [*text]):
        assert [event.text for event in read(pieces) if event.kind == "key"] == ['a"é\n', "\\q"]


@given(st.text(alphabet='{}[]",:1e-tn\\u \n\x00é', max_size=30))
@settings(max_examples=150, deadline=None)
def test_other_texts_end_reading(text: str) -> None:
    reader = JsonReader()
    for char in text:
        reader.feed(char)
    is_complete = reader.is_over
    assert [*reader.finish()] == [] or not is_complete
    assert reader.is_over and reader.feed("[1]") == []


def test_copies_go_on_by_themselves() -> None:
    reader = JsonReader()
    reader.feed('{"a": [1, "x')
    other = reader.copy()
    assert reader.feed('"], "b": 2}') == read(['{"a": [1, "x', '"], "b": 2}'])[7:]
    assert [event.kind for event in other.feed('y"]}')] == ["end", "end", "end"]
