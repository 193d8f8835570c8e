"""Regular expressions written for llguidance and for the regex package.  Pure."""

from collections.abc import Callable

from warmline_backend.structured_output.json_schema.expressions.char_sets import (
    ALL_CHARS,
    WORD_CHARS,
    contains_code,
    remove_range,
)
from warmline_backend.structured_output.json_schema.expressions.nodes import (
    SURROGATES,
    Chars,
    Choice,
    Concatenation,
    Edge,
    Group,
    Look,
    Node,
    Range,
    Reference,
    Repeat,
    WordBoundary,
)

# Interrupts literals: the regex package prepares the search of one in a time that grows with the cube of its length.
ANYWHERE_TEXT = "(?=[\\s\\S]|\\Z)"
LITERAL_PARTS_MAX = 64
LAST_CONTROL = 0x1F
_SPECIAL = set("\\^$.|?*+()[]{}-/&~#")


def write_for_llguidance(node: Node, in_json: bool = True) -> str:
    """Write an expression without references and assertions, which ECMA-262 and llguidance read alike.

    Lone surrogates are left out, which no text in UTF-8 has.  So is, in strings of JSON, U+001F of sets that
    `confuses_llguidance` names.
    """
    return _Writer(lambda code: f"\\u{{{code:X}}}", for_llguidance=True, in_json=in_json).write(node)


def write_for_regex(node: Node) -> str:
    """Write an expression for the regex package."""
    return _Writer(lambda code: f"\\U{code:08X}", for_llguidance=False, in_json=False).write(node)


def confuses_llguidance(contains: Callable[[int], bool]) -> bool:
    """True for a set with all control characters, but not both characters that JSON escapes by a backslash.

    In strings of JSON llguidance 1.9 takes those two for members of such a set.
    """
    return all(map(contains, range(LAST_CONTROL + 1))) and not (contains(ord('"')) and contains(ord("\\")))


class _Writer:
    def __init__(self, escape_code: Callable[[int], str], for_llguidance: bool, in_json: bool) -> None:
        self._escape_code, self._for_llguidance, self._in_json = escape_code, for_llguidance, in_json
        self._written: dict[Chars, str] = {}
        self._nothing = "[^\\s\\S]" if for_llguidance else "(?!)"  # each engine reads the other's in its own way

    def write(self, node: Node) -> str:
        match node:
            case Chars():
                return self._write_chars(node)
            case Concatenation(parts):
                written = list(map(self._write_part, parts))
                if not self._for_llguidance:
                    for index in range(LITERAL_PARTS_MAX, len(written), LITERAL_PARTS_MAX):
                        written[index] = ANYWHERE_TEXT + written[index]
                return "".join(written)
            case Choice(branches):
                return "|".join(map(self.write, branches)) if branches else self._nothing
            case Repeat(part, count_min, count_max):
                return self._write_atom(part) + write_quantifier(count_min, count_max)
            case Group(part, number):
                return f"(?P<g{number}>{self.write(part)})"
            case Reference(number):
                return f"(?(g{number})(?P=g{number})|)"
            case Edge(is_start):
                return "\\A" if is_start else "\\Z"
            case WordBoundary(negated):
                word = self._write_chars(Chars(WORD_CHARS))
                before, after = ("(?!", "(?=") if negated else ("(?=", "(?!")
                return f"(?:(?<!{word}){before}{word})|(?<={word}){after}{word}))"
            case Look(part, behind, negated):
                return f"(?{'<' if behind else ''}{'!' if negated else '='}{self.write(part)})"

    def _write_part(self, node: Node) -> str:
        return f"(?:{self.write(node)})" if isinstance(node, Choice) and node.branches else self.write(node)

    def _write_atom(self, node: Node) -> str:
        written = self.write(node)
        return written if isinstance(node, Chars | Group) else f"(?:{written})"

    def _write_chars(self, chars: Chars) -> str:
        """Write a set, once: a class may have many ranges, and stand in many places."""
        if (written := self._written.get(chars)) is None:
            written = self._written[chars] = self._write_new_chars(chars)
        return written

    def _write_new_chars(self, chars: Chars) -> str:
        ranges = chars.ranges
        if self._for_llguidance and ranges != ALL_CHARS:
            ranges = remove_range(ranges, SURROGATES)
            if self._in_json and not chars.properties and confuses_llguidance(lambda code: contains_code(ranges, code)):
                ranges = remove_range(ranges, (LAST_CONTROL, LAST_CONTROL))
        if chars.properties:
            items = "".join(map(self._write_range, ranges)) + "".join(chars.properties)
            written = f"[{'^' if chars.negated else ''}{items}]"
            return f"(?i:{written})" if chars.ignores_case else written
        if ranges == ALL_CHARS:
            return "[\\s\\S]"
        if not ranges:
            return self._nothing
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            return self._write_char(ranges[0][0])
        return f"[{''.join(map(self._write_range, ranges))}]"

    def _write_range(self, ends: Range) -> str:
        low, high = ends
        if high - low < 2:
            return "".join(map(self._write_char, range(low, high + 1)))
        return f"{self._write_char(low)}-{self._write_char(high)}"

    def _write_char(self, code: int) -> str:
        char = chr(code)
        if char in _SPECIAL:
            return "\\" + char
        return char if 0x20 <= code < 0x7F else self._escape_code(code)


def write_quantifier(count_min: int, count_max: int | None) -> str:
    """Write a quantifier, short."""
    if count_max is None:
        return {0: "*", 1: "+"}.get(count_min, f"{{{count_min},}}")
    if (count_min, count_max) == (0, 1):
        return "?"
    return f"{{{count_min}}}" if count_min == count_max else f"{{{count_min},{count_max}}}"
