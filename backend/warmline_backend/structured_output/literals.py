"""Values in notations that resemble JSON: Gemma's and Python's.  Pure."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warmline_backend.request.json_refs import Schema, resolve_references
from warmline_backend.structured_output.json_schema import list_required_names
from warmline_backend.structured_output.lark import LarkBuilder, join_optional_items, quote_literal
from warmline_backend.structured_output.literal_values import build_text_pattern

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
    true: str = "true"
    false: str = "false"
    null: str = "null"


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
    )


def _write_python_string(lark: LarkBuilder, schema: Schema) -> str:
    """Write in double quotes, or in single ones where neither length nor pattern is limited."""
    double = lark.json(schema, json_allowed_escapes=_ESCAPES)
    if set(schema) & {"pattern", "format", "minLength", "maxLength"}:
        return double
    return lark.one_of([double, r"""/'([^'\\\n]|\\['"\\nrt])*'/"""])


PYTHON_NOTATION = LiteralNotation(
    true="True",
    false="False",
    null="None",
    comma=", ",
    colon=": ",
    format_key=lambda name: json.dumps(name, ensure_ascii=False),
    key_pattern=r"""/"[^"\\\n]*"|'[^'\\\n]*'/""",
    format_string=repr,
    write_string=_write_python_string,
)


