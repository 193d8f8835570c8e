"""Schemas of any draft in one form, references resolved, and what can't be read refused or left out."""

import functools
from typing import Any

import pytest

from support.json_schema.json_grammars import PreparedTrial, prepare
from warmline_backend.request.params import BadRequestError
from warmline_backend.structured_output.json_schema import bounds
from warmline_backend.structured_output.json_schema.normalize import normalize_schema

DRAFT_4, DRAFT_7 = "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#"
NULL = {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "normalized"),
    [
        (
            {"title": "x", "default": 1, "examples": [2], "x-own": {}, "nullable": True, "type": "string"},
            {"type": "string"},
        ),
        ({"items": [NULL, True], "additionalItems": False}, {"prefixItems": [NULL, True], "items": False}),
        ({"items": [NULL]}, {"prefixItems": [NULL]}),
        ({"then": NULL, "else": NULL, "minContains": 2, "type": "array"}, {"type": "array"}),
        ({"minimum": 1, "exclusiveMinimum": True}, {"exclusiveMinimum": 1}),
        ({"maximum": 1, "exclusiveMaximum": False}, {"maximum": 1}),
        (
            {"dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
            {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"c": {"required": ["d"]}}},
        ),
        (
            {"properties": {"type": {"const": {"title": 1}}, "default": {"title": "x"}}},
            {"properties": {"type": {"const": {"title": 1}}, "default": {}}},
        ),
        ({"definitions": {"a": NULL}, "$defs": {"b": NULL}}, {}),
    ],
)
def test_keywords_of_all_drafts_become_those_of_2020(schema: dict[str, Any], normalized: dict[str, Any]) -> None:
    assert normalize_schema(schema, "schema", strict=True).schema == normalized


# Each schema allows null and nothing else.
REFERENCES: dict[str, dict[str, Any]] = {
    "pointer": {"$ref": "#/$defs/a", "$defs": {"a": NULL}},
    "pointer into definitions": {"$ref": "#/definitions/a", "definitions": {"a": NULL}},
    "pointer into a list": {"$ref": "#/$defs/a/anyOf/0", "$defs": {"a": {"anyOf": [NULL]}}},
    "pointer into a tuple": {"$ref": "#/$defs/a/items/0", "$defs": {"a": {"items": [NULL]}}},
    "escaped pointer": {"$ref": "#/$defs/M%C3%BC~1r%20~0", "$defs": {"Mü/r ~": NULL}},
    "pointer without escapes": {"$ref": "#/$defs/a b", "$defs": {"a b": NULL}},
    "pointer through a reference": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": NULL}},
    "pointer through an unknown keyword": {"$ref": "#/components/schemas/a", "components": {"schemas": {"a": NULL}}},
    "anchor": {"$ref": "#here", "$defs": {"a": {"$anchor": "here", **NULL}}},
    "identifier": {
        "$ref": "other.json",
        "$id": "http://x.test/one.json",
        "$defs": {"a": {"$id": "other.json", **NULL}},
    },
    "identifier and pointer": {
        "$ref": "http://x.test/b#/$defs/c",
        "$defs": {"a": {"$id": "http://x.test/b", "$defs": {"c": NULL}}},
    },
    "own identifier": {"$id": "http://x.test/one", "$ref": "http://x.test/one#/$defs/a", "$defs": {"a": NULL}},
    "identifier of draft 4": {
        "$schema": DRAFT_4,
        "allOf": [{"$ref": "#foo"}],
        "definitions": {"a": {"id": "#foo", **NULL}},
    },
    "beside other keywords": {"$ref": "#/$defs/a", "enum": [None, 1], "$defs": {"a": NULL}},
    "alone in draft 7": {"$schema": DRAFT_7, "$ref": "#/definitions/a", "type": "string", "definitions": {"a": NULL}},
    "identifier in an unknown keyword": {
        "$ref": "http://x.test/a",
        "x-own": {"$id": "http://x.test/a", "type": "string"},
        "enum": [{"$id": "http://x.test/a"}, None],
        "$defs": {"a": {"$id": "http://x.test/a", **NULL}},
    },
    "dynamic": {"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a", **NULL}}},
}


@pytest.mark.parametrize("name", REFERENCES)
def test_reference_is_resolved(name: str) -> None:
    trial = PreparedTrial(REFERENCES[name])
    assert [trial.is_valid(value) for value in (None, "a", 1, {})] == [True, False, False, False]


def test_metaschema_is_at_hand() -> None:
    trial = PreparedTrial({"type": "object", "properties": {"schema": {"$ref": DRAFT_7}}, "required": ["schema"]})
    assert trial.is_valid({"schema": {"type": "string"}})
    assert not trial.is_valid({"schema": {"type": "strng"}})


