"""Builder of grammars in llguidance's dialect of Lark.  Pure.

Markers are named by their token id (`<[5]>`), everything else is text.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from warmline_backend.structured_output.json_schema.guidance import add_guidance_options

GRAMMAR_CHARS_MAX = 1 << 21
ANY_TEXT = "(?s:.*)"


class GrammarTooLongError(Exception):
    """A grammar beyond GRAMMAR_CHARS_MAX."""


class LarkBuilder:
    """Grammar under construction.  Methods return an expression for a rule; they raise GrammarTooLongError.

    `markers`: ids of tokens that no text is tokenized to, by their text.  `consumed_prefix`: a beginning of literals
    that is in the answer already; they go on from there.
    """

    def __init__(self, markers: Mapping[str, int], consumed_prefix: str = "") -> None:
        self.markers, self._consumed_prefix = markers, consumed_prefix
        self._rules, self._length = dict[str, str](), 0
        words = sorted((re.escape(word) for word in markers if word), key=len, reverse=True)
        self._splitter = re.compile(f"({'|'.join(words)})") if words else None

    def literal(self, text: str) -> str:
        """Write exactly this text, with its markers as tokens."""
        text = text.removeprefix(self._consumed_prefix) if self._consumed_prefix else text
        pieces = filter(None, self._splitter.split(text) if self._splitter else [text])
        written = (f"<[{self.markers[piece]}]>" if piece in self.markers else quote_literal(piece) for piece in pieces)
        return " ".join(written) or quote_literal("")

    def json(self, schema: Mapping[str, Any], **options: Any) -> str:
        """Write JSON of a schema; `options` are llguidance's."""
        return self.add_rule("%json " + json.dumps(add_guidance_options(schema, **options)))

    def text(self, pattern: str = ANY_TEXT, excluded: Iterable[str] = ()) -> str:
        """Write any text of this pattern without `excluded`; a marker ends it."""
        return self.add_terminal(self._build_text_pattern(pattern, excluded))

    def text_until(self, end: str, *, excluded: Iterable[str] = (), pattern: str = ANY_TEXT) -> str:
        """Write such text up to the first `end`, included; an `end` with a marker ends the text at that marker."""
        if self._splitter and (marker := self._splitter.search(end)):
            whole = f"(?:{pattern}){escape_regex(end[: marker.start()])}" if marker.start() else pattern
            return f"{self.text(whole, excluded)} {self.literal(end[marker.start() :])}"
        return self.add_rule(self._build_text_pattern(pattern, excluded), f"[suffix={quote_literal(end)}]")

    def _build_text_pattern(self, pattern: str, excluded: Iterable[str]) -> str:
        words = (escape_regex(word) for word in excluded if word not in self.markers)
        return " & ".join([f"/{pattern}/", *(f"~/(?s:.*){word}(?s:.*)/" for word in words)])

    def one_of(self, options: Iterable[str]) -> str:
        return self.add_rule(" | ".join(options))

    def add_rule(self, body: str, attributes: str = "", prefix: str = "r") -> str:
        name = f"{prefix}{len(self._rules)}"
        self.define_rule(name + attributes, body)
        return name

    def reserve_rule(self) -> str:
        """Name a rule that is defined later, so that it may refer to itself."""
        return self.add_rule("")

    def define_rule(self, name: str, body: str) -> None:
        self._length += len(body)
        if self._length > GRAMMAR_CHARS_MAX:
            raise GrammarTooLongError
        self._rules[name] = body

    def add_terminal(self, body: str) -> str:
        return self.add_rule(body, prefix="T")

    def render(self, start: str) -> str:
        rules = "".join(f"{head}: {body}\n" for head, body in self._rules.items())
        return f"%llguidance {{}}\nstart: {start}\n{rules}"


def quote_literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def join_optional_items(lark: LarkBuilder, items: Sequence[tuple[bool, str]], separator: str) -> str:
    """Join required and optional items in their order, with separators only between those present."""
    first, later = '""', '""'  # the rest behind nothing, and behind an item
    for required, item in reversed(items):
        leading, following = f"{item} {later}", f"{quote_literal(separator)} {item} {later}"
        first = lark.add_rule(leading if required else f"{leading} | {first}")
        later = lark.add_rule(following if required else f"{following} | {later}")
    return first


def escape_regex(text: str) -> str:
    """Escape text for a pattern."""
    return re.sub(r"([][\\.+*?(){}|^$/])", r"\\\1", text).replace("\n", r"\n")
