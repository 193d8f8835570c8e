"""Gemma's own notation for arguments: JSON with bare keys, no spaces, and strings between markers.  Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from warmline_backend.grammar.lark import Lark, listed, quoted
from warmline_backend.grammar.schemas import Schema, resolve
from warmline_backend.grammar.values import text_pattern

_SCALARS = ("integer", "number", "boolean", "null")
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ITEMS_COUNTED_MAX = 1000


class Notation:
    """Writes the values of one tool's arguments; `quote` is the marker around strings, `without` what they lack."""

    def __init__(self, lark: Lark, root: Schema, quote: str, without: tuple[str, ...] = ()) -> None:
        self._lark, self._root, self._quote, self._without = lark, root, quote, without
        self._referred: dict[str, str] = {}
        self._anything = ""

    def object(self, schema: Schema) -> str:
        """In braces."""
        properties, required = schema.get("properties"), schema.get("required")
        names = set(required) if isinstance(required, list) else set[str]()
        if not isinstance(properties, Mapping):
            return self._any_object() if schema.get("additionalProperties", True) is not False else quoted("{}")
        items = [
            (name in names, f"{quoted(name + ':')} {self.value(inner)}")
            for name, inner in properties.items()
            if name in names or name.isidentifier()
        ]
        return f"{quoted('{')} {listed(self._lark, items, ',')} {quoted('}')}"

    def value(self, schema: Any) -> str:
        """What a schema allows, as far as this notation tells it."""
        if not isinstance(schema, Mapping):
            return self.anything()
        if isinstance(reference := schema.get("$ref"), str):
            return self._reference(reference, schema)
        words = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(words, list) and words:
            return self._lark.one_of(self._constant(word) for word in words)
        for key in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(key), list) and branches:
                return self._lark.one_of(self.value(branch) for branch in branches)
        kinds = schema.get("type")
        if isinstance(kinds, list) and kinds:
            return self._lark.one_of(self._of_type(kind, schema) for kind in kinds)
        return self._of_type(kinds, schema)

    def anything(self) -> str:
        """Any value at all."""
        if not self._anything:
            self._anything = self._lark.reserve()
            scalars = [self._lark.json({"type": kind}) for kind in ("number", "boolean", "null")]
            items = f"({self._anything} ({quoted(',')} {self._anything})*)?"
            parts = [*scalars, self._string({}), self._any_object(), f"{quoted('[')} {items} {quoted(']')}"]
            self._lark.define(self._anything, " | ".join(parts))
        return self._anything

    def _reference(self, reference: str, schema: Schema) -> str:
        if reference not in self._referred:
            self._referred[reference] = name = self._lark.reserve()
            self._lark.define(name, self.value(resolve(schema, self._root)))
        return self._referred[reference]

    def _constant(self, word: Any) -> str:
        if isinstance(word, str):
            return self._lark.literal(f"{self._quote}{word}{self._quote}")
        return quoted(json.dumps(word, separators=(",", ":")))

    def _of_type(self, kind: Any, schema: Schema) -> str:
        if kind == "string":
            return self._string(schema)
        if kind in _SCALARS:
            return self._lark.json({"type": kind, **{key: schema[key] for key in _LIMITS if key in schema}})
        if kind == "array":
            return self._array(schema)
        if kind == "object" or "properties" in schema:
            return self.object(schema)
        return self.anything()

    def _string(self, schema: Schema) -> str:
        text = self._lark.text_up_to(self._quote, without=self._without, pattern=text_pattern(schema))
        return f"{self._lark.literal(self._quote)} {text}"

    def _array(self, schema: Schema) -> str:
        low, high = (_count(schema.get(key)) for key in ("minItems", "maxItems"))
        item = self.value(schema.get("items"))
        if high == 0:
            return quoted("[]")
        more = f"({quoted(',')} {item}){{{max((low or 1) - 1, 0)},{'' if high is None else high - 1}}}"
        given = f"{item} {more}"
        return f"{quoted('[')} {given if low else f'({given})?'} {quoted(']')}"

    def _any_object(self) -> str:
        pair = f"/[A-Za-z_][A-Za-z0-9_]*/ {quoted(':')} {self.anything()}"
        return f"{quoted('{')} ({pair} ({quoted(',')} {pair})*)? {quoted('}')}"


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= _ITEMS_COUNTED_MAX else None


def names_in(schema: Any) -> Sequence[str]:
    """All names of required properties, at any depth, that this notation can't write."""
    found: list[str] = []
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting.extend(one)
        elif isinstance(one, Mapping):
            properties, required = one.get("properties"), one.get("required")
            if isinstance(properties, Mapping) and isinstance(required, list):
                found += [name for name in required if name in properties and not str(name).isidentifier()]
            waiting.extend(one.values())
    return found
