"""JSON schemas of growing nastiness, made from a seed.  All values are bounded: a model with random weights writes on
for as long as it may.
"""

import random
from typing import Any

Schema = dict[str, Any]

WORDS = [
    "",
    "a",
    "läuft",
    "🎉 ключ",
    'say "hi"',
    "back\\slash",
    "line\nbreak",
    "<think>",
    "</s>",
    "a/b~c",
    "\u0007",
    "{}",
]
PATTERNS = ["^[a-z]{1,5}$", r"^\d{3}-\d{2}$", "^(yes|no|перед)$", "^[^a-y]{0,3}z$", r"^\w{2}\.[A-F0-9]{4}$", "^$"]
FORMATS = ["date", "uuid", "ipv4"]
CONSTANTS: list[Any] = [None, True, 0, -1, 3.5, 1e21, [], {}, [1, [2]], {"a": {"b": [None]}}, *WORDS]


class SchemaBuilder:
    """Parts of one schema; `defs` are the targets of its references."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.defs: dict[str, Schema] = {}

    def schema(self, level: int) -> Schema:
        """Make a schema nested up to `level` deep."""
        leaves = [
            self.make_constant,
            self.make_enum,
            self.make_integer,
            self.make_string,
            self.make_pattern_string,
            self.make_scalar,
        ]
        inner = [
            self.make_object,
            self.make_object,
            self.make_array,
            self.make_tuple,
            self.make_any_of,
            self.make_one_of,
            self.make_all_of,
            self.make_reference,
        ]
        if level <= 0 or self._draw.random() < 0.1:
            return self._draw.choice(leaves)()
        return self._draw.choice(inner)(level - 1)

    # ---- leaves

    def make_constant(self) -> Schema:
        return {"const": self._draw.choice(CONSTANTS), "title": "one", "examples": [5]}

    def make_enum(self) -> Schema:
        return {"enum": self._draw.sample(CONSTANTS, self._draw.randint(1, 5))}

    def make_integer(self) -> Schema:
        low, size = self._draw.randint(-1000, 1000), self._draw.randint(0, 500)
        return self._draw.choice(
            [
                {"type": "integer", "minimum": low, "maximum": low + size},
                {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + size + 2},
                {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": self._draw.randint(2, 7)},
                {"type": "integer", "minimum": 10**15, "maximum": 10**15 + size},
            ]
        )

    def make_string(self) -> Schema:
        low = self._draw.randint(0, 4)
        return {"type": "string", "minLength": low, "maxLength": low + self._draw.randint(0, 6)}

    def make_pattern_string(self) -> Schema:
        if self._draw.random() < 0.5:
            return {"type": "string", "pattern": self._draw.choice(PATTERNS)}
        return {"type": "string", "format": self._draw.choice(FORMATS)}

    def make_scalar(self) -> Schema:
        return self._draw.choice(
            [
                {"type": "boolean", "description": "a switch", "default": True},
                {"type": "null"},
                {"type": ["boolean", "null"]},
                {"type": "object", "maxProperties": 0},
                {"type": "object", "properties": {}, "additionalProperties": False},
                {"type": "array", "maxItems": 0},
            ]
        )

    # ---- what holds others

    def make_object(self, level: int) -> Schema:
        names = self._draw.sample([*WORDS, "format", "$ref", "type", "properties"], self._draw.randint(1, 4))
        properties = {name: self.schema(level) for name in names}
        required = [name for name in names if self._draw.random() < 0.6]
        made: Schema = {"type": "object", "properties": properties, "required": required}
        if self._draw.random() < 0.2:
            made["patternProperties"] = {"^x_[0-9]$": self.schema(0)}
            made |= {"required": names, "maxProperties": len(names) + 1}
        return {**made, "additionalProperties": False}

    def make_array(self, level: int) -> Schema:
        low = self._draw.randint(0, 2)
        return {
            "type": "array",
            "items": self.schema(level),
            "minItems": low,
            "maxItems": low + self._draw.randint(0, 2),
        }

    def make_tuple(self, level: int) -> Schema:
        first = [self.schema(level), self.schema(0)]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": self._draw.randint(0, 2)}

    def make_any_of(self, level: int) -> Schema:
        return {"anyOf": [self.schema(level), self.schema(0), self.schema(0)]}

    def make_one_of(self, level: int) -> Schema:
        """Make branches that exclude each other by a tag, or by their types."""
        if self._draw.random() < 0.3:
            return {"oneOf": [{"type": "boolean"}, self.make_string(), self.make_array(level)]}
        tags = self._draw.sample(WORDS, 3)
        return {"oneOf": [self._tagged(tag, level) for tag in tags], "discriminator": {"propertyName": "kind"}}

    def _tagged(self, tag: str, level: int) -> Schema:
        properties = {"kind": {"const": tag}, "value": self.schema(level)}
        return {"type": "object", "properties": properties, "required": ["kind"], "additionalProperties": False}

    def make_all_of(self, level: int) -> Schema:
        return {
            "allOf": [
                {"type": "object", "properties": {"a": self.schema(level)}, "required": ["a"]},
                {"properties": {"b": self.make_integer()}, "required": ["b"]},
            ],
            "type": "object",
            "maxProperties": 2,
        }

    def make_reference(self, level: int) -> Schema:
        """Make a reference.  A list refers to itself, and may end at each node; others are used at most once more."""
        name = self._draw.choice(["node", "a/b", "m~n", "ü"])
        if name not in self.defs:
            made = self._list_of(name) if name == "node" else self.schema(level - 1)
            self.defs.setdefault(name, made)
        return {"$ref": f"#/$defs/{name.replace('~', '~0').replace('/', '~1')}"}

    def _list_of(self, name: str) -> Schema:
        following = {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]}
        properties = {"next": following, "value": self.schema(0)}
        return {"type": "object", "properties": properties, "required": ["next"], "additionalProperties": False}


def make_schema(seed: int, level: int) -> Schema:
    builder = SchemaBuilder(seed)
    made = builder.schema(level)
    return {**made, "$defs": builder.defs} if builder.defs else made


def is_endless(schema: Schema) -> bool:
    """True where the likeliest answer may go on for ever."""
    return "node" in schema.get("$defs", {})
