"""Validation of complete values: draft 2020-12, exact numbers, and a bound on the work of each call."""

import json
from decimal import Decimal
from functools import reduce
from typing import Any

import pytest

from warmline_backend.structured_output.json_schema.patterns import CheckTooCostlyError, PatternError
from warmline_backend.structured_output.json_schema.validator import SchemaError, SchemaValidator, StepBudget

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "parts": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["name"],
            "unevaluatedProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
IF_CARD = {
    "if": {"properties": {"kind": {"const": "card"}}, "required": ["kind"]},
    "then": {"required": ["number"]},
    "else": {"properties": {"number": False}},
}


def find(schema: Any, value: Any, pointer: str = "") -> SchemaError | None:
    return SchemaValidator(schema).find_error(value, pointer)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": ["integer", "null"]}, [1, 1.0, 10**30, None], [1.5, True, "1"]),
        ({"enum": [1, "a", [1, {"b": 2.0}], None]}, [1.0, [1, {"b": 2}], None], [True, "b", [{"b": 2}, 1], {}]),
        ({"const": {"a": 0, "b": [False]}}, [{"b": [False], "a": 0.0}], [{"a": 0, "b": [0]}, {"a": 0}]),
        ({"uniqueItems": True}, [[1, True, "1", [1], [True]]], [[1, 1.0], [{"a": 1, "b": 2}, {"b": 2, "a": 1}]]),
        ({"contains": {"type": "null"}, "minContains": 2, "maxContains": 3}, [[None, 1, None]], [[None], [None] * 4]),
        ({"not": {"required": ["a"]}}, [{}], [{"a": 1}, 3]),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, [1.5], [1, "a"]),
        (IF_CARD, [{"kind": "card", "number": 1}, {"kind": "cash"}], [{"kind": "card"}, {"kind": "cash", "number": 1}]),
        ({"propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
        ({"dependentRequired": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
        ({"dependentSchemas": {"a": {"maxProperties": 1}}}, [{"a": 1}, {"b": 1, "c": 1}], [{"a": 1, "b": 1}]),
        ({"patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False}, [{"x1": None}], [{"y": None}]),
        ({"prefixItems": [{"type": "null"}], "items": {"type": "integer"}}, [[None, 1], []], [[1], [None, None]]),
        ({"prefixItems": [True], "items": False}, [[1]], [[1, 2]]),
        ({"allOf": [{"prefixItems": [True]}], "unevaluatedItems": False}, [[1]], [[1, 2]]),
        ({"anyOf": [{"properties": {"a": {"type": "null"}}}, True], "unevaluatedProperties": False}, [{}], [{"a": 1}]),
        ({"contains": {"type": "null"}, "unevaluatedItems": {"type": "integer"}}, [[None, 1]], [[None, "a"]]),
        ({"minLength": 2, "maxLength": 3}, ["😀😀", "abc"], ["😀", "abcd"]),
        (TREE, [{"name": "a", "parts": [{"name": "b"}]}], [{"name": "a", "parts": [{"name": "b", "other": 1}]}]),
        ({"items": {"$ref": "#"}, "type": "array"}, [[[], [[]]]], [[[], [{}]]]),
        ({"$ref": "#/prefixItems/1", "prefixItems": [True, {"maxItems": 1}]}, [[]], [[1, 2]]),
        ({"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"type": "null"}}}, [None], [1]),
        ({"properties": {"a": {"$ref": "#/other/x"}}, "other": {"x": {"type": "null"}}}, [{"a": None}], [{"a": 1}]),
    ],
)
def test_values_are_judged_as_the_draft_says(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    validator = SchemaValidator(schema)
    assert [value for value in valid if validator.find_error(value)] == []
    assert [value for value in invalid if not validator.find_error(value)] == []


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"multipleOf": 0.01}, ["19.99", "0.07", "-4.35", "1e300"], ["0.005", "19.991"]),
        ({"multipleOf": 3}, ["9007199254740993", "0"], ["9007199254740994", "1.5"]),
        ({"maximum": 9007199254740992}, ["9007199254740992"], ["9007199254740993", "1e17"]),
        ({"minimum": 0.1}, ["0.1", "1e400"], ["0.09999999999999999999"]),
        ({"exclusiveMaximum": 1}, ["0.99999999999999999999"], ["1", "1.0", "1e0"]),
        ({"type": "integer"}, ["1e400", "100e-2"], ["1.00000000000000000001", "1e-400"]),
        ({"const": 0.1}, ["0.1", "1e-1"], ["0.10000000000000000001"]),
        ({"enum": [10**40]}, ["1e40", f"{10**40}.0"], [str(10**40 + 1)]),
    ],
)
def test_numbers_are_exact(schema: Any, valid: list[str], invalid: list[str]) -> None:
    validator = SchemaValidator(schema)
    read = [json.loads(text, parse_float=Decimal) for text in (*valid, *invalid)]
    assert [validator.find_error(value) is None for value in read] == [True] * len(valid) + [False] * len(invalid)


def test_floats_count_as_they_are_written() -> None:
    assert find({"multipleOf": 0.01, "minimum": 0.07}, 0.07) is None
    assert find({"type": "integer"}, 1e400) is not None  # read as infinity


def test_subschemas_are_found_by_pointer() -> None:
    schema = {"properties": {"a/b": {"items": {"anyOf": [{"type": "null"}, {"minimum": 3}]}}, "no": False}}
    validator = SchemaValidator(schema)
    assert validator.find_error(2, "/properties/a~1b/items/anyOf/1") is not None
    assert validator.find_error(3, "/properties/a~1b/items/anyOf/1") is None
    assert validator.find_error(None, "/properties/no") == SchemaError("", "false", "is not allowed (false)", False)
    for pointer in ("/properties/c", "/properties", "/properties/a~1b/items/anyOf/2", "/properties/no/type"):
        with pytest.raises(LookupError):
            validator.find_error(3, pointer)


def test_errors_say_where_and_what_without_the_value() -> None:
    schema = {
        "properties": {
            "a~b": {"items": {"required": ["x" * 70]}},
            "list": {"uniqueItems": True},
            "line": {"pattern": "^a$"},
        },
        "additionalProperties": False,
    }
    long = "y" * 10_000
    shown = "x" * 60 + "..."
    assert find(schema, {"a~b": [{long: 1}]}) == SchemaError(
        "/a~0b/0", "required", f'lacks "{shown}" (required)', is_incomplete=False
    )
    assert find(schema, {"list": [long, long]}) == SchemaError(
        "/list", "uniqueItems", "has equal items (uniqueItems)", False
    )
    assert find(schema, {"line": long}) == SchemaError(
        "/line", "pattern", "does not match the pattern (pattern)", False
    )
    error = find(schema, {"other": long})
    assert error == SchemaError(
        "/other", "additionalProperties", "is no allowed property (additionalProperties)", False
    )


@pytest.mark.parametrize(
    ("schema", "value", "keyword", "is_incomplete"),
    [
        ({"required": ["b", "c"]}, {"b": 1}, "required", True),
        ({"minItems": 2}, [1], "minItems", True),
        ({"contains": {"const": 1}}, [2], "contains", True),
        ({"contains": {"const": 1}, "minContains": 2}, [1], "minContains", True),
        ({"allOf": [{"minProperties": 2}]}, {}, "minProperties", True),
        ({"dependentRequired": {"a": ["b"]}}, {"a": 1}, "dependentRequired", True),
        ({"minLength": 3}, "ab", "minLength", True),
        ({"maxItems": 0}, [1], "maxItems", False),
        ({"properties": {"a": {"minItems": 2}}}, {"a": []}, "minItems", False),  # the list is complete
        ({"required": ["b"], "maxProperties": 1}, {"a": 1, "c": 1}, "maxProperties", False),
        ({"anyOf": [{"type": "null"}, {"required": ["b"]}]}, {"a": 1}, "anyOf", True),
        ({"anyOf": [False, {"required": ["b"], "maxProperties": 0}]}, {"a": 1}, "anyOf", False),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"a": 1}, "required", True),
        ({"not": {"required": ["a"]}}, {"a": 1}, "not", False),
    ],
)
def test_an_error_tells_if_more_of_the_value_may_mend_it(
    schema: Any, value: Any, keyword: str, is_incomplete: bool
) -> None:
    error = find(schema, value)
    assert error is not None and (error.keyword, error.is_incomplete) == (keyword, is_incomplete)


def nest(count: int) -> list[Any]:
    return reduce(lambda inner, _: [inner], range(count), list[Any]())


DOUBLING = {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(60)} | {"a60": {"type": "null"}}
EVALUATED = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(60)} | {"a60": {"properties": {}}}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"$ref": "#/$defs/a0", "$defs": DOUBLING}, None),
        ({"$ref": "#/$defs/a0", "$defs": EVALUATED, "unevaluatedProperties": False}, {"a": 1}),
        ({"$ref": "#"}, 1),
        ({"items": {"$ref": "#"}, "type": "array"}, nest(3000)),
        ({"uniqueItems": True}, nest(3000)),
        ({"contains": {}, "minContains": 90_000}, [1] * 90_000),
        ({"items": {"not": {"enum": ["a"]}}}, [1] * 90_000),
        ({"uniqueItems": True}, list(range(90_000))),
        ({"multipleOf": 1}, Decimal("1e99999999")),
        ({"multipleOf": 0.5}, float("1e400")),
        ({"pattern": "^(a+)+$"}, "a" * 3000 + "b"),
    ],
)
def test_costly_checks_are_ended(schema: Any, value: Any) -> None:
    with pytest.raises(CheckTooCostlyError):
        find(schema, value)


