"""Splitter of answers that are messages with headers."""

from warmline_backend.output.dialect import Dialect
from warmline_backend.output.emitter import PartEmitter
from warmline_backend.output.expected import ExpectedOutput
from warmline_backend.output.headers import MESSAGE, START
from warmline_backend.output.markers import MarkerScanner
from warmline_backend.output.splitter import Splitter
from warmline_backend.tool_parsers.base import ParsedItems, RawToolCall, normalize_name, parse_arguments
from warmline_backend.tool_parsers.lenient_json import ToolCallParseError


class HeaderSplitter(Splitter):
    """Splitter for models whose answers are messages.  The prompt's tail has begun a header."""

    def __init__(self, dialect: Dialect, expected: ExpectedOutput) -> None:
        assert dialect.header_format
        super().__init__(dialect, expected, self._read_header)
        self._header_format = dialect.header_format
        self._body_scanner = MarkerScanner([*self._header_format.end_markers, START])
        self._header_scanner = MarkerScanner([MESSAGE])
        self._header = ""  # of the open message, as far as it has come
        self._recipient = ""  # function that the message calls
        self._is_reasoning = False
        self._prompt_header = ""  # part of the header in the prompt
        if expected.tail:
            self.feed(expected.tail)
            self._offset = -len(self._buffer)
            self._emitter = PartEmitter(self._tools, expected.parallel)
            if self._is_reasoning:
                self._emitter.begin_reasoning()
            self._prompt_header = self._header

    @property
    def is_reasoning(self) -> bool:
        return self._is_reasoning

    @property
    def is_calling(self) -> bool:
        return bool(self._recipient)

    def _finish(self, natural: bool) -> None:
        rest = self._take_all()
        if self._step == self._read_body:
            self._emit_body(rest)
            self._end_message("", natural)
        else:
            self._header += rest
            if not any(word in self._sampled_header for word in self._header_format.markers):
                self._emit_text(self._sampled_header)

    # ---- states

    def _read_header(self) -> bool:
        safe, marker = self._header_scanner.find_marker(self._buffer)
        self._header += self._take(safe)
        if not self._header_format.can_be_header(self._header):
            self._begin_headerless_body()
            return True
        if marker:
            self._take(len(marker))
            self._begin_message()
        return bool(marker)

    def _begin_headerless_body(self) -> None:
        """Take text that seemed to be a header as the beginning of an answer without header."""
        text, self._header = self._sampled_header, ""
        # Read as a header again, it would not end.
        start = START if text.startswith(START) and not self._prompt_header else ""
        self._push_back(text[len(start) :])
        self._emit_text(start)
        self._step = self._read_body

    def _begin_message(self) -> None:
        headers, header = self._header_format, self._header
        self._recipient = headers.parse_recipient(header) if self._tool_format else ""
        self._is_reasoning = not self._recipient and headers.is_reasoning(header)
        self._step = self._read_body
        if self._is_reasoning:
            self._emitter.begin_reasoning()

    def _read_body(self) -> bool:
        safe, marker = self._body_scanner.find_marker(self._buffer)
        self._emit_body(self._take(safe))
        if not marker:
            return False
        if marker != START:
            self._take(len(marker))
        self._end_message(marker if marker in self._header_format.end_markers else "", True)
        return True

    @property
    def _sampled_header(self) -> str:
        return self._header.removeprefix(self._prompt_header)

    def _emit_body(self, text: str) -> None:
        if self._recipient:
            self._pending.append(text)
        elif self._is_reasoning:
            self._emit_reasoning(text)
        else:
            self._emit_text(text)

    def _end_message(self, marker: str, natural: bool) -> None:
        if self._recipient:
            self._end_call(marker, natural)
        if self._is_reasoning and marker:
            self._emitter.end_reasoning(self._offset)
        self._header, self._prompt_header, self._recipient, self._pending = "", "", "", []
        self._step, self._is_reasoning = self._read_header, False

    def _end_call(self, marker: str, natural: bool) -> None:
        text = "".join(self._pending)
        try:
            if not marker and not natural:
                raise ToolCallParseError("it is cut")
            end = self._offset - len(marker)
            self._emitter.emit_items(self._parse_calls(text), text, end - len(text), end)
        except ToolCallParseError:
            self._emit_text(self._sampled_header + MESSAGE + text + marker)

    def _parse_calls(self, text: str) -> ParsedItems:
        """Parse a message's calls.  Raises ToolCallParseError."""
        if self._header_format.has_json_calls:
            return [RawToolCall(normalize_name(self._recipient), parse_arguments(text))]
        assert self._tool_format
        before, marker, rest = text.partition(self._tool_format.start)
        calls, _, after = rest.partition(self._tool_format.end)
        if not marker:
            raise ToolCallParseError("no call")
        items = [before, *self._tool_format.parse(calls, False), after]
        return [item for item in items if isinstance(item, RawToolCall) or item.strip()]
