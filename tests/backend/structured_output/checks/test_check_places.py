"""Places that checks concern: followed through certain parts of a schema, validated around uncertain ones."""

import re
from typing import Any

import pytest

from warmline_backend.structured_output.checks.places import SUBSCHEMAS_MAX, VALIDATIONS_MAX, CheckPlaces

UNIQUE = {"uniqueItems": True}


def make_places(schema: Any, *checks: str) -> CheckPlaces:
    return CheckPlaces(schema, checks, lambda pattern: lambda name: bool(re.search(pattern, name)))


def find_pointers(places: CheckPlaces, *steps: str | int) -> list[str]:
    place = places.root
    for step in steps:
        place = places.find_child(place, step)
    return place.pointers


@pytest.mark.parametrize(
    ("schema", "check", "steps", "pointers"),
    [
        (UNIQUE, "", [], [""]),
        (UNIQUE, "", [0], []),
        ({"properties": {"a": UNIQUE}}, "/properties/a", ["a"], ["/properties/a"]),
        ({"properties": {"a": UNIQUE}}, "/properties/a", [], []),
        ({"properties": {"a": UNIQUE}}, "/properties/a", ["b"], []),
        ({"properties": {"a/~b": UNIQUE}}, "/properties/a~1~0b", ["a/~b"], ["/properties/a~1~0b"]),
        ({"items": UNIQUE}, "/items", [3], ["/items"]),
        ({"prefixItems": [True, UNIQUE], "items": {}}, "/prefixItems/1", [1], ["/prefixItems/1"]),
        ({"prefixItems": [True, UNIQUE], "items": {}}, "/prefixItems/1", [2], []),
        ({"prefixItems": [True], "items": UNIQUE}, "/items", [0], []),
        ({"prefixItems": [True], "items": UNIQUE}, "/items", [1], ["/items"]),
        ({"patternProperties": {"^x": UNIQUE}}, "/patternProperties/^x", ["xy"], ["/patternProperties/^x"]),
        ({"patternProperties": {"^x": UNIQUE}}, "/patternProperties/^x", ["y"], []),
        ({"additionalProperties": UNIQUE}, "/additionalProperties", ["y"], ["/additionalProperties"]),
        ({"additionalProperties": UNIQUE, "properties": {"y": True}}, "/additionalProperties", ["y"], []),
        ({"additionalProperties": UNIQUE, "patternProperties": {"y": True}}, "/additionalProperties", ["y"], []),
        ({"allOf": [{}, UNIQUE]}, "/allOf/1", [], ["/allOf/1"]),
        ({"allOf": [{"allOf": [{"items": UNIQUE}]}]}, "/allOf/0/allOf/0/items", [0], ["/allOf/0/allOf/0/items"]),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a b": UNIQUE}}, "/$defs/a b", [], ["/$defs/a b"]),
        ({"items": {"$ref": "#"}, **UNIQUE}, "", [0, 0], [""]),
        ({"anyOf": [{"items": UNIQUE}, {}]}, "/anyOf/0/items", [], [""]),
        ({"anyOf": [{"items": UNIQUE}, {}]}, "/anyOf/0/items", [0], []),
        (
            {"items": {"oneOf": [{"$ref": "#/$defs/a"}], "$defs": {}}, "$defs": {"a": UNIQUE}},
            "/$defs/a",
            [0],
            ["/items"],
        ),
        ({"not": UNIQUE}, "/not", [], [""]),
        ({"if": {}, "then": {"properties": {"a": UNIQUE}}}, "/then/properties/a", [], [""]),
        ({"else": UNIQUE}, "/else", [], [""]),
        ({"contains": UNIQUE}, "/contains", [], [""]),
        ({"propertyNames": {"pattern": "a"}}, "/propertyNames", [], [""]),
        ({"unevaluatedItems": UNIQUE}, "/unevaluatedItems", [], [""]),
        ({"dependentSchemas": {"a": UNIQUE}}, "/dependentSchemas/a", [], [""]),
        ({"$defs": {"a": UNIQUE}}, "/$defs/a", [], []),
        ({"properties": {"a": True}}, "/properties/a", [], [""]),  # names no keyword of its own
        ({"properties": {"$ref": UNIQUE, "allOf": {}}}, "/properties/$ref", ["$ref"], ["/properties/$ref"]),
        ({"$ref": "#/$defs/missing", "items": UNIQUE}, "/items", [0], ["/items"]),
    ],
)
def test_checked_places(schema: Any, check: str, steps: list[str | int], pointers: list[str]) -> None:
    assert find_pointers(make_places(schema, check), *steps) == pointers


def test_recursion_through_uncertain_parts() -> None:
    tree = {"properties": {"child": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}, "tags": UNIQUE}}
    places = make_places({"$ref": "#/$defs/tree", "$defs": {"tree": tree}}, "/$defs/tree/properties/tags")
    assert find_pointers(places) == []
    assert find_pointers(places, "tags") == ["/$defs/tree/properties/tags"]
    assert find_pointers(places, "child") == ["/$defs/tree/properties/child"]
    assert find_pointers(places, "child", "tags") == []  # part of the child's validation


def test_several_subschemas_at_one_place() -> None:
    parts = [{"properties": {"a": dict(UNIQUE)}} for _ in range(2)]
    schema = {**parts[0], "patternProperties": {"a": dict(UNIQUE)}, "allOf": [parts[1]]}
    checks = ("/properties/a", "/patternProperties/a", "/allOf/0/properties/a")
    assert sorted(find_pointers(make_places(schema, *checks), "a")) == sorted(checks)


def test_one_object_at_two_places_counts_once() -> None:
    schema = {"properties": {"a": UNIQUE, "b": UNIQUE}}
    assert find_pointers(make_places(schema, "/properties/b"), "a") == ["/properties/a"]


def test_validation_covers_parts_in_place() -> None:
    schema = {"not": {"const": 1}, "allOf": [{**UNIQUE, "items": UNIQUE}]}
    places = make_places(schema, "", "/allOf/0", "/allOf/0/items")
    assert find_pointers(places) == [""]
    assert find_pointers(places, 0) == ["/allOf/0/items"]


@pytest.mark.parametrize("part", [UNIQUE, {"properties": {"a": UNIQUE}}])
@pytest.mark.parametrize("count", [VALIDATIONS_MAX + 1, SUBSCHEMAS_MAX + 1])
def test_many_subschemas_are_validated_as_one(part: Any, count: int) -> None:
    suffix = "/properties/a" if "properties" in part else ""
    schema = {"items": {"allOf": [dict(part) for _ in range(count)]}}
    places = make_places(schema, *(f"/items/allOf/{index}{suffix}" for index in range(count)))
    assert find_pointers(places, 0) == ["/items"]
    assert find_pointers(places, 0, "a") == []


def test_only_patterns_that_matter_are_compiled() -> None:
    def refuse(pattern: str) -> Any:
        raise AssertionError(pattern)

    schema = {"patternProperties": {"(": {}}, "properties": {"a": UNIQUE}}
    assert CheckPlaces(schema, ["/properties/a"], refuse).root.followed


def test_deep_chains_of_references() -> None:
    count = 3000
    definitions: dict[str, Any] = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(count)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": UNIQUE}}
    assert find_pointers(make_places(schema, f"/$defs/d{count}")) == [""]
