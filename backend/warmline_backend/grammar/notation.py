"""Values in notations that are like JSON, and are not: Gemma's and Python's.  Pure."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warmline_backend.grammar.lark import Lark, listed, quoted
from warmline_backend.grammar.schemas import required_in
from warmline_backend.grammar.values import text_pattern
from warmline_backend.schema_references import Schema, resolve

_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ITEMS_COUNTED_MAX = 1000
_ESCAPES = '"\\bfnrtu'  # that mean the same in Python as in JSON


@dataclass(frozen=True)
class Notation:
    """How values are written."""

    true: str
    false: str
    null: str
    comma: str
    colon: str
    key: Callable[[str], str]  # a name -> how it is written
    any_key: str  # a pattern
    constant: Callable[[str], str]  # a string -> how it is written
    string: Callable[[Lark, Schema], str]  # -> an expression


def gemma(quote: str, without: tuple[str, ...] = ()) -> Notation:
    """Bare keys, no spaces, and strings between markers; `without`: what no string may contain."""

    def string(lark: Lark, schema: Schema) -> str:
        return f"{lark.literal(quote)} {lark.text_up_to(quote, without=without, pattern=text_pattern(schema))}"

    return Notation(
        true="true",
        false="false",
        null="null",
        comma=",",
        colon=":",
        key=lambda name: name,
        any_key="/[A-Za-z_][A-Za-z0-9_]*/",
        constant=lambda text: f"{quote}{text}{quote}",
        string=string,
    )


def _python_string(lark: Lark, schema: Schema) -> str:
    """In double quotes, or in single ones where nothing is said of its length or form."""
    double = lark.json(schema, json_allowed_escapes=_ESCAPES)
    if set(schema) & {"pattern", "format", "minLength", "maxLength"}:
        return double
    return lark.one_of([double, r"""/'([^'\\\n]|\\['"\\nrt])*'/"""])


PYTHON = Notation(
    true="True",
    false="False",
    null="None",
    comma=", ",
    colon=": ",
    key=lambda name: json.dumps(name, ensure_ascii=False),
    any_key=r"""/"[^"\\\n]*"|'[^'\\\n]*'/""",
    constant=repr,
    string=_python_string,
)


class Values:
    """Writes the values of one tool's arguments."""

    def __init__(self, lark: Lark, notation: Notation, root: Schema) -> None:
        self._lark, self._notation, self._root = lark, notation, root
        self._referred: dict[str, str] = {}
        self._anything = ""

    def object(self, schema: Schema) -> str:
        """In braces."""
        properties, names = schema.get("properties"), required_in(schema)
        if not isinstance(properties, Mapping):
            return self._any_object() if schema.get("additionalProperties", True) is not False else quoted("{}")
        notation = self._notation
        items = [
            (name in names, f"{quoted(notation.key(name) + notation.colon)} {self.value(inner)}")
            for name, inner in properties.items()
        ]
        return f"{quoted('{')} {listed(self._lark, items, notation.comma)} {quoted('}')}"

    def value(self, schema: Any) -> str:
        """What a schema allows, as far as a notation tells it."""
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
            comma = quoted(self._notation.comma)
            items = f"({self._anything} ({comma} {self._anything})*)?"
            scalars = [self._of_type(kind, {"type": kind}) for kind in ("number", "boolean", "null", "string")]
            parts = [*scalars, self._any_object(), f"{quoted('[')} {items} {quoted(']')}"]
            self._lark.define(self._anything, " | ".join(parts))
        return self._anything

    def _reference(self, reference: str, schema: Schema) -> str:
        if reference not in self._referred:
            self._referred[reference] = name = self._lark.reserve()
            self._lark.define(name, self.value(resolve(schema, self._root)))
        return self._referred[reference]

    def _constant(self, word: Any) -> str:
        notation = self._notation
        if isinstance(word, str):
            return self._lark.literal(notation.constant(word))
        if isinstance(word, bool) or word is None:
            return quoted({True: notation.true, False: notation.false, None: notation.null}[word])
        if isinstance(word, Mapping):
            pairs = (f"{quoted(notation.key(k) + notation.colon)} {self._constant(v)}" for k, v in word.items())
            return self._between("{", pairs, "}")
        if isinstance(word, list):
            return self._between("[", map(self._constant, word), "]")
        return quoted(json.dumps(word))

    def _between(self, start: str, parts: Any, end: str) -> str:
        comma = f" {quoted(self._notation.comma)} "
        return f"{quoted(start)} {comma.join(parts) or quoted('')} {quoted(end)}"

    def _of_type(self, kind: Any, schema: Schema) -> str:
        notation = self._notation
        if kind == "string":
            own = {key: schema[key] for key in ("pattern", "format", "minLength", "maxLength") if key in schema}
            return notation.string(self._lark, {"type": "string", **own})
        if kind in ("integer", "number"):
            return self._lark.json({"type": kind, **{key: schema[key] for key in _LIMITS if key in schema}})
        if kind == "boolean":
            return f"({quoted(notation.true)} | {quoted(notation.false)})"
        if kind == "null":
            return quoted(notation.null)
        if kind == "array":
            return self._array(schema)
        if kind == "object" or "properties" in schema:
            return self.object(schema)
        return self.anything()

    def _array(self, schema: Schema) -> str:
        low, high = (_count(schema.get(key)) for key in ("minItems", "maxItems"))
        item = self.value(schema.get("items"))
        if high == 0:
            return quoted("[]")
        most = "" if high is None else high - 1
        more = f"({quoted(self._notation.comma)} {item}){{{max((low or 1) - 1, 0)},{most}}}"
        given = f"{item} {more}"
        return f"{quoted('[')} {given if low else f'({given})?'} {quoted(']')}"

    def _any_object(self) -> str:
        comma, colon = quoted(self._notation.comma), quoted(self._notation.colon)
        pair = f"{self._notation.any_key} {colon} {self.anything()}"
        return f"{quoted('{')} ({pair} ({comma} {pair})*)? {quoted('}')}"


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= _ITEMS_COUNTED_MAX else None


def unwritable_names(schema: Any) -> Sequence[str]:
    """Names of properties, at any depth, that can't stand bare."""
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
