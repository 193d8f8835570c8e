"""Small schemas of all keywords in odd combinations, made from a seed, and values that tell them apart."""

import itertools
import random
from collections.abc import Callable
from typing import Any

Schema = Any  # an object, true or false

NAMES = ["a", "b", "c"]
_SCALARS: list[Any] = [None, True, False, 0, 1, 2, -1, 1.5, "", "a", "ab", "b"]
_ARRAYS: list[Any] = [[], [1], [1, 1], ["a", 1], [1, 2, 2], [{"a": 1}]]
_OBJECTS: list[Any] = [
    dict(zip(names, values, strict=True))
    for count in range(4)
    for names in itertools.combinations(NAMES, count)
    for values in itertools.product([1, "a"], repeat=count)
]
VALUES = [*_SCALARS, *_ARRAYS, *_OBJECTS, {"x": 1}, {"a": 1, "x": "a"}, {"a": None}, {"a": {"b": 1}}, {"a": [1, 1]}]
_LEAVES: list[Schema] = [
    {"type": "string"},
    {"type": "integer"},
    {"type": "boolean"},
    {"type": ["string", "null"]},
    {"type": "number", "minimum": 1},
    {"type": "array", "uniqueItems": True},
    {"const": 1},
    {"enum": [1, "a"]},
    {"enum": ["a", "b", None]},
    {"maxLength": 1},
    {"pattern": "^a"},
    {"minimum": 1, "maximum": 5},
    {"minItems": 1},
    {"required": ["a"]},
    {"not": {"type": "string"}},
    {"type": "integer", "not": {"const": 1}},
    {"type": ["integer", "boolean"], "not": {"enum": [1, True]}},
    {"type": "string", "not": {"enum": ["a"]}},
    {"enum": [1.0, 2, "a"], "not": {"const": 1}},
    {},
    True,
    False,
]


class KeywordSchemaBuilder:
    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._makers: dict[str, Callable[[int], Any]] = {
            "properties": lambda level: {name: self.make(level) for name in self._draw_names(1, 3)},
            "required": lambda level: self._draw_names(0, 2),
            "additionalProperties": lambda level: self._draw.choice([False, False, True, {"const": 1}]),
            "patternProperties": lambda level: {self._draw.choice(["^a", "^x", ".*"]): self.make(level)},
            "propertyNames": lambda level: self._draw.choice(
                [{"type": "string"}, {"enum": ["a", "b"]}, {"pattern": "^a"}, {"maxLength": 1}, {"not": {"const": "a"}}]
            ),
            "minProperties": lambda level: self._draw.randint(0, 3),
            "maxProperties": lambda level: self._draw.randint(0, 3),
            "dependentRequired": lambda level: {self._draw.choice(NAMES): self._draw_names(0, 2)},
            "dependentSchemas": lambda level: {self._draw.choice(NAMES): self.make(level)},
            "uniqueItems": lambda level: self._draw.random() < 0.7,
            "prefixItems": lambda level: [self.make(level) for _ in range(self._draw.randint(1, 2))],
            "$ref": lambda level: "#/$defs/" + self._draw.choice(["p", "q"]),
            "enum": lambda level: self._draw.sample(VALUES, 3),
        }
        for key in ("anyOf", "oneOf", "allOf"):
            self._makers[key] = lambda level: [self.make(level) for _ in range(self._draw.randint(1, 3))]
        for key in ("not", "if", "then", "else", "items", "contains", "unevaluatedItems", "unevaluatedProperties"):
            self._makers[key] = self.make

    def build(self) -> Schema:
        """Make a schema with two definitions, of which neither refers to itself."""
        made = self.make(self._draw.randint(1, 3))
        definitions = {"p": self._draw.choice(_LEAVES), "q": self._draw.choice(_LEAVES)}
        return {**made, "$defs": definitions} if isinstance(made, dict) else {"allOf": [made]}

    def make(self, level: int) -> Schema:
        if level <= 0 or self._draw.random() < 0.15:
            return self._draw.choice(_LEAVES)
        kinds = ["object", "object", "object", "integer", "string", ["integer", "null"], ["array", "object"]]
        made: dict[str, Any] = {"type": self._draw.choice(kinds)} if self._draw.random() < 0.6 else {}
        for key in self._draw.choices([*self._makers, "branches", "conditions"], k=self._draw.randint(1, 3)):
            if key == "branches":
                made |= self._make_branches()
            else:
                made |= self._make_conditions(level) if key == "conditions" else {key: self._makers[key](level - 1)}
        if "if" in made and "then" not in made:
            made["then"] = self.make(level - 1)
        return made

    def _make_branches(self) -> dict[str, Any]:
        """Make branches that only require, or that a tag tells apart."""
        if self._draw.random() < 0.5:
            return {self._draw.choice(["oneOf", "anyOf"]): [{"required": [name]} for name in self._draw_names(1, 3)]}
        properties = [{"a": {"const": tag}, "b": self._draw.choice(_LEAVES)} for tag in (1, "a")]
        return {"oneOf": [{"type": "object", "required": ["a"], "properties": each} for each in properties]}

    def _make_conditions(self, level: int) -> dict[str, Any]:
        """Make conditions on one property with listed values."""
        conditions = []
        for values in ([1], ["a"], [1, "a"], ["b"])[: self._draw.randint(1, 4)]:
            made: dict[str, Any] = {"if": {"properties": {"a": {"enum": values}}}, "then": self.make(level - 1)}
            if self._draw.random() < 0.5:
                made["if"]["required"] = ["a"]
            if self._draw.random() < 0.3:
                made["else"] = self.make(level - 1)
            conditions.append(made)
        return {"type": "object", "properties": {"a": {"enum": [1, "a", None]}}, "allOf": conditions}

    def _draw_names(self, least: int, most: int) -> list[str]:
        return self._draw.sample(NAMES, self._draw.randint(least, most))