def test_large_values_may_take_longer() -> None:
    item = {"type": "object", "properties": {name: {"type": "integer", "minimum": 0} for name in "abcdef"}}
    assert find({"items": item, "contains": item}, [dict.fromkeys("abcdef", 1)] * 500) is None


def test_a_bound_is_one_of_each_call() -> None:
    validator = SchemaValidator({"items": {"type": "integer"}, "uniqueItems": True})
    assert [validator.find_error(list(range(2000))) for _ in range(20)] == [None] * 20


def test_calls_may_share_a_budget() -> None:
    validator, budget = SchemaValidator({"items": {"type": "integer"}, "uniqueItems": True}), StepBudget(6000)
    assert validator.find_error([1, 2], budget=budget) is None and 5900 < budget.left < 6000
    assert validator.find_error(list(range(1000)), budget=budget) is None
    with pytest.raises(CheckTooCostlyError, match="the values take too long"):
        validator.find_error(list(range(4000)), budget=budget)
    with pytest.raises(CheckTooCostlyError, match="the values take too long"):
        validator.find_error(1, budget=budget)
    assert budget.left < 0 and validator.find_error(1) is None


def test_other_keywords_and_values_of_the_wrong_type_have_no_effect() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "$id": 5,
        "$dynamicRef": "#x",
        "minLength": "a",
        "properties": {"$schema": {"$schema": ["x"], "$id": "other", "exclusiveMinimum": True, "$ref": 3}},
        "required": "x",
        "type": "any",
        "anyOf": [3],
        "examples": [{"$ref": "#/nowhere"}],
    }
    assert find(schema, {"$schema": 1}) is None


def test_a_reference_without_target_and_a_wrong_pattern_are_refused() -> None:
    with pytest.raises(LookupError):
        SchemaValidator({"properties": {"a": {"$ref": "#/$defs/none"}}})
    with pytest.raises(PatternError):
        SchemaValidator({"patternProperties": {"(": True}})
