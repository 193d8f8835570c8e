"""Structure of JSON text, counted before it is parsed: levels, containers, strings, separators.  Pure.

A parser's cost depends on the number of values more than on the bytes, and its stack on the levels; Python's own limit
of recursion differs between versions and holds for some of the parsers only.
"""

import json
import re
from itertools import accumulate
from typing import Any

from warmline_common.protocol.surrogates import replace_escaped_halves

JSON_DEPTH_MAX = 128  # of any client's JSON; serde_json's and llguidance's bound as well

_QUOTE, _BACKSLASH = b'"', b"\\"
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_BRACKETS = re.compile(rb"[][{}]")
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: +1 and -1


def decode_json_text(text: str) -> Any:
    """Value of JSON that stands in a string of a client's body, which the body's own bounds do not cover.

    Halves of surrogate pairs in it become U+FFFD, as in the body.  Raises ValueError for other text, and beyond
    JSON_DEPTH_MAX levels.
    """
    if text.count("[") + text.count("{") > JSON_DEPTH_MAX:
        structure = JsonStructure()
        structure.feed(text.encode(errors="replace"))
        if structure.depth_max > JSON_DEPTH_MAX:
            raise ValueError("it nests too deeply")
    return json.loads(replace_escaped_halves(text.encode(errors="replace")) if "\\u" in text else text)


class JsonStructure:
    """Counts of a JSON text that comes in pieces.  Text that is no JSON has counts, too; its parser refuses it."""

    def __init__(self) -> None:
        self.containers = self.strings = self.separators = 0  # strings: with names of fields
        self.top_separators = 0  # of the outermost object or list
        self.depth_max = 0
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False  # the next byte, by the last backslash of a string

    def include(self, other: "JsonStructure") -> None:
        """Add the counts of another text, one that stands somewhere inside this one."""
        self.containers += other.containers
        self.strings += other.strings
        self.separators += other.separators
        self.depth_max = max(self.depth_max, other.depth_max)

    def feed(self, piece: bytes) -> None:
        """Count a piece's structure, in time proportional to its bytes."""
        if self._is_escaped and piece:
            piece, self._is_escaped = piece[1:], False
        if not piece:
            return
        self._is_escaped = (len(piece) - len(piece.rstrip(_BACKSLASH))) % 2 == 1
        if _BACKSLASH in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(_QUOTE)
        outside = b"".join(parts[1::2] if self._is_in_string else parts[::2])
        quotes = len(parts) - 1
        self.strings += (quotes + (not self._is_in_string)) // 2
        self._is_in_string ^= quotes % 2 == 1
        self.separators += outside.count(b",")
        if brackets := outside.translate(_STEPS, _NO_BRACKETS):
            depths = list(accumulate(memoryview(brackets).cast("b"), initial=self._depth))
            self.containers += brackets.count(b"\x01")
            self.depth_max = max(self.depth_max, *depths)
            self._depth = depths[-1]
            if min(depths) <= 1:
                between = zip(_BRACKETS.split(outside), depths, strict=True)
                self.top_separators += sum(text.count(b",") for text, depth in between if depth == 1)
        elif self._depth == 1:
            self.top_separators += outside.count(b",")


def convert_integer(value: object) -> int | None:
    """An integer, also from a float without a fraction, such as 20.0, since JSON has one kind of number; else None."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
