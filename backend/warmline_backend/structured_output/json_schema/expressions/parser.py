"""Parser of ECMA-262's regular expressions, in Unicode mode.  Pure.

More than the standard's Unicode mode is read, as schemas of the real world have it: what the older mode allows ("\\_",
"a{"), and what Python's have ("(?i)" at the start, "(?P<n>a)", "\\A", "\\Z"), unless `strict`.
"""

import re
from collections.abc import Iterable
from typing import NoReturn

from warmline_backend.structured_output.json_schema.expressions import char_sets
from warmline_backend.structured_output.json_schema.expressions.character_properties import is_known_property
from warmline_backend.structured_output.json_schema.expressions.nodes import (
    CODE_POINT_MAX,
    EMPTY,
    NOTHING,
    Chars,
    Edge,
    Group,
    Look,
    Node,
    PatternError,
    Range,
    Reference,
    WordBoundary,
    choose,
    count_required,
    join_parts,
    repeat,
)

DEPTH_MAX = 30
CHARS_MAX = 8000
FOLD_STEPS_MAX = 30_000  # of a microsecond
RANGES_MAX = 12_000  # of all sets
PROPERTIES_MAX = 100  # different ones
COUNT_MAX = 2**31 - 1
REQUIRED_MAX = 40_000

_QUANTIFIER = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")
_CAPTURE = re.compile(r"\\.|\[(?:\\.?|[^\]\\])*(?:\]|\Z)|(?P<open>\((?!\?)|\(\?P?<(?P<name>[^\W\d][\w$]*)>)", re.DOTALL)
_GROUP_START = re.compile(r"\?(?:P?<([^\W\d][\w$]*)>|(<?[=!])|([a-zA-Z]*)(?:-([a-zA-Z]+))?:)")
_LEADING_FLAGS = re.compile(r"\(\?([aiLmsux]+)\)")
_CONTROLS = {"f": 0xC, "n": 0xA, "r": 0xD, "t": 0x9, "v": 0xB}
_CLASSES = {"d": char_sets.DIGITS, "s": char_sets.SPACES, "w": char_sets.WORD_CHARS}
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u\{([0-9A-Fa-f]{1,8})\}|u([0-9A-Fa-f]{4})")
_LOW_SURROGATE = re.compile(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})")
_PROPERTY = re.compile(r"[pP]\{(\w+)(?:=(\w+))?\}", re.ASCII)
_PROPERTY_NAMES = {"IDC": "ID_Continue", "VS": "Variation_Selector"}  # short names that engines read otherwise
_POSIX_CLASS = re.compile(
    r"\[:\^?(?:al(?:num|pha)|ascii|blank|cntrl|x?digit|graph|lower|print|punct|space|upper|word):\]"
)
_REFERENCE = re.compile(r"k<([^\W\d][\w$]*)>")


def parse_pattern(pattern: str, strict: bool = False) -> Node:
    """Parse an expression.  Raises PatternError."""
    if len(pattern) > CHARS_MAX:
        raise PatternError(f"it is longer than {CHARS_MAX} characters")
    return _Parser(pattern, strict).parse()


