"""Values in notations that are like JSON, and are not: Gemma's and Python's.  Pure."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warmline_backend.request.json_refs import Schema, resolve
from warmline_backend.structured_output.json_schema import required_in
from warmline_backend.structured_output.lark import Lark, listed, quoted
from warmline_backend.structured_output.literal_values import text_pattern

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
        self._written: dict[str | int, str] = {}
        self._anything = ""

    def object(self, schema: Schema) -> str:
        """In braces."""
        properties, names = schema.get("properties"), required_in(schema)
        if not isinstance(properties, Mapping):
            others = schema.get("additionalProperties", True)
            return quoted("{}") if others is False else self._any_object(self.value(others))
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
            return self._once(reference, resolve(schema, self._root))
        words = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(words, list) and words:
            return self._lark.one_of(self._constant(word) for word in words)
        for key in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(key), list) and branches:
                return self._lark.one_of(self.value(branch) for branch in branches)
        if isinstance(parts := schema.get("allOf"), list) and parts:
            return self._once(id(schema), self._whole(schema, parts))
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
            parts = [*scalars, self._any_object(self._anything), f"{quoted('[')} {items} {quoted(']')}"]
            self._lark.define(self._anything, " | ".join(parts))
        return self._anything

    def _once(self, key: str | int, schema: Any) -> str:
        """A rule of its own, by a reference or a schema's identity: it may lead to itself."""
        if key not in self._written:
            self._written[key] = name = self._lark.reserve()
            self._lark.define(name, self.value(schema))
        return self._written[key]

    def _whole(self, schema: Schema, parts: Sequence[Any]) -> Schema:
        """Its parts, all of which hold, as one; where two say something of the same thing, the last one counts."""
        said = [resolve(part, self._root) or {} for part in (*parts, {k: v for k, v in schema.items() if k != "allOf"})]
        whole: dict[str, Any] = {key: value for one in said for key, value in one.items() if key != "allOf"}
        named = [one["properties"] for one in said if isinstance(one.get("properties"), Mapping)]
        if named:
            whole["properties"] = {name: inner for properties in named for name, inner in properties.items()}
            whole["required"] = [name for one in said for name in required_in(one)]
        return whole

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
        if isinstance(first := schema.get("prefixItems"), list) and first:
            return self._tuple(first, schema.get("items"), low or 0)
        item, comma = self.value(schema.get("items")), quoted(self._notation.comma)
        if high == 0:
            return quoted("[]")
        given = item
        if high is None or high > 1:
            given += f" ({comma} {item}){{{max((low or 1) - 1, 0)},{'' if high is None else high - 1}}}"
        return f"{quoted('[')} {given if low else f'({given})?'} {quoted(']')}"

    def _tuple(self, first: Sequence[Any], others: Any, low: int) -> str:
        """Items with a schema each, the last of which may lack, and then any number of others."""
        comma, going_on = quoted(self._notation.comma), ""
        if others is not False:
            going_on = f"({comma} {self.value(others)}){{{max(low - len(first), 0)},}}"
        for place in range(len(first) - 1, 0, -1):
            going_on = f"{comma} {self.value(first[place])} {going_on}"
            going_on = going_on if place < low else f"({going_on})?"
        given = f"{self.value(first[0])} {going_on}"
        return f"{quoted('[')} {given if low else f'({given})?'} {quoted(']')}"

    def _any_object(self, value: str) -> str:
        comma, colon = quoted(self._notation.comma), quoted(self._notation.colon)
        pair = f"{self._notation.any_key} {colon} {value}"
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
