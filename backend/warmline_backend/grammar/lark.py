"""Grammar text in llguidance's dialect of Lark, written piece by piece.  Pure.

Tokens that stand for markers are named by their id (`<[5]>`), everything else is text.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from warmline_backend.grammar.schemas import guided

ANY_TEXT = "(?s:.*)"


class Lark:
    """One grammar being written.  Methods return an expression to be put into a rule.

    `markers` are the tokens that no text is ever tokenized to, by what they are written as.
    """

    def __init__(self, markers: Mapping[str, int]) -> None:
        self._markers, self._rules = markers, dict[str, str]()
        words = sorted((re.escape(word) for word in markers if word), key=len, reverse=True)
        self._splitter = re.compile(f"({'|'.join(words)})") if words else None

    def literal(self, text: str) -> str:
        """Exactly this text, with its markers as the tokens that they are."""
        pieces = self._splitter.split(text) if self._splitter else [text]
        return " ".join(self._piece(piece) for piece in pieces if piece) or quoted("")

    def _piece(self, piece: str) -> str:
        return f"<[{self._markers[piece]}]>" if piece in self._markers else quoted(piece)

    def is_marker(self, text: str) -> bool:
        return text in self._markers

    def json(self, schema: Mapping[str, Any], *, lenient: bool = False) -> str:
        return self.rule("%json " + json.dumps(guided(schema, lenient=lenient)))

    def text(self, pattern: str = ANY_TEXT) -> str:
        """Any text of this pattern; a marker ends it."""
        return self.terminal(f"/{pattern}/")

    def text_up_to(self, end: str, *, without: Iterable[str] = (), pattern: str = ANY_TEXT) -> str:
        """Text of this pattern and then, for the first time, `end`; none of `without` occurs in it.

        Where `end` has a marker in it, what stands before that counts as text: the text would swallow it.
        """
        if self._splitter and (found := self._splitter.search(end)):
            return f"{self.text(pattern)} {self.literal(end[found.start() :])}"
        banned = [word for word in without if word and word not in self._markers]
        parts = [f"/{pattern}/", *(f"~/(?s:.*){_in_regex(word)}(?s:.*)/" for word in banned)]
        return self.rule(" & ".join(parts), f"[suffix={quoted(end)}]")

    def one_of(self, options: Iterable[str]) -> str:
        return self.rule(" | ".join(options))

    def rule(self, body: str, attributes: str = "") -> str:
        return self._named(f"r{len(self._rules)}{attributes}", body)

    def terminal(self, body: str) -> str:
        return self._named(f"T{len(self._rules)}", body)

    def _named(self, head: str, body: str) -> str:
        self._rules[head] = body
        return head.partition("[")[0]

    def written(self, start: str) -> str:
        rules = "".join(f"{head}: {body}\n" for head, body in self._rules.items())
        return f"%llguidance {{}}\nstart: {start}\n{rules}"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def optional(expression: str) -> str:
    return f"({expression})?"


def _in_regex(text: str) -> str:
    return re.sub(r"([^\w\s])", r"\\\1", text).replace("\n", r"\n")
