"""JSON as models write it: read strictly where it is JSON, else with what can be meant in one way only.

Taken: trailing commas, single quotes, Python's True, False and None, bare keys, line breaks within strings, escapes
that JSON lacks, and brackets missing or left over at the end.  Never taken: a value that is cut.
"""

import json
import math
import re
from typing import Any, NoReturn

DEPTH_MAX = 200

_SPACE = re.compile(r"\s*")
_CONSTANT = re.compile(r"(?:true|false|null|True|False|None)\b")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])")
_BARE_KEY = re.compile(r"[A-Za-z_$][\w$.-]*(?=\s*:)")
_PLAIN = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "/": "/", "\\": "\\", '"': '"', "'": "'"}
_CODE = re.compile(r"[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|[0-9a-fA-F]{4}")  # of one character


class Unreadable(ValueError):
    """It may mean this or that, or nothing; `cut` where it ends within a string."""

    def __init__(self, message: str, cut: bool = False) -> None:
        super().__init__(message)
        self.cut = cut


def _refuse_constant(name: str) -> NoReturn:
    raise Unreadable(f"{name} is no JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise Unreadable(f"{text} is too large a number")
    return number


_STRICT = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def read_strictly(text: str, at: int = 0) -> tuple[Any, int]:
    """One JSON value from `at` on, and where it ends.  Raises Unreadable."""
    try:
        value, end = _STRICT.raw_decode(text, _SPACE.match(text, at).end())  # type: ignore[union-attr]
        return value, int(end)
    except Unreadable:
        raise
    except (ValueError, RecursionError) as error:
        raise Unreadable(str(error), cut="Unterminated string" in str(error)) from error


def read_leniently(text: str, at: int = 0, *, quote: str = "") -> tuple[Any, int]:
    """As `read_strictly`, repaired where it must be.  `quote` is what strings stand between besides the usual."""
    if not quote:
        try:
            return read_strictly(text, at)
        except Unreadable:
            pass
    reader = _Reader(text, at, quote)
    try:
        return reader.value(), reader.at
    except RecursionError as error:
        raise Unreadable("nested too deeply") from error


def unfenced(text: str) -> str:
    """Without the code fence around all of it."""
    stripped = text.strip()
    if not (stripped.startswith("```") and stripped.endswith("```") and "\n" in stripped):
        return text
    return stripped.partition("\n")[2][:-3]


class _Reader:
    def __init__(self, text: str, at: int, quote: str) -> None:
        self._text, self.at, self._quote, self._depth = text, at, quote, 0

    def value(self) -> Any:
        char = self._next()
        if char in "{[" and char:
            return self._nested(char)
        if self._quote and self._text.startswith(self._quote, self.at):
            return self._until_quote()
        if char in _PLAIN:
            return self._string(char)
        return self._scalar()

    def _next(self) -> str:
        """The next character that is no space; "" at the end."""
        self.at = _SPACE.match(self._text, self.at).end()  # type: ignore[union-attr]
        return self._text[self.at : self.at + 1]

    def _fail(self, what: str, cut: bool = False) -> NoReturn:
        raise Unreadable(f"{what} at character {self.at}", cut)

    def _nested(self, opening: str) -> Any:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            self._fail("nested too deeply")
        self.at += 1
        value = self._object() if opening == "{" else self._array()
        self._depth -= 1
        return value

    def _object(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        while not self._closes("}"):
            key = self._key()
            if self._next() != ":":
                self._fail("a colon is missing")
            self.at += 1
            fields[key] = self.value()
            self._comma("}")
        return fields

    def _array(self) -> list[Any]:
        items = []
        while not self._closes("]"):
            items.append(self.value())
            self._comma("]")
        return items

    def _closes(self, closing: str) -> bool:
        """Whether it ends here: at its bracket, or, that being left out, at the end of all."""
        char = self._next()
        if char == closing:
            self.at += 1
        return char in (closing, "")

    def _comma(self, closing: str) -> None:
        char = self._next()
        if char == ",":
            self.at += 1
        elif char not in (closing, ""):
            self._fail("a comma is missing")

    def _key(self) -> str:
        char = self._next()
        if self._quote and self._text.startswith(self._quote, self.at):
            return self._until_quote()
        if char in _PLAIN:
            return self._string(char)
        if match := _BARE_KEY.match(self._text, self.at):
            self.at = match.end()
            return match.group()
        self._fail("a key is missing")

    def _until_quote(self) -> str:
        start = self.at + len(self._quote)
        end = self._text.find(self._quote, start)
        if end < 0:
            self._fail("a string does not end", cut=True)
        self.at = end + len(self._quote)
        return self._text[start:end]

    def _string(self, quote: str) -> str:
        pieces, self.at = [], self.at + 1
        while True:
            plain = _PLAIN[quote].match(self._text, self.at)
            assert plain
            pieces.append(plain.group())
            self.at = plain.end() + 1
            if self._text.startswith(quote, plain.end()):
                return "".join(pieces)
            if self.at >= len(self._text):
                self._fail("a string does not end", cut=True)
            pieces.append(self._escape())

    def _escape(self) -> str:
        """What stands after a backslash; one that JSON does not know stays as it is."""
        char = self._text[self.at]
        self.at += 1
        if char != "u":
            return _ESCAPES.get(char, "\\" + char)
        match = _CODE.match(self._text, self.at)
        if match is None:
            return "\\u"
        self.at = match.end()
        return str(json.loads(f'"\\u{match.group()}"'))

    def _scalar(self) -> Any:
        if match := _CONSTANT.match(self._text, self.at):
            self.at = match.end()
            return _CONSTANTS[match.group()]
        if match := _NUMBER.match(self._text, self.at):
            value, self.at = read_strictly(self._text, self.at)
            return value
        self._fail("no value")
