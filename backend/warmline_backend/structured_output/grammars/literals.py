"""Values in notations that resemble JSON: Gemma's and Python's.  Pure."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warmline_backend.request.schemas import (
    Schema,
    get_typed,
    iter_objects,
    list_required_names,
    list_values,
    resolve_references,
)
from warmline_backend.structured_output.grammars.lark import LarkBuilder, join_optional_items, quote_literal
from warmline_backend.structured_output.grammars.literal_values import build_text_pattern

_STRING_KEYWORDS = ("pattern", "format", "minLength", "maxLength")
_NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ITEM_COUNT_MAX = 1000
_ESCAPES = '"\\bfnrtu'  # of the same meaning in Python and JSON


@dataclass(frozen=True)
class LiteralNotation:
    """Notation of values."""

    comma: str
    colon: str
    format_key: Callable[[str], str]
    key_pattern: str
    format_string: Callable[[str], str]
    write_string: Callable[[LarkBuilder, Schema], str]  # -> an expression
    words: Mapping[bool | None, str]  # of true, false and null


def create_gemma_notation(quote: str, excluded: tuple[str, ...] = ()) -> LiteralNotation:
    """Bare keys, no spaces, and strings between markers that contain none of `excluded`."""

    def string(lark: LarkBuilder, schema: Schema) -> str:
        return f"{lark.literal(quote)} {lark.text_until(quote, excluded=excluded, pattern=build_text_pattern(schema))}"

    return LiteralNotation(
        comma=",",
        colon=":",
        format_key=lambda name: name,
        key_pattern="/[A-Za-z_][A-Za-z0-9_]*/",
        format_string=lambda text: f"{quote}{text}{quote}",
        write_string=string,
        words={True: "true", False: "false", None: "null"},
    )


def _write_python_string(lark: LarkBuilder, schema: Schema) -> str:
    """Write in double quotes, or in single ones where neither length nor pattern is limited."""
    double = lark.json(schema, json_allowed_escapes=_ESCAPES)
    if schema.keys() & _STRING_KEYWORDS:
        return double
    return lark.one_of([double, r"""/'([^'\\\n]|\\['"\\nrt])*'/"""])


PYTHON_NOTATION = LiteralNotation(
    comma=", ",
    colon=": ",
    format_key=lambda name: json.dumps(name, ensure_ascii=False),
    key_pattern=r"""/"[^"\\\n]*"|'[^'\\\n]*'/""",
    format_string=repr,
    write_string=_write_python_string,
    words={True: "True", False: "False", None: "None"},
)


