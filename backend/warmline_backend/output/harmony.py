"""Answers of messages with headers told apart as they come."""

from warmline_backend.output.dialect import Dialect
from warmline_backend.output.emitter import Teller
from warmline_backend.output.events import Part
from warmline_backend.output.headers import MESSAGE, START
from warmline_backend.output.markers import Scanner
from warmline_backend.output.splitter import Tools
from warmline_backend.tool_parsers.base import Items, Written, plain_name, read_arguments
from warmline_backend.tool_parsers.lenient_json import Unreadable


class HeadedSplitter:
    """A Splitter.  `tail`: the prompt's end, in which a header has begun."""

    def __init__(self, dialect: Dialect, tools: Tools, *, tail: str = "", parallel: bool = True) -> None:
        assert dialect.headers
        self._headers, self._format = dialect.headers, dialect.calls if tools else None
        self._teller = Teller(tools if self._format else None, parallel)
        self._in_body = Scanner([*self._headers.ends, START])
        self._in_header = Scanner([MESSAGE])
        self._buffer, self._offset = "", 0
        self._header = ""  # of the message under way, as far as it has come
        self._held: list[str] = []  # of a call
        self._recipient = ""  # whom the message calls
        self._step = self._read_header
        self._thinks = False
        self._prompted = ""  # what of the header the prompt has
        if tail:
            self.feed(tail)
            self._offset = -len(self._buffer)
            self._teller = Teller(tools if self._format else None, parallel)
            if self._thinks:
                self._teller.begin_reasoning()
            self._prompted = self._header

    @property
    def done(self) -> bool:
        return self._teller.done

    @property
    def thinking(self) -> bool:
        return self._thinks

    @property
    def calling(self) -> bool:
        return bool(self._recipient)

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        while not self._teller.done and self._step():
            pass
        return self._teller.taken()

    def finish(self, natural: bool) -> list[Part]:
        rest = self._take(len(self._buffer))
        if self._step == self._read_body:
            self._body(rest)
            self._end_message("", natural)
        else:
            self._header += rest
            if not any(word in self._written_header for word in self._headers.words):
                self._teller.say(self._written_header)
        self._teller.finish()
        return self._teller.taken()

    # ---- states

    def _read_header(self) -> bool:
        safe, marker = self._in_header.find(self._buffer)
        self._header += self._take(safe)
        if not self._headers.may_be_header(self._header):
            self._answer_without()
            return True
        if marker:
            self._take(len(marker))
            self._begin_message()
        return bool(marker)

    def _answer_without(self) -> None:
        """What seemed to be a header is the beginning of an answer that has none."""
        text, self._header = self._written_header, ""
        begun = START if text.startswith(START) and not self._prompted else ""  # read as one again, it would not end
        self._teller.say(begun)
        self._buffer = text[len(begun) :] + self._buffer
        self._offset -= len(text) - len(begun)
        self._step = self._read_body

    def _begin_message(self) -> None:
        headers, header = self._headers, self._header
        self._recipient = headers.recipient(header) if self._format else ""
        self._thinks = not self._recipient and headers.is_reasoning(header)
        self._step = self._read_body
        if self._thinks:
            self._teller.begin_reasoning()

    def _read_body(self) -> bool:
        safe, marker = self._in_body.find(self._buffer)
        self._body(self._take(safe))
        if not marker:
            return False
        if marker != START:
            self._take(len(marker))
        self._end_message(marker if marker in self._headers.ends else "", True)
        return True

    @property
    def _written_header(self) -> str:
        return self._header.removeprefix(self._prompted)

    def _body(self, text: str) -> None:
        if self._recipient:
            self._held.append(text)
        elif self._thinks:
            self._teller.think(text)
        else:
            self._teller.say(text)

    def _end_message(self, marker: str, natural: bool) -> None:
        if self._recipient:
            self._end_call(marker, natural)
        if self._thinks and marker:
            self._teller.end_reasoning(self._offset)
        self._header, self._prompted, self._recipient, self._held = "", "", "", []
        self._step, self._thinks = self._read_header, False

    def _end_call(self, marker: str, natural: bool) -> None:
        text = "".join(self._held)
        try:
            if not marker and not natural:
                raise Unreadable("it is cut")
            self._teller.tell(self._items(text), self._offset - len(marker))
        except Unreadable:
            self._teller.say(self._written_header + MESSAGE + text + marker)

    def _items(self, text: str) -> Items:
        """Raises Unreadable."""
        if self._headers.calls_are_json:
            return [Written(plain_name(self._recipient), read_arguments(text))]
        assert self._format
        before, found, rest = text.partition(self._format.start)
        calls, _, after = rest.partition(self._format.end)
        if not found:
            raise Unreadable("no call")
        items = [before, *self._format.read(calls, False), after]
        return [item for item in items if isinstance(item, Written) or item.strip()]

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        self._offset += length
        return taken
