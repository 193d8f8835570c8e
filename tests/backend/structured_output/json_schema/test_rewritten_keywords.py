"""Keywords that llguidance does not know, rewritten so that a grammar forces them exactly, or else checked."""

import json
from typing import Any

import pytest

from support.json_schema.json_grammars import PreparedTrial

CLOSED = {"type": "object", "additionalProperties": False}
ONE = {"enum": [1]}


def make_object(*names: str, **more: Any) -> dict[str, Any]:
    return {**CLOSED, "properties": dict.fromkeys(names, ONE), **more}


def make_branch(tag: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": tag, "default": tag}, **more}, "required": list(more)}


# (schema, values that it allows, values that it does not)
Case = tuple[dict[str, Any], list[Any], list[Any]]

FORCED: dict[str, Case] = {
    "uniqueItems: false": ({"type": "array", "items": ONE, "uniqueItems": False}, [[], [1, 1]], [[2]]),
    "uniqueItems of one item": ({"type": "array", "items": ONE, "uniqueItems": True, "maxItems": 1}, [[1]], [[1, 1]]),
    "propertyNames that says nothing": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": ONE},
        [{"a": 1}],
        [{"a": 2}],
    ),
    "propertyNames, listed": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": ONE},
        [{}, {"a": 1}, {"a": 1, "b": 1}],
        [{"c": 1}, {"a": 2}],
    ),
    "propertyNames, one": ({"type": "object", "propertyNames": {"const": "a"}}, [{"a": 5}], [{"b": 5}]),
    "propertyNames, listed, with properties": (
        {"type": "object", "properties": {"a": ONE, "x": ONE}, "propertyNames": {"enum": ["a", "b"]}},
        [{"a": 1, "b": None}],
        [{"x": 1}, {"a": 2}],
    ),
    "propertyNames, a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": ONE},
        [{"a": 1, "b": 1}],
        [{"c": 1}, {"a": 2}],
    ),
    "propertyNames, a pattern of listed names": (
        {**CLOSED, "properties": {"ax": ONE, "b": ONE}, "propertyNames": {"pattern": "^a"}},
        [{}, {"ax": 1}],
        [{"b": 1}, {"a": 1}],
    ),
    "propertyNames: false": (
        {"type": "object", "properties": {"a": ONE}, "patternProperties": {"^b": ONE}, "propertyNames": False},
        [{}],
        [{"a": 1}, {"b": 1}, {"c": 1}],
    ),
    "propertyNames, a length": (
        {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}},
        [{"ab": 1, "äöü": 1}],
        [{"a": 1}, {"abcd": 1}],
    ),
    "propertyNames by reference": (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"enum": ["a"]}}},
        [{"a": 1}],
        [{"b": 1}],
    ),
    "propertyNames, excluded": (
        {"type": "object", "propertyNames": {"not": {"enum": ["a"]}}},
        [{"b": 1}],
        [{"a": 1}],
    ),
    "not: {}": ({**CLOSED, "properties": {"a": ONE, "b": {"not": {}}}}, [{"a": 1}], [{"a": 1, "b": 1}]),
    "not of types": ({"not": {"type": ["string", "object"]}}, [1, None, []], ["", {}]),
    "not of constants within a list": ({"enum": [1, 2, "a"], "not": {"enum": [1]}}, [2, "a"], [1]),
    "not of one number, spelled otherwise": ({"enum": [1.0, 2], "not": {"const": 1}}, [2], [1]),
    "not of a boolean": ({"type": "boolean", "not": {"const": True}}, [False], [True, 1]),
    "not of null": ({"not": {"const": None}}, ["", 0, False], [None]),
    "not of a name": (make_object("a", "b", **{"not": {"required": ["a"]}}), [{}, {"b": 1}], [{"a": 1}]),
    "not of names": (
        make_object("a", "b", **{"not": {"required": ["a", "b"]}}),
        [{}, {"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}],
    ),
    "not of any of the names": (
        make_object("a", "b", **{"not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}}),
        [{}],
        [{"a": 1}, {"b": 1}],
    ),
    "not of bounds": ({"type": "integer", "maximum": 5, "not": {"minimum": 3}}, [2, -7], [3, 5]),
    "not of lengths": ({"type": "string", "not": {"minLength": 2}}, ["", "a"], ["ab"]),
    "not of not": ({"not": {"not": {"type": "string"}}}, ["a"], [1]),
    "branches that only require": (
        make_object("a", "b", oneOf=[{"required": ["a"]}, {"required": ["b"]}]),
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "any of the branches that only require": (
        make_object("a", "b", anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{}],
    ),
    "oneOf of types": ({"oneOf": [{"type": "string"}, {"type": "array", "items": ONE}]}, ["a", [1]], [1, [2]]),
    "oneOf with tags that have defaults": (
        {
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            "$defs": {"Cat": make_branch("cat", lives=ONE), "Dog": make_branch("dog", age=ONE)},
        },
        [{"kind": "cat", "lives": 1}, {"kind": "dog", "age": 1}],
        [{"kind": "cat", "age": 1}, {"kind": "cow"}],
    ),
    "oneOf of one branch": (
        {"oneOf": [{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "additionalProperties": False}]},
        [{}, {"a": 1}],
        [{"a": 3}],
    ),
    "oneOf of bounds": (
        {"type": "integer", "oneOf": [{"minimum": 10}, {"maximum": 20}]},
        [9, 21],
        [10, 20],
    ),
    "if on a listed value": (
        {
            **CLOSED,
            "properties": {"kind": {"enum": ["a", "b"]}, "x": ONE, "y": ONE},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["x"]},
            "else": {"required": ["y"]},
        },
        [{"kind": "a", "x": 1}, {"kind": "b", "y": 1}],
        [{"kind": "a"}, {"kind": "a", "y": 1}, {"kind": "b", "x": 1}],
    ),
    "if within allOf on a value that is listed around it": (
        {
            **CLOSED,
            "properties": {"kind": {"$ref": "#/$defs/kind"}, "x": ONE, "y": ONE},
            "required": ["kind"],
            "allOf": [
                {"if": {"properties": {"kind": {"const": "a"}}}, "then": {"required": ["x"]}},
                {"if": {"properties": {"kind": {"enum": ["b", "c"]}}}, "then": {"not": {"required": ["x"]}}},
            ],
            "$defs": {"kind": {"enum": ["a", "b", "c"]}},
        },
        [{"kind": "a", "x": 1, "y": 1}, {"kind": "b", "y": 1}],
        [{"kind": "a"}, {"kind": "b", "x": 1}, {"kind": "c", "x": 1}],
    ),
    "if on a name": (
        make_object("a", "b", **{"if": {"required": ["a"]}, "then": {"required": ["b"]}}),
        [{}, {"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    "if without then": ({"type": "string", "if": {"minLength": 3}}, ["a", "abcd"], [1]),
    "dependentRequired": (
        make_object("a", "b", "c", dependentRequired={"a": ["b", "c"]}),
        [{}, {"b": 1}, {"a": 1, "b": 1, "c": 1}],
        [{"a": 1}, {"a": 1, "b": 1}],
    ),
    "dependencies": (
        make_object("a", "b", dependencies={"a": ["b"], "b": {"required": ["a"]}}),
        [{}, {"a": 1, "b": 1}],
        [{"a": 1}, {"b": 1}],
    ),
    "dependentSchemas": (
        {
            "type": "object",
            "properties": {"a": ONE, "b": {"enum": [1, 2]}},
            "additionalProperties": False,
            "dependentSchemas": {"a": {"properties": {"b": {"const": 2}}}},
        },
        [{"b": 1}, {"a": 1, "b": 2}, {"a": 1}],
        [{"a": 1, "b": 1}],
    ),
    "minProperties: 1": (make_object("a", "b", minProperties=1), [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}], [{}]),
    "minProperties: 2 of 3": (
        make_object("a", "b", "c", minProperties=2),
        [{"a": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}],
        [{}, {"b": 1}],
    ),
    "minProperties beside required": (
        make_object("a", "b", required=["a"], minProperties=2),
        [{"a": 1, "b": 1}],
        [{"a": 1}, {"b": 1}],
    ),
    "maxProperties": (
        make_object("a", "b", "c", required=["a"], maxProperties=2),
        [{"a": 1}, {"a": 1, "c": 1}],
        [{"a": 1, "b": 1, "c": 1}, {}],
    ),
    "unevaluatedProperties": (
        {"type": "object", "properties": {"a": ONE}, "unevaluatedProperties": False},
        [{"a": 1}, {}],
        [{"b": 1}],
    ),
    "unevaluatedProperties beside allOf": (
        {
            "type": "object",
            "allOf": [{"properties": {"a": ONE}}, {"$ref": "#/$defs/b"}],
            "properties": {"c": ONE},
            "unevaluatedProperties": False,
            "$defs": {"b": {"properties": {"b": ONE}}},
        },
        [{"a": 1, "b": 1, "c": 1}],
        [{"d": 1}, {"a": 2}],
    ),
    "unevaluatedItems": (
        {"type": "array", "prefixItems": [ONE], "unevaluatedItems": False},
        [[], [1]],
        [[1, 1]],
    ),
    "a pattern of all names": (
        {"type": "object", "patternProperties": {".*": ONE}, "additionalProperties": {"type": "string"}},
        [{"a": 1}],
        [{"a": "x"}],
    ),
    "annotations beside a reference": (
        {
            "properties": {"next": {"$ref": "#", "description": "the next one", "deprecated": False}},
            "type": "object",
            "additionalProperties": False,
        },
        [{}, {"next": {"next": {}}}],
        [{"next": 1}],
    ),
    "a list filtered by other keywords": (
        {"enum": [1, 2.5, "a", "abc", None], "type": ["string", "integer"], "maxLength": 2},
        [1, "a"],
        [2.5, "abc", None],
    ),
    "a lookahead": ({"type": "string", "pattern": "^(?!no)[a-z]{2}$"}, ["ab", "on"], ["no", "a"]),
    "contains of nothing": ({"type": "array", "contains": ONE, "minContains": 0}, [[], [2]], [{}]),
}

CHECKED: dict[str, Case] = {
    "propertyNames, a pattern, beside other names": (
        {
            "type": "object",
            "properties": {"ax": {"enum": [2]}, "b": ONE},
            "additionalProperties": ONE,
            "propertyNames": {"pattern": "^a"},
        },
        [{}, {"ax": 2}, {"ax": 2, "ay": 1}],
        [{"b": 1}, {"c": 1}, {"ax": 1}],
    ),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, [[], [1, 2], ["a", None]], [[1, 1], [{"a": 1}, {"a": 1}]]),
    "contains": ({"type": "array", "contains": ONE, "maxContains": 1}, [[1], [2, 1]], [[], [2], [1, 1]]),
    "minProperties over free keys": (
        {"type": "object", "additionalProperties": ONE, "minProperties": 2},
        [{"a": 1, "b": 1}],
        [{}, {"a": 1}],
    ),
    "oneOf of overlapping patterns": (
        {"type": "string", "oneOf": [{"pattern": "a"}, {"pattern": "b"}]},
        ["a", "b"],
        ["ab", "c"],
    ),
    "not of a pattern": ({"type": "string", "not": {"pattern": "^no"}}, ["yes"], ["no", "nothing"]),
    "if on what is not listed": (
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": ONE},
            "additionalProperties": False,
            "if": {"properties": {"a": {"const": "x"}}, "required": ["a"]},
            "then": {"required": ["b"]},
        },
        [{}, {"a": "y"}, {"a": "x", "b": 1}],
        [{"a": "x"}],
    ),
    "not of an integer": ({"type": "integer", "not": {"const": 3}}, [1, 4], [3, "a"]),
    "not of integers": ({"type": "integer", "minimum": 0, "not": {"enum": [1, 2.0]}}, [0, 3], [1, 2, -1]),
    "if on an integer": (
        {"type": "integer", "if": {"const": 1}, "then": {"maximum": 0}, "else": {"minimum": 5}},
        [5, 7],
        [1, 0, 3],
    ),
    "a lookbehind": ({"type": "string", "pattern": "^[a-z]{2}(?<!no)$"}, ["ab", "on"], ["no", "a"]),
    "bounds beyond 64 bits": ({"type": "integer", "maximum": 1 << 70}, [5, 1 << 65], [1 << 71]),
    "patternProperties that overlap": (
        {
            "type": "object",
            "patternProperties": {"^a": {"enum": [1, 2]}, "b$": {"enum": [2, 3]}},
            "additionalProperties": False,
        },
        [{"a": 1}, {"b": 3}, {"ab": 2}],
        [{"ab": 1}, {"c": 1}],
    ),
    "unevaluatedProperties beside branches": (
        {
            "type": "object",
            "anyOf": [{"properties": {"a": ONE}, "required": ["a"]}, {"properties": {"b": ONE}}],
            "unevaluatedProperties": False,
        },
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{"c": 1}, {"b": 2}],
    ),
    "a reference to itself beside other keywords": (
        {
            "type": "object",
            "properties": {"next": {"$ref": "#", "minProperties": 1}},
            "additionalProperties": False,
        },
        [{}],
        [{"next": {}}, {"next": 1}],
    ),
}


@pytest.mark.parametrize("name", FORCED)
def test_keyword_is_forced_exactly(name: str) -> None:
    schema, allowed, excluded = FORCED[name]
    trial = PreparedTrial(schema)
    assert trial.prepared.checks == frozenset()
    assert {json.dumps(value): trial.is_forced(value) for value in [*allowed, *excluded]} == {
        **{json.dumps(value): True for value in allowed},
        **{json.dumps(value): False for value in excluded},
    }


@pytest.mark.parametrize("name", CHECKED)
def test_keyword_is_checked(name: str) -> None:
    schema, allowed, excluded = CHECKED[name]
    trial = PreparedTrial(schema)
    assert trial.prepared.checks
    assert [value for value in allowed if not trial.is_forced(value)] == []
    assert [value for value in excluded if trial.is_valid(value)] == []


@pytest.mark.parametrize(
    ("schema", "is_free"),
    [
        ({"type": "number"}, True),
        ({"type": ["null", "number"]}, True),
        ({}, True),
        ({"type": "object"}, True),
        ({"type": "array"}, True),
        ({**CLOSED, "properties": {"a": {"type": "array", "items": {"type": "number"}}}}, True),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, True),
        ({"anyOf": [{"type": "string"}, True]}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": True}}, True),
        ({"type": "integer"}, False),
        ({"type": "number", "minimum": 0}, False),
        ({"type": "string", "pattern": "^(?!no)[a-z]{2}$"}, False),
        ({**CLOSED, "properties": {"a": {"enum": [1.5]}}}, False),
        ({"type": "string", "anyOf": [{"minLength": 1}, {"pattern": "a"}]}, False),
    ],
)
def test_numbers_without_bounds_are_noticed(schema: dict[str, Any], is_free: bool) -> None:
    """The grammar takes 1e999, which no reader can."""
    assert PreparedTrial(schema).prepared.has_free_numbers == is_free
