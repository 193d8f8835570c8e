"""Schemas adapted to grammars: rewritten keywords, and refusals before anything is compiled."""

import functools
from typing import Any

import pytest

from warmline_backend.request.params import BadRequestError
from warmline_backend.structured_output.json_schema.adapt import SCHEMA_DEPTH_MAX, SCHEMA_NODES_MAX, adapt_schema


def make_branch(tag: object, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": tag}}, "required": ["kind"], **more}


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "string"}, {"type": "integer"}],
        [{"type": ["string", "null"]}, {"type": "array"}],
        [make_branch("a"), make_branch("b"), make_branch(1)],
        [{"$ref": "#/$defs/a"}, make_branch("b")],
    ],
)
def test_exclusive_one_of_becomes_any_of(branches: list[Any]) -> None:
    made = adapt_schema({"oneOf": branches, "$defs": {"a": make_branch("a")}}, "x")
    assert made["anyOf"] == branches and "oneOf" not in made


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "number"}, {"type": "integer"}],
        [make_branch("a"), make_branch("a")],
        [make_branch("a"), make_branch("b", required=[])],
        [{"type": "string"}, {}],
        [{"$ref": "#/nowhere"}, {"type": "string"}],
        [{"type": "string"}, True],
    ],
)
def test_inclusive_one_of_stays(branches: list[Any]) -> None:
    assert adapt_schema({"oneOf": branches}, "x")["oneOf"] == branches


def test_unchecked_formats_are_removed_but_not_property_names() -> None:
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "color", "default": "red"},
            "default": {"type": "string", "format": "date", "examples": ["x"]},
            "oneOf": {"enum": [{"format": "color"}]},
        },
        "x-guidance": {"whitespace_flexible": True},
    }
    assert adapt_schema(schema, "x") == {
        "type": "object",
        "properties": {
            "format": {"type": "string"},
            "default": {"type": "string", "format": "date"},
            "oneOf": {"enum": [{"format": "color"}]},
        },
    }


def make_nested(levels: int) -> dict[str, Any]:
    return functools.reduce(lambda inner, _: {"type": "array", "items": inner}, range(levels), {"type": "null"})


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (make_nested(SCHEMA_DEPTH_MAX), "nests deeper"),
        ({"enum": list(range(SCHEMA_NODES_MAX))}, "too large"),
        ({"const": "x" * (1 << 18)}, "too large"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "requires itself"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "requires itself"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "requires itself"),
        ({"type": "array", "minItems": 2, "prefixItems": [{"type": "null"}, {"$ref": "#"}]}, "requires itself"),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "requires itself"),
        ({"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}, "requires itself"),
    ],
)
def test_too_large_or_infinite_schema_is_refused(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequestError, match=words) as caught:
        adapt_schema(schema, "here.it.is")
    assert caught.value.param == "here.it.is"


@pytest.mark.parametrize(
    "schema",
    [
        make_nested(SCHEMA_DEPTH_MAX - 2),
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"]},
        {"$ref": "#/$defs/M%C3%BC~1r%20", "$defs": {"Mü/r ": {"type": "null"}}},
        {"$ref": "#/$defs/0", "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(40)} | {"40": {}}},
    ],
)
def test_recursive_schema_that_can_end_is_accepted(schema: dict[str, Any]) -> None:
    assert adapt_schema(schema, "x") == schema


def test_references_are_encoded() -> None:
    schema = {"oneOf": [{"$ref": "#/$defs/Größe"}, {"$ref": "#/$defs/a b"}]}
    defs = {"Größe": make_branch("a"), "a b": make_branch("b")}
    made = adapt_schema({**schema, "$defs": defs}, "x")
    assert made == {"anyOf": [{"$ref": "#/$defs/Gr%C3%B6%C3%9Fe"}, {"$ref": "#/$defs/a%20b"}], "$defs": defs}


def test_doubling_references_are_visited_once() -> None:
    def pair(n: int) -> dict[str, Any]:
        inner = {"$ref": f"#/$defs/{n + 1}"}
        return {"type": "object", "properties": {"x": inner, "y": inner}, "required": ["x", "y"]}

    schema = {"$ref": "#/$defs/0", "$defs": {str(n): pair(n) for n in range(100)} | {"100": {"type": "null"}}}
    assert adapt_schema(schema, "x") == schema


def test_comparison_of_many_branches_is_bounded() -> None:
    """All names of the first branch with all branches would be millions of comparisons."""
    names = [f"n{n}" for n in range(SCHEMA_NODES_MAX // 4)]
    open_branches = [{"type": "object"} for _ in range(SCHEMA_NODES_MAX // 4)]
    schema = {"oneOf": [{"type": "object", "required": names}, *open_branches]}
    assert adapt_schema(schema, "x") == schema
