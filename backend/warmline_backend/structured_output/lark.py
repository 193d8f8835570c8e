"""Grammar text in llguidance's dialect of Lark, written piece by piece.  Pure.

Tokens that stand for markers are named by their id (`<[5]>`), everything else is text.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from warmline_backend.structured_output.json_schema import guided

GRAMMAR_CHARS_MAX = 1 << 21
ANY_TEXT = "(?s:.*)"


class TooLong(Exception):
    """The grammar has grown beyond GRAMMAR_CHARS_MAX."""


class Lark:
    """One grammar being written.  Methods return an expression to be put into a rule; they raise TooLong.

    `markers` are the tokens that no text is ever tokenized to, by what they are written as.  `begun`: how literals
    begin that are half there already; they go on from there.
    """

    def __init__(self, markers: Mapping[str, int], begun: str = "") -> None:
        self._begun = begun
        self._markers, self._rules, self._length = markers, dict[str, str](), 0
        words = sorted((re.escape(word) for word in markers if word), key=len, reverse=True)
        self._splitter = re.compile(f"({'|'.join(words)})") if words else None

    def literal(self, text: str) -> str:
        """Exactly this text, with its markers as the tokens that they are."""
        text = text.removeprefix(self._begun) if self._begun else text
        pieces = self._splitter.split(text) if self._splitter else [text]
        return " ".join(self._piece(piece) for piece in pieces if piece) or quoted("")

    def _piece(self, piece: str) -> str:
        return f"<[{self._markers[piece]}]>" if piece in self._markers else quoted(piece)

    def is_marker(self, text: str) -> bool:
        return text in self._markers

    def json(self, schema: Mapping[str, Any], **options: Any) -> str:
        """JSON that a schema allows; `options` are llguidance's."""
        return self.rule("%json " + json.dumps(guided(schema, **options)))

    def text(self, pattern: str = ANY_TEXT, without: Iterable[str] = ()) -> str:
        """Any text of this pattern that none of `without` occurs in; a marker ends it."""
        return self.terminal(self._plain(pattern, without))

    def text_up_to(self, end: str, *, without: Iterable[str] = (), pattern: str = ANY_TEXT) -> str:
        """Such text and then, for the first time, `end`; or where `end` has a marker in it, that."""
        if self._splitter and (found := self._splitter.search(end)):
            whole = f"(?:{pattern}){in_regex(end[: found.start()])}" if found.start() else pattern
            return f"{self.text(whole, without)} {self.literal(end[found.start() :])}"
        return self.rule(self._plain(pattern, without), f"[suffix={quoted(end)}]")

    def _plain(self, pattern: str, without: Iterable[str]) -> str:
        banned = [word for word in without if word not in self._markers]
        return " & ".join([f"/{pattern}/", *(f"~/(?s:.*){in_regex(word)}(?s:.*)/" for word in banned)])

    def one_of(self, options: Iterable[str]) -> str:
        return self.rule(" | ".join(options))

    def rule(self, body: str, attributes: str = "") -> str:
        return self._named(f"r{len(self._rules)}{attributes}", body)

    def reserve(self) -> str:
        """The name of a rule that is defined later, so that it may speak of itself."""
        return self._named(f"r{len(self._rules)}", "")

    def define(self, name: str, body: str) -> None:
        self._length += len(body)
        if self._length > GRAMMAR_CHARS_MAX:
            raise TooLong
        self._rules[name] = body

    def terminal(self, body: str) -> str:
        return self._named(f"T{len(self._rules)}", body)

    def _named(self, head: str, body: str) -> str:
        self.define(head, body)
        return head.partition("[")[0]

    def written(self, start: str) -> str:
        rules = "".join(f"{head}: {body}\n" for head, body in self._rules.items())
        return f"%llguidance {{}}\nstart: {start}\n{rules}"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def optional(expression: str) -> str:
    return f"({expression})?"


def listed(lark: Lark, arguments: Sequence[tuple[bool, str]], between: str) -> str:
    """Required and optional items in their order, with commas only between those that are there."""
    first, later = '""', '""'  # what may follow when nothing, or something, has been written
    for required, item in reversed(arguments):
        begun, going_on = f"{item} {later}", f"{quoted(between)} {item} {later}"
        first = lark.rule(begun if required else f"{begun} | {first}")
        later = lark.rule(going_on if required else f"{going_on} | {later}")
    return first


def in_regex(text: str) -> str:
    """A pattern of exactly this text."""
    return re.sub(r"([][\\.+*?(){}|^$/])", r"\\\1", text).replace("\n", r"\n")
