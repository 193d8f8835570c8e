"""Parser of JSON as models write it: strict where it is JSON, else with repairs that are unambiguous.

Accepted: trailing commas, single quotes, Python's True, False and None, bare keys, line breaks within strings, escapes
that JSON lacks, and brackets missing or left over at the end.  Never accepted: a value that is cut.
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
CONSTANTS: dict[str, Any] = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "/": "/", "\\": "\\", '"': '"', "'": "'"}
# Of one character.
_UNICODE_ESCAPE = re.compile(r"[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|[0-9a-fA-F]{4}")


class ToolCallParseError(ValueError):
    """Text that is no call, or an ambiguous one; `cut` where it ends within a string."""

    def __init__(self, message: str, cut: bool = False) -> None:
        super().__init__(message)
        self.cut = cut


def _refuse_constant(name: str) -> NoReturn:
    raise ToolCallParseError(f"{name} is no JSON")


def _parse_finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ToolCallParseError(f"{text} is too large a number")
    return number


_STRICT_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_parse_finite)


def parse_strict_json(text: str, position: int = 0) -> tuple[Any, int]:
    """Parse one JSON value at `position`; returns it and its end.  Raises ToolCallParseError."""
    try:
        value, end = _STRICT_DECODER.raw_decode(text, _SPACE.match(text, position).end())  # type: ignore[union-attr]
        return value, int(end)
    except ToolCallParseError:
        raise
    except (ValueError, RecursionError) as error:
        raise ToolCallParseError(str(error), cut="Unterminated string" in str(error)) from error


def parse_lenient_json(text: str, position: int = 0, *, quote: str = "") -> tuple[Any, int]:
    """Parse as `parse_strict_json`, with repairs.  `quote`: a further delimiter of strings."""
    if not quote:
        try:
            return parse_strict_json(text, position)
        except ToolCallParseError:
            pass
    reader = _LenientParser(text, position, quote)
    try:
        return reader.parse_value(), reader.position
    except RecursionError as error:
        raise ToolCallParseError("nested too deeply") from error


def strip_code_fence(text: str) -> str:
    """Strip a code fence around the whole text."""
    stripped = text.strip()
    if not (stripped.startswith("```") and stripped.endswith("```") and "\n" in stripped):
        return text
    return stripped.partition("\n")[2][:-3]


class _LenientParser:
    def __init__(self, text: str, position: int, quote: str) -> None:
        self._text, self.position, self._quote, self._depth = text, position, quote, 0

    def parse_value(self) -> Any:
        if (char := self._peek()) in ("{", "["):
            return self._parse_nested(char)
        if (text := self._parse_text()) is not None:
            return text
        if match := _CONSTANT.match(self._text, self.position):
            self.position = match.end()
            return CONSTANTS[match.group()]
        if _NUMBER.match(self._text, self.position):
            value, self.position = parse_strict_json(self._text, self.position)
            return value
        self._fail("no value")

    def _peek(self) -> str:
        """Next character that is no space; "" at the end."""
        self.position = _SPACE.match(self._text, self.position).end()  # type: ignore[union-attr]
        return self._text[self.position : self.position + 1]

    def _fail(self, what: str, cut: bool = False) -> NoReturn:
        raise ToolCallParseError(f"{what} at character {self.position}", cut)

    def _parse_nested(self, opening: str) -> Any:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            self._fail("nested too deeply")
        self.position += 1
        value = self._parse_object() if opening == "{" else self._parse_array()
        self._depth -= 1
        return value

    def _parse_object(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        while not self._consume_closing("}"):
            key = self._parse_key()
            if self._peek() != ":":
                self._fail("a colon is missing")
            self.position += 1
            fields[key] = self.parse_value()
            self._consume_comma("}")
        return fields

    def _parse_array(self) -> list[Any]:
        items = []
        while not self._consume_closing("]"):
            items.append(self.parse_value())
            self._consume_comma("]")
        return items

    def _consume_closing(self, closing: str) -> bool:
        """True at the end of a container: its bracket, or the end of the text."""
        char = self._peek()
        if char == closing:
            self.position += 1
        return char in (closing, "")

    def _consume_comma(self, closing: str) -> None:
        char = self._peek()
        if char == ",":
            self.position += 1
        elif char not in (closing, ""):
            self._fail("a comma is missing")

    def _parse_key(self) -> str:
        if (text := self._parse_text()) is not None:
            return text
        if match := _BARE_KEY.match(self._text, self.position):
            self.position = match.end()
            return match.group()
        self._fail("a key is missing")

    def _parse_text(self) -> str | None:
        """Parse a string; None where none begins here."""
        char = self._peek()
        if not self._quote or not self._text.startswith(self._quote, self.position):
            return self._parse_string(char) if char in _PLAIN else None
        start = self.position + len(self._quote)
        end = self._text.find(self._quote, start)
        if end < 0:
            self._fail("a string does not end", cut=True)
        self.position = end + len(self._quote)
        return self._text[start:end]

    def _parse_string(self, quote: str) -> str:
        pieces, self.position = [], self.position + 1
        while True:
            plain = _PLAIN[quote].match(self._text, self.position)
            assert plain
            pieces.append(plain.group())
            self.position = plain.end() + 1
            if self._text.startswith(quote, plain.end()):
                return "".join(pieces)
            if self.position >= len(self._text):
                self._fail("a string does not end", cut=True)
            pieces.append(self._parse_escape())

    def _parse_escape(self) -> str:
        """Parse the character after a backslash; an unknown escape stays as it is."""
        char = self._text[self.position]
        self.position += 1
        if char != "u":
            return _ESCAPES.get(char, "\\" + char)
        match = _UNICODE_ESCAPE.match(self._text, self.position)
        if match is None:
            return "\\u"
        self.position = match.end()
        return str(json.loads(f'"\\u{match.group()}"'))