class _Parser:
    def __init__(self, pattern: str, strict: bool) -> None:
        self._text, self._at, self._strict, self._depth = pattern, 0, strict, 0
        captures = [match for match in _CAPTURE.finditer(pattern) if match["open"]]
        self._group_count = len(captures)
        self._numbers = {match["name"]: number for number, match in enumerate(captures, 1) if match["name"]}
        if len(self._numbers) < sum(match["name"] is not None for match in captures):
            raise PatternError("two groups have one name")
        self._opened = 0
        self._closed: set[int] = set()
        self._ignores_case = self._dot_is_any = False
        self._properties: set[str] = set()
        self._folded: set[tuple[Range, ...]] = set()
        self._fold_steps_left, self._ranges_left = FOLD_STEPS_MAX, RANGES_MAX

    def parse(self) -> Node:
        if not self._strict and (flags := _LEADING_FLAGS.match(self._text)):
            self._set_flags(flags[1], "")
            self._at = flags.end()
        node = self._parse_choice()
        if self._at < len(self._text):
            self._fail("has a ')' too many")
        if count_required(node) > REQUIRED_MAX:  # engines take some hundred bytes for each
            self._fail("repeats too often")
        return node

    def _fail(self, fault: str, at: int | None = None) -> NoReturn:
        """Raise PatternError; `at` is the place of the fault, if that is not the next character."""
        place = min(self._at if at is None else at, len(self._text) - 1)
        raise PatternError(f"it {fault} (at character {place + 1})")

    def _takes(self, text: str) -> bool:
        """Take a text that comes next, if it does."""
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _match(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        """Take what an expression matches here."""
        if match := expression.match(self._text, self._at):
            self._at = match.end()
        return match

    # ---- structure

    def _parse_choice(self) -> Node:
        branches = [self._parse_sequence()]
        while self._takes("|"):
            branches.append(self._parse_sequence())
        return choose(*branches)

    def _parse_sequence(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._parse_quantified())
        return join_parts(*parts)

    def _parse_quantified(self) -> Node:
        node = self._parse_atom()
        char = self._text[self._at : self._at + 1]
        if char and char in "*+?":
            self._at += 1
            count_min, count_max = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        elif match := self._match(_QUANTIFIER):
            count_min = int(match[1][:11])
            count_max = count_min if match[2] is None else int(match[3][:11]) if match[3] else None
        else:
            return node
        if isinstance(node, Edge | WordBoundary) or (isinstance(node, Look) and (self._strict or node.behind)):
            self._fail("repeats an assertion")
        if count_max is not None and count_max < count_min:
            self._fail("has a quantifier whose numbers are out of order")
        if max(count_min, count_max or 0) > COUNT_MAX:
            self._fail("repeats too often")
        self._takes("?")  # laziness decides which text is matched, not if there is one
        return repeat(node, count_min, count_max)

    def _parse_atom(self) -> Node:
        char = self._text[self._at]
        is_quantifier = char in "*+?" or (char == "{" and _QUANTIFIER.match(self._text, self._at))
        if is_quantifier:
            self._fail("has a quantifier after nothing")
        self._at += 1
        match char:
            case "^" | "$":
                return Edge(char == "^")
            case ".":
                ends = () if self._dot_is_any else char_sets.LINE_ENDS
                return self._count_ranges(char_sets.complement_ranges(ends))
            case "(":
                return self._parse_group()
            case "[":
                return self._parse_set()
            case "\\":
                return self._parse_escape()
        if self._strict and char in "{}]":
            self._fail(f"has a {char!r} without a backslash")
        return self._make_chars([(ord(char), ord(char))])

    def _parse_group(self) -> Node:
        start_at, number, flags = self._at - 1, 0, (self._ignores_case, self._dot_is_any)
        self._depth += 1
        if self._depth > DEPTH_MAX:
            self._fail(f"nests deeper than {DEPTH_MAX} groups")
        look = ""
        if self._text.startswith("?", self._at):
            if reference := re.compile(r"\?P=(\w+)\)").match(self._text, self._at):
                self._at, self._depth = reference.end(), self._depth - 1
                return self._refer(self._numbers.get(reference[1], 0))
            if (start := self._match(_GROUP_START)) is None:
                self._fail("has a group of an unknown kind")
            look = start[2] or ""
            if start[1]:
                number = self._opened = self._opened + 1
            elif not look:
                self._set_flags(start[3] or "", start[4] or "")
        else:
            number = self._opened = self._opened + 1
        node = self._parse_choice()
        if not self._takes(")"):
            self._fail("has a group without an end", start_at)
        self._depth -= 1
        self._ignores_case, self._dot_is_any = flags
        if look:
            return Look(node, behind=look.startswith("<"), negated=look.endswith("!"))
        self._closed.add(number)
        return Group(node, number) if number else node

    def _set_flags(self, added: str, removed: str) -> None:
        if unknown := set(added + removed) - set("isau"):
            self._fail(f"has an unknown flag, {min(unknown)!r}")
        self._ignores_case = (self._ignores_case or "i" in added) and "i" not in removed
        self._dot_is_any = (self._dot_is_any or "s" in added) and "s" not in removed

    def _refer(self, number: int) -> Node:
        if not 0 < number <= self._group_count:
            self._fail("refers to a group that it does not have")
        # A group that has no text yet matches empty text.
        return Reference(number) if number in self._closed else EMPTY

    # ---- characters

    def _parse_escape(self) -> Node:
        """Parse what follows a backslash outside a set."""
        char = self._text[self._at : self._at + 1]
        if char and char in "bB":
            self._at += 1
            return WordBoundary(negated=char == "B")
        if char and char in "AZz" and not self._strict:
            self._at += 1
            return Edge(char == "A")
        if char and char in "123456789" and (match := self._match(re.compile("[0-9]{1,6}"))):
            return self._refer(int(match[0]))
        if match := self._match(_REFERENCE):
            return self._refer(self._numbers.get(match[1], 0))
        if (found := self._parse_class_escape()) is not None:
            return found if isinstance(found, Chars) else self._make_chars(found)
        code = self._parse_char_escape()
        return self._make_chars([(code, code)])

    def _parse_class_escape(self) -> Chars | tuple[Range, ...] | None:
        """Parse an escape for a set of characters; a property is one of its own."""
        char = self._text[self._at : self._at + 1]
        if char and char.lower() in _CLASSES:
            self._at += 1
            ranges = _CLASSES[char.lower()]
            if self._ignores_case:  # before the complement, so that "\\W" has no character that "\\w" has
                ranges = self._fold(ranges)
            return char_sets.complement_ranges(ranges) if char.isupper() else ranges
        if char and char in "pP":
            if not (match := self._match(_PROPERTY)):
                self._fail("has a property without its name")
            name = _PROPERTY_NAMES.get(match[0][2:-1])
            written = f"\\{char}{{{name}}}" if name else "\\" + match[0]
            self._check_property(written, match)
            return Chars((), (written,), ignores_case=self._ignores_case)
        return None

    def _check_property(self, written: str, match: re.Match[str]) -> None:
        self._properties.add(written)
        if len(self._properties) > PROPERTIES_MAX:
            self._fail("has too many properties of characters", match.start() - 1)
        if not is_known_property(written):
            self._fail(f'has an unknown property, "\\{match[0][:40]}"', match.start() - 1)

    def _parse_char_escape(self) -> int:
        """Parse an escape for one character."""
        if self._at == len(self._text):
            self._fail("ends with a backslash")
        if match := self._match(_HEX):
            return self._pair_surrogates(int(match[1] or match[2] or match[3], 16), paired=match[3] is not None)
        if match := self._match(re.compile("c([A-Za-z])")):
            return ord(match[1]) % 32
        if match := self._match(re.compile("0(?![0-9])")):
            return 0
        char = self._text[self._at]
        self._at += 1
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char.isalnum() and char.isascii():
            self._fail(f'has "\\{char}", which is no escape')
        return ord(char)

    def _pair_surrogates(self, code: int, paired: bool) -> int:
        if code > CODE_POINT_MAX:
            self._fail("has a character beyond Unicode's")
        if paired and 0xD800 <= code < 0xDC00 and (low := self._match(_LOW_SURROGATE)):
            return 0x10000 + (code - 0xD800) * 0x400 + int(low[1], 16) - 0xDC00
        return code

    def _parse_set(self) -> Node:
        start, negated = self._at - 1, self._takes("^")
        ranges: list[Range] = []
        properties: list[str] = []
        while not self._takes("]"):
            first = self._parse_set_item(start)
            if self._text.startswith("-", self._at) and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._parse_set_item(start)
                if isinstance(first, int) and isinstance(last, int):
                    if last < first:
                        self._fail("has a range out of order")
                    ranges.append((first, last))
                    continue
                if self._strict:
                    self._fail("has a range that ends in a set")
                self._add_item(ord("-"), ranges, properties)
                self._add_item(last, ranges, properties)
            self._add_item(first, ranges, properties)
        return self._make_chars(ranges, properties, negated)

    def _parse_set_item(self, start: int) -> int | Chars | tuple[Range, ...]:
        if self._at >= len(self._text):
            self._fail("has a '[' without an end", start)
        if not self._strict and (posix := _POSIX_CLASS.match(self._text, self._at)):
            self._fail(f'has a POSIX class, "{posix[0]}", which ECMA-262 has not')
        if not self._takes("\\"):
            self._at += 1
            return ord(self._text[self._at - 1])
        if self._takes("b"):
            return 8
        found = self._parse_class_escape()
        return self._parse_char_escape() if found is None else found

    def _add_item(self, item: int | Chars | tuple[Range, ...], ranges: list[Range], properties: list[str]) -> None:
        if isinstance(item, int):
            ranges.append((item, item))
        elif isinstance(item, Chars):
            properties.extend(item.properties)
        else:
            ranges.extend(item)

    def _make_chars(self, ranges: Iterable[Range], properties: Iterable[str] = (), negated: bool = False) -> Node:
        """Make a set; its ranges hold both cases where case is ignored."""
        merged = char_sets.merge_ranges(ranges)
        if properties:
            self._count_ranges(merged)
            return Chars(merged, tuple(properties), negated, self._ignores_case)
        if self._ignores_case:
            merged = self._fold(merged)
        return self._count_ranges(char_sets.complement_ranges(merged) if negated else merged)

    def _fold(self, ranges: tuple[Range, ...]) -> tuple[Range, ...]:
        """Add other cases; equal sets cost their steps once."""
        folded, steps = char_sets.fold_ranges(ranges)
        if ranges not in self._folded:
            self._folded.add(ranges)
            self._fold_steps_left -= steps
        if self._fold_steps_left < 0:
            self._fail("ignores the case of too many characters")
        return folded

    def _count_ranges(self, ranges: tuple[Range, ...]) -> Node:
        self._ranges_left -= len(ranges)
        if self._ranges_left < 0:
            self._fail("has too many ranges of characters")
        return Chars(ranges) if ranges else NOTHING
