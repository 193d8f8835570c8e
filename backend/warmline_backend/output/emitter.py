"""Emitter of an answer's parts; holds white space until its part is certain."""

import json
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

from warmline_backend.output.events import Part, Reasoning, Text, ToolCall
from warmline_backend.request.params import Tools
from warmline_backend.tool_parsers.argument_types import convert_arguments, find_parameters
from warmline_backend.tool_parsers.base import ParsedItems, RawToolCall
from warmline_backend.tool_parsers.lenient_json import ToolCallParseError
from warmline_common.protocol.surrogates import replace_halves

T = TypeVar("T", Text, Reasoning)


class PartEmitter:
    """Parts of one answer.  Offsets are characters of all text; the `end` of texts is not set.

    Line breaks next to reasoning's markers belong to the markers.  Where there may be calls, so does white space before
    and after them, but where content stands on both sides.
    """

    def __init__(self, tools: Tools, parallel: bool) -> None:
        self._tools, self._parallel = tools, parallel
        self._parts: list[Part] = []
        self._pending_spaces: list[Text] = []  # of content, emitted only once something follows
        self._pending_breaks: list[Reasoning] = []  # of reasoning, likewise
        self.after_marker = False
        self.has_content = False
        self.has_calls = False
        self.is_after_call = False  # and no content came since
        self.reasoning_end = 0  # where the last reasoning ended; -1 within one

    @property
    def is_done(self) -> bool:
        """True after a call where only one may be made."""
        return self.has_calls and not self._parallel

    @property
    def is_empty(self) -> bool:
        """True until content or a call is emitted; reasoning does not count."""
        return not self.has_content and not self.has_calls

    def copy(self) -> "PartEmitter":
        made = copy(self)
        made._parts = [*self._parts]
        made._pending_spaces, made._pending_breaks = [*self._pending_spaces], [*self._pending_breaks]
        return made

    def take_parts(self) -> list[Part]:
        """Take the parts that are new."""
        parts, self._parts = self._parts, []
        return parts

    # ---- reasoning

    def begin_reasoning(self) -> None:
        self.after_marker, self.reasoning_end = True, -1

    def end_reasoning(self, offset: int) -> None:
        self.after_marker, self._pending_breaks, self.reasoning_end = True, [], offset

    def emit_reasoning(self, text: str, end: int) -> None:
        """Emit reasoning that ends at the offset `end`."""
        text = self._strip_breaks(text)
        if emitted := text.rstrip("\n"):
            first = Reasoning(emitted, end - len(text))
            self._parts += join_texts([*self._pending_breaks, first])
            self._pending_breaks, text = [], text[len(emitted) :]
        if text:
            self._pending_breaks.append(Reasoning(text, end - len(text)))

    def _strip_breaks(self, text: str) -> str:
        if self.after_marker:
            text = text.lstrip("\n")
            self.after_marker = not text
        return text

    # ---- content and calls

    def emit_text(self, text: str, end: int) -> None:
        """Emit text that ends at the offset `end`; -1 where that is unknown."""
        if not (text := self._strip_breaks(text)):
            return
        if self.has_calls and not self.has_content:
            text = text.lstrip()
        if self._tools is None:
            self.has_content = True
            self._parts.append(_make_text(text, end))
            return
        if emitted := text.rstrip():
            self.has_content, self.is_after_call = True, False
            spaces = len(text) - len(emitted)
            self._parts += join_texts([*self._pending_spaces, _make_text(emitted, end - spaces if end >= 0 else -1)])
            self._pending_spaces, text = [], text[len(emitted) :]
        if text:
            self._pending_spaces.append(_make_text(text, end))

    def emit_items(self, items: ParsedItems, source: str, source_start: int, offset: int) -> None:
        """Emit calls that end at `offset`, and the text between them.  On ToolCallParseError nothing is emitted.

        `source`, which begins at `source_start`, is what the items were parsed from.
        """
        read = 0
        for item in [item if isinstance(item, str) else self._make_tool_call(item, offset) for item in items]:
            if isinstance(item, str):
                found = source.find(item, read)
                read = found + len(item) if found >= 0 else read
                self.emit_text(item, source_start + read if found >= 0 else -1)
            elif not self.is_done:
                self.emit_call(item)

    def _make_tool_call(self, call: RawToolCall, offset: int) -> ToolCall:
        arguments = convert_arguments(call.arguments, find_parameters(self._tools, call.name))
        return ToolCall(call.name, _encode_arguments(arguments), self.reasoning_end, offset)

    def emit_call(self, call: ToolCall) -> None:
        if not self.has_content:
            self._pending_spaces = []
        self.has_calls = self.is_after_call = True
        self.after_marker = False
        self._parts.append(call)

    def finish(self) -> None:
        """End the answer: white space at its end is emitted too, but behind calls."""
        self._parts += join_texts(self._pending_breaks)
        if not self.has_calls:
            self._parts += join_texts(self._pending_spaces)
        self._pending_breaks, self._pending_spaces = [], []


def join_texts(texts: Iterable[T]) -> list[T]:
    """Join texts that follow each other without a gap."""
    joined: list[T] = []
    for text in texts:
        last = joined[-1] if joined else None
        if last and (text.start == last.start + len(last.text) if last.start >= 0 else text.start < 0):
            joined[-1] = replace(last, text=last.text + text.text)
        else:
            joined.append(text)
    return joined


def _make_text(text: str, end: int) -> Text:
    return Text(text, end - len(text) if end >= 0 else -1)


def _encode_arguments(arguments: dict[str, Any]) -> str:
    try:
        return replace_halves(json.dumps(arguments, ensure_ascii=False))
    except RecursionError as error:
        raise ToolCallParseError("nested too deeply") from error