class LiteralWriter:
    """Writer of one tool's values."""

    def __init__(self, lark: LarkBuilder, notation: LiteralNotation, root: Schema) -> None:
        self._lark, self._notation, self._root = lark, notation, root
        self._rule_names: dict[str | int, str] = {}
        self._any_rule = ""

    def write_object(self, schema: Schema) -> str:
        """Write an object in braces."""
        properties, names = schema.get("properties"), list_required_names(schema)
        if not isinstance(properties, Mapping):
            others = schema.get("additionalProperties", True)
            return quote_literal("{}") if others is False else self._write_any_object(self.write_value(others))
        notation = self._notation
        items = [
            (name in names, f"{quote_literal(notation.format_key(name) + notation.colon)} {self.write_value(inner)}")
            for name, inner in properties.items()
        ]
        return f"{quote_literal('{')} {join_optional_items(self._lark, items, notation.comma)} {quote_literal('}')}"

    def write_value(self, schema: Any) -> str:
        """Write the values of a schema, as far as the notation can express it."""
        if not isinstance(schema, Mapping):
            return self.write_any()
        if isinstance(reference := schema.get("$ref"), str):
            return self._write_rule(reference, resolve_references(schema, self._root))
        words = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(words, list) and words:
            return self._lark.one_of(self._write_constant(word) for word in words)
        for key in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(key), list) and branches:
                return self._lark.one_of(self.write_value(branch) for branch in branches)
        if isinstance(parts := schema.get("allOf"), list) and parts:
            return self._write_rule(id(schema), self._merge_all_of(schema, parts))
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds:
            return self._lark.one_of(self._write_type(kind, schema) for kind in kinds)
        return self._write_type(kinds, schema)

    def write_any(self) -> str:
        """Write any value."""
        if not self._any_rule:
            self._any_rule = self._lark.reserve_rule()
            comma = quote_literal(self._notation.comma)
            items = f"({self._any_rule} ({comma} {self._any_rule})*)?"
            scalars = [self._write_type(kind, {"type": kind}) for kind in ("number", "boolean", "null", "string")]
            parts = [
                *scalars,
                self._write_any_object(self._any_rule),
                f"{quote_literal('[')} {items} {quote_literal(']')}",
            ]
            self._lark.define_rule(self._any_rule, " | ".join(parts))
        return self._any_rule

    def _write_rule(self, key: str | int, schema: Any) -> str:
        """Write a rule of its own, by reference or identity of a schema: it may refer to itself."""
        if key not in self._rule_names:
            self._rule_names[key] = name = self._lark.reserve_rule()
            self._lark.define_rule(name, self.write_value(schema))
        return self._rule_names[key]

    def _merge_all_of(self, schema: Schema, parts: Sequence[Any]) -> Schema:
        """Merge the parts of an allOf; of two values for one keyword the last counts."""
        merged = [
            resolve_references(part, self._root) or {}
            for part in (*parts, {k: v for k, v in schema.items() if k != "allOf"})
        ]
        whole: dict[str, Any] = {key: value for one in merged for key, value in one.items() if key != "allOf"}
        objects = [one["properties"] for one in merged if isinstance(one.get("properties"), Mapping)]
        if objects:
            whole["properties"] = {name: inner for properties in objects for name, inner in properties.items()}
            whole["required"] = [name for one in merged for name in list_required_names(one)]
        return whole

    def _write_constant(self, word: Any) -> str:
        notation = self._notation
        if isinstance(word, str):
            return self._lark.literal(notation.format_string(word))
        if isinstance(word, bool) or word is None:
            return quote_literal({True: notation.true, False: notation.false, None: notation.null}[word])
        if isinstance(word, Mapping):
            pairs = (
                f"{quote_literal(notation.format_key(k) + notation.colon)} {self._write_constant(v)}"
                for k, v in word.items()
            )
            return self._write_delimited("{", pairs, "}")
        if isinstance(word, list):
            return self._write_delimited("[", map(self._write_constant, word), "]")
        return quote_literal(json.dumps(word))

    def _write_delimited(self, start: str, parts: Any, end: str) -> str:
        comma = f" {quote_literal(self._notation.comma)} "
        return f"{quote_literal(start)} {comma.join(parts) or quote_literal('')} {quote_literal(end)}"

    def _write_type(self, kind: Any, schema: Schema) -> str:
        notation = self._notation
        if kind == "string":
            own = {key: schema[key] for key in ("pattern", "format", "minLength", "maxLength") if key in schema}
            return notation.write_string(self._lark, {"type": "string", **own})
        if kind in ("integer", "number"):
            return self._lark.json({"type": kind, **{key: schema[key] for key in _NUMBER_KEYWORDS if key in schema}})
        if kind == "boolean":
            return f"({quote_literal(notation.true)} | {quote_literal(notation.false)})"
        if kind == "null":
            return quote_literal(notation.null)
        if kind == "array":
            return self._write_array(schema)
        if kind == "object" or "properties" in schema:
            return self.write_object(schema)
        return self.write_any()

    def _write_array(self, schema: Schema) -> str:
        low, high = (_parse_item_count(schema.get(key)) for key in ("minItems", "maxItems"))
        if isinstance(first := schema.get("prefixItems"), list) and first:
            return self._write_tuple(first, schema.get("items"), low or 0)
        item, comma = self.write_value(schema.get("items")), quote_literal(self._notation.comma)
        if high == 0:
            return quote_literal("[]")
        given = item
        if high is None or high > 1:
            given += f" ({comma} {item}){{{max((low or 1) - 1, 0)},{'' if high is None else high - 1}}}"
        return f"{quote_literal('[')} {given if low else f'({given})?'} {quote_literal(']')}"

    def _write_tuple(self, first: Sequence[Any], others: Any, low: int) -> str:
        """Write items with a schema each, of which the last may lack, and then any number of others."""
        comma, going_on = quote_literal(self._notation.comma), ""
        if others is not False:
            going_on = f"({comma} {self.write_value(others)}){{{max(low - len(first), 0)},}}"
        for place in range(len(first) - 1, 0, -1):
            going_on = f"{comma} {self.write_value(first[place])} {going_on}"
            going_on = going_on if place < low else f"({going_on})?"
        given = f"{self.write_value(first[0])} {going_on}"
        return f"{quote_literal('[')} {given if low else f'({given})?'} {quote_literal(']')}"

    def _write_any_object(self, value: str) -> str:
        comma, colon = quote_literal(self._notation.comma), quote_literal(self._notation.colon)
        pair = f"{self._notation.key_pattern} {colon} {value}"
        return f"{quote_literal('{')} ({pair} ({comma} {pair})*)? {quote_literal('}')}"


def _parse_item_count(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= _ITEM_COUNT_MAX else None


def find_unwritable_names(schema: Any) -> Sequence[str]:
    """Names of properties, at any depth, that are no identifiers."""
    found: list[str] = []
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting.extend(one)
        elif isinstance(one, Mapping):
            if isinstance(properties := one.get("properties"), Mapping):
                found += [name for name in properties if not name.isidentifier()]
            waiting.extend(one.values())
    return found
