"""Emitter of an answer's parts; holds white space until its part is certain."""

import json
from typing import Any

from warmline_backend.output.events import Part, Reasoning, Text, ToolCall
from warmline_backend.request.params import Tools
from warmline_backend.tool_parsers.argument_types import convert_arguments, find_parameters
from warmline_backend.tool_parsers.base import ParsedItems, RawToolCall
from warmline_backend.tool_parsers.lenient_json import ToolCallParseError
from warmline_common.protocol.surrogates import replace_halves


class PartEmitter:
    """Parts of one answer.  Offsets are characters of all text.

    Line breaks next to reasoning's markers belong to the markers.  Where there may be calls, so does white space before
    and after them, but where content stands on both sides.
    """

    def __init__(self, tools: Tools, parallel: bool) -> None:
        self._tools, self._parallel = tools, parallel
        self._parts: list[Part] = []
        self._pending_space = ""  # of content, emitted only once something follows
        self._pending_breaks = ""  # of reasoning, likewise
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

    def take_parts(self) -> list[Part]:
        """Take the parts that are new."""
        parts, self._parts = self._parts, []
        return parts

    # ---- reasoning

    def begin_reasoning(self) -> None:
        self.after_marker, self.reasoning_end = True, -1

    def end_reasoning(self, offset: int) -> None:
        self.after_marker, self._pending_breaks, self.reasoning_end = True, "", offset

    def emit_reasoning(self, text: str) -> None:
        text = self._pending_breaks + self._strip_breaks(text)
        emitted = text.rstrip("\n")
        self._pending_breaks = text[len(emitted) :]
        if emitted:
            self._parts.append(Reasoning(emitted))

    def _strip_breaks(self, text: str) -> str:
        if self.after_marker:
            text = text.lstrip("\n")
            self.after_marker = not text
        return text

    # ---- content and calls

    def emit_text(self, text: str) -> None:
        if not (text := self._strip_breaks(text)):
            return
        if self.has_calls and not self.has_content:
            text = text.lstrip()
        if self._tools is None:
            self.has_content = True
            self._parts.append(Text(text))
            return
        text = self._pending_space + text
        emitted = text.rstrip()
        self._pending_space = text[len(emitted) :]
        if emitted:
            self.has_content, self.is_after_call = True, False
            self._parts.append(Text(emitted))

    def emit_items(self, items: ParsedItems, offset: int) -> None:
        """Emit calls that end at `offset`, and the text between them.  On ToolCallParseError nothing is emitted."""
        for item in [item if isinstance(item, str) else self._make_tool_call(item, offset) for item in items]:
            if isinstance(item, str):
                self.emit_text(item)
            elif not self.is_done:
                self.emit_call(item)

    def _make_tool_call(self, call: RawToolCall, offset: int) -> ToolCall:
        arguments = convert_arguments(call.arguments, find_parameters(self._tools, call.name))
        return ToolCall(call.name, _encode_arguments(arguments), self.reasoning_end, offset)

    def emit_call(self, call: ToolCall) -> None:
        if not self.has_content:
            self._pending_space = ""
        self.has_calls = self.is_after_call = True
        self.after_marker = False
        self._parts.append(call)

    def finish(self) -> None:
        """End the answer: white space at its end is emitted too, but behind calls."""
        if self._pending_breaks:
            self._parts.append(Reasoning(self._pending_breaks))
        if self._pending_space and not self.has_calls:
            self._parts.append(Text(self._pending_space))
        self._pending_breaks = self._pending_space = ""


def _encode_arguments(arguments: dict[str, Any]) -> str:
    try:
        return replace_halves(json.dumps(arguments, ensure_ascii=False))
    except RecursionError as error:
        raise ToolCallParseError("nested too deeply") from error