class LiteralWriter:
    """Writer of one tool's values."""

    def __init__(self, lark: LarkBuilder, notation: LiteralNotation, root: Schema) -> None:
        self._lark, self._notation, self._root = lark, notation, root
        self._comma = quote_literal(notation.comma)
        self._rule_names: dict[str | int, str] = {}
        self._any_rule = ""

    def write_object(self, schema: Schema) -> str:
        """Write an object in braces."""
        properties, names = schema.get("properties"), list_required_names(schema)
        if not isinstance(properties, Mapping):
            others = schema.get("additionalProperties", True)
            return quote_literal("{}") if others is False else self._write_any_object(self.write_value(others))
        items = [
            (name in names, f"{self._write_key(name)} {self.write_value(part)}")
            for name, part in properties.items()
            if part is not False
        ]
        return _enclose("{}", join_optional_items(self._lark, items, self._notation.comma))

    def _write_key(self, name: str) -> str:
        return quote_literal(self._notation.format_key(name) + self._notation.colon)

    def write_value(self, schema: Any) -> str:
        """Write the values of a schema, as far as the notation can express it."""
        if not isinstance(schema, Mapping):
            return self.write_any()
        if isinstance(reference := schema.get("$ref"), str):
            return self._write_rule(reference, resolve_references(schema, self._root))
        if words := list_values(schema):
            return self._lark.one_of(self._write_constant(word) for word in words)
        for key in ("anyOf", "oneOf"):
            if branches := get_typed(schema, key, list):
                return self._lark.one_of(self.write_value(branch) for branch in branches)
        if parts := get_typed(schema, "allOf", list):
            return self._write_rule(id(schema), self._merge_all_of(schema, parts))
        if types := get_typed(schema, "type", list):
            return self._lark.one_of(self._write_type(name, schema) for name in types)
        return self._write_type(schema.get("type"), schema)

    def write_any(self) -> str:
        """Write any value."""
        if not self._any_rule:
            self._any_rule = value = self._lark.reserve_rule()
            scalars = [self._write_type(kind, {"type": kind}) for kind in ("number", "boolean", "null", "string")]
            parts = [*scalars, self._write_any_object(value), _enclose("[]", f"({value} ({self._comma} {value})*)?")]
            self._lark.define_rule(value, " | ".join(parts))
        return self._any_rule

    def _write_rule(self, key: str | int, schema: Any) -> str:
        """Write a rule of its own, by reference or identity of a schema: it may refer to itself."""
        if key not in self._rule_names:
            self._rule_names[key] = name = self._lark.reserve_rule()
            self._lark.define_rule(name, self.write_value(schema))
        return self._rule_names[key]

    def _merge_all_of(self, schema: Schema, parts: Sequence[Any]) -> Schema:
        """Merge the parts of an allOf; of two values for one keyword the last counts."""
        parts = [*parts, {key: value for key, value in schema.items() if key != "allOf"}]
        merged, properties, required = dict[str, Any](), dict[str, Any](), list[str]()
        for part in (resolve_references(part, self._root) or {} for part in parts):
            merged |= part
            properties |= get_typed(part, "properties", dict)
            required += list_required_names(part)
        merged.pop("allOf", None)
        return merged | {"properties": properties, "required": required} if properties else merged

    def _write_constant(self, word: Any) -> str:
        if isinstance(word, str):
            return self._lark.literal(self._notation.format_string(word))
        if isinstance(word, bool) or word is None:
            return quote_literal(self._notation.words[word])
        if isinstance(word, Mapping):
            pairs = (f"{self._write_key(name)} {self._write_constant(value)}" for name, value in word.items())
            return _enclose("{}", f" {self._comma} ".join(pairs))
        if isinstance(word, list):
            return _enclose("[]", f" {self._comma} ".join(map(self._write_constant, word)))
        return quote_literal(json.dumps(word))

    def _write_type(self, kind: Any, schema: Schema) -> str:
        if kind == "string":
            limits = {key: schema[key] for key in _STRING_KEYWORDS if key in schema}
            return self._notation.write_string(self._lark, {"type": "string", **limits})
        if kind in ("integer", "number"):
            return self._lark.json({"type": kind, **{key: schema[key] for key in _NUMBER_KEYWORDS if key in schema}})
        if kind == "boolean":
            return f"({self._write_constant(True)} | {self._write_constant(False)})"
        if kind == "null":
            return self._write_constant(None)
        if kind == "array":
            return self._write_array(schema)
        if kind == "object" or "properties" in schema:
            return self.write_object(schema)
        return self.write_any()

    def _write_array(self, schema: Schema) -> str:
        low, high = (_parse_item_count(schema.get(key)) for key in ("minItems", "maxItems"))
        if first := get_typed(schema, "prefixItems", list):
            return self._write_tuple(first, schema.get("items"), low or 0)
        items = item = self.write_value(schema.get("items"))
        if high == 0:
            return quote_literal("[]")
        if high is None or high > 1:
            items += f" ({self._comma} {item}){{{max((low or 1) - 1, 0)},{'' if high is None else high - 1}}}"
        return _enclose("[]", items if low else f"({items})?")

    def _write_tuple(self, first: Sequence[Any], others: Any, low: int) -> str:
        """Write items with a schema each, of which the last may lack, and then any number of others."""
        rest = ""
        if others is not False:
            rest = f"({self._comma} {self.write_value(others)}){{{max(low - len(first), 0)},}}"
        for place in range(len(first) - 1, 0, -1):
            rest = f"{self._comma} {self.write_value(first[place])} {rest}"
            rest = rest if place < low else f"({rest})?"
        items = f"{self.write_value(first[0])} {rest}"
        return _enclose("[]", items if low else f"({items})?")

    def _write_any_object(self, value: str) -> str:
        pair = f"{self._notation.key_pattern} {quote_literal(self._notation.colon)} {value}"
        return _enclose("{}", f"({pair} ({self._comma} {pair})*)?")


def _enclose(brackets: str, expression: str) -> str:
    """Expression between brackets; "" for nothing between them."""
    return f"{quote_literal(brackets[0])} {expression or quote_literal('')} {quote_literal(brackets[1])}"


def _parse_item_count(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= _ITEM_COUNT_MAX else None


def find_unwritable_names(schema: Any) -> Sequence[str]:
    """Names of properties, at any depth, that are no identifiers."""
    names = (name for part in iter_objects(schema) for name in get_typed(part, "properties", dict))
    return [name for name in names if not name.isidentifier()]