UNREADABLE: list[tuple[dict[str, Any], str]] = [
    ({"type": "any"}, 'at its root has type "any"; it must be one of object,'),
    ({"properties": {"a/b": {"type": "strng"}}}, r"at /properties/a~1b has type \"strng\""),
    ({"items": {"minimum": "3"}}, 'at /items has minimum "3"; it must be a number'),
    ({"properties": {"a": {"required": True}}}, "at /properties/a has required true; it must be a list of names"),
    ({"anyOf": []}, "at its root has anyOf \\[\\]; it must be a list of schemas"),
    ({"properties": ["a"]}, "at its root has properties"),
    ({"properties": {"a": "string"}}, "at /properties/a must be a schema"),
    ({"maxItems": -1}, "must be a whole number"),
    ({"multipleOf": 0}, "must be a number above 0"),
    ({"$ref": "#/$defs/a"}, 'at its root has \\$ref "#/\\$defs/a", which is no part of the schema'),
    ({"$ref": "https://x.test/a.json"}, "put the schema that it names into '\\$defs'"),
    ({"allOf": [{"$ref": "#nowhere"}]}, "at /allOf/0 has \\$ref"),
    ({"$defs": {"a": {"type": 5}}, "items": {"$ref": "#/$defs/a"}}, "at /\\$defs/a has type 5"),
    ({"pattern": "(a"}, 'at its root has pattern "\\(a"'),
    ({"patternProperties": {"[": {}}}, "at its root has patternProperties"),
]


@pytest.mark.parametrize(("schema", "fault"), UNREADABLE)
def test_unreadable_part_is_refused_if_strict_and_else_allows_anything(schema: dict[str, Any], fault: str) -> None:
    with pytest.raises(BadRequestError, match=fault) as caught:
        prepare(schema)
    assert caught.value.param == "schema"
    trial = PreparedTrial(schema, strict=False)
    assert trial.is_valid({"a": 1}) and trial.is_valid([1, "a"])


def make_nested(levels: int) -> dict[str, Any]:
    return functools.reduce(lambda inner, _: {"type": "array", "items": inner}, range(levels), NULL)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        (make_nested(bounds.SCHEMA_DEPTH_MAX), "nests deeper"),
        ({"enum": list(range(bounds.SCHEMA_NODES_MAX))}, "too large"),
        ({"const": "x" * bounds.SCHEMA_BYTES_MAX}, "too large"),
        ({"not": {}}, "can't be satisfied: at its root 'not' allows no value"),
        ({"type": "string", "enum": [1]}, "at its root no listed value is valid under its other keywords"),
        (
            {"type": "object", "minProperties": 2, "properties": {"a": {}}, "additionalProperties": False},
            "at its root no value",
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"items": {}, "allOf": [{"type": "null"}, {"const": 1}]}},
                "required": ["a"],
            },
            "at /properties/a no value is valid under 'items', 'allOf' together",
        ),
        (
            {"type": "integer", "minimum": 2, "maximum": 1},
            "no value is valid under 'type', 'minimum', 'maximum' together",
        ),
        (
            {"type": "object", "properties": {"a": {}}, "required": ["b"], "additionalProperties": False},
            'at its root the property "b" is required, and not allowed',
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/a"}},
                "required": ["a"],
                "$defs": {"a": {"$ref": "#/$defs/a"}},
            },
            r"can't be satisfied: at /\$defs/a it requires itself",
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "requires itself"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "requires itself"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "requires itself"),
        ({"type": "array", "minItems": 2, "prefixItems": [NULL, {"$ref": "#"}]}, "requires itself"),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "requires itself"),
        ({"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}, "requires itself"),
    ],
)
def test_too_large_or_unsatisfiable_schema_is_refused(schema: dict[str, Any], fault: str, strict: bool) -> None:
    with pytest.raises(BadRequestError, match=fault) as caught:
        prepare(schema, strict)
    assert caught.value.param == "schema"


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (make_nested(bounds.SCHEMA_DEPTH_MAX - 2), []),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, {"a": {"a": {}}}),
        ({"type": "array", "items": {"$ref": "#"}}, [[], [[]]]),
        ({"anyOf": [{"type": "array", "items": {"$ref": "#"}}, NULL]}, [None, []]),
        (
            {
                "type": "object",
                "properties": {"a": {"anyOf": [{"$ref": "#"}, NULL]}},
                "required": ["a"],
            },
            {"a": {"a": None}},
        ),
        (
            {"$ref": "#/$defs/0", "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(40)} | {"40": NULL}},
            None,
        ),
    ],
)
def test_recursive_schema_that_can_end_is_accepted(schema: dict[str, Any], value: object) -> None:
    assert PreparedTrial(schema).is_valid(value)


def test_doubling_references_are_visited_once() -> None:
    def pair(n: int) -> dict[str, Any]:
        inner = {"$ref": f"#/$defs/{n + 1}"}
        return {"type": "object", "properties": {"x": inner, "y": inner}}

    schema = {"$ref": "#/$defs/0", "$defs": {str(n): pair(n) for n in range(100)} | {"100": NULL}}
    assert PreparedTrial(schema).is_valid({"x": {"y": {}}})


def test_comparison_of_many_branches_is_bounded() -> None:
    """All names of the first branch with all branches would be millions of comparisons."""
    names = {f"n{n}": {"const": n} for n in range(3000)}
    schema = {"oneOf": [{"type": "object", "properties": names}, *({"type": "object"} for _ in range(3000))]}
    assert prepare(schema).checks == {""}
