"""Clients that read in a thread of their own, so that tests can wait, inspect or disconnect at any moment."""

import contextlib
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from support.pair.pair import Pair, Reply
from warmline_common.protocol.sse import ChunkAggregator, SseEvent, SseParser

LIMIT_S = 60.0
READ_BYTES = 65_536
SLOW_PIECES = 50
LEAVE_POLL_S = 0.02  # delay until a reader notices `disconnect`
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST


def make_request_head(path: str, body: bytes, headers: Mapping[str, str], method: str = "POST") -> bytes:
    own = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in own.items()), "", ""]
    return "\r\n".join(lines).encode()


class HttpResponse:
    """HTTP/1.1 response, parsed as its bytes arrive."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.whole = False  # ended as HTTP says, not with the connection
        self._raw = b""

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def feed(self, data: bytes) -> bytes:
        """Parse received data; returns the body bytes added by it."""
        self._raw += data
        if not self.status and not self._parse_head():
            return b""
        before = len(self.body)
        if "content-length" in self.headers:
            self.body, self._raw = self.body + self._raw, b""
            self.whole = len(self.body) >= int(self.headers["content-length"])
        else:
            while self._parse_chunk():
                pass
        return self.body[before:]

    def _parse_head(self) -> bool:
        lines, end, rest = self._raw.partition(b"\r\n\r\n")
        if not end:
            return False
        first, *others = lines.decode("latin-1").split("\r\n")
        self.status, self._raw = int(first.split()[1]), rest
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in others)}
        return True

    def _parse_chunk(self) -> bool:
        size, end, rest = self._raw.partition(b"\r\n")
        if not end or len(rest) < int(size, 16) + 2:
            return False
        data, self._raw = rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        self.body += data
        self.whole = self.whole or not data
        return bool(data)


class ClientRequest:
    """Request on a connection of its own.  Its properties may be read from any thread at any time."""

    def __init__(
        self,
        pair: Pair,
        messages: list[dict[str, str]],
        *,
        headers: Mapping[str, str] | None = None,
        read_pause_s: float = 0.0,
        send_pause_s: float = 0.0,
        **options: object,
    ) -> None:
        body = {"messages": messages, **options}
        if options.get("stream"):
            body["stream_options"] = {"include_usage": True}
        self.messages, self.options = messages, {name: options[name] for name in options if name != "stream"}
        self.wants_stream = bool(body.get("stream"))
        self.response, self.events = HttpResponse(), list[SseEvent]()
        self.failure = ""  # how the connection broke, if it did
        self.started_at = self.last_byte_at = time.monotonic()  # when the last byte came
        self._pause_s = read_pause_s
        self._parser, self._aggregator, self._text = SseParser(), ChunkAggregator(), ""
        self._changed, self._is_ended = threading.Condition(), False
        self._leaving = ""
        self._socket = socket.create_connection(("127.0.0.1", pair.port), LIMIT_S)
        data = json.dumps(body).encode()
        self._send(
            make_request_head("/v1/chat/completions", data, {"Connection": "close", **(headers or {})}) + data,
            send_pause_s,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    # ---- the response

    @property
    def is_ended(self) -> bool:
        return self._is_ended

    @property
    def status(self) -> int:
        return self.response.status

    @property
    def text(self) -> str:
        """Content received so far; of a JSON response only once it is complete."""
        return self._text

    @property
    def is_complete(self) -> bool:
        """True after a clean end: [DONE], or all of a JSON body."""
        if self.response.is_stream:
            return any(event.data == b"[DONE]" for event in self.events)
        return self.response.whole and self.status == 200

    @property
    def error(self) -> str:
        """Text of an error, as an event or as a body; "" where there is none."""
        for body in self._payloads():
            if b'"error"' in body and (error := json.loads(body).get("error")):
                return str(error["message"])
        return ""

    @property
    def reply(self) -> Reply:
        """Response as one JSON, streamed or not; only after a clean end."""
        assert self.is_complete and not self.error, self.summary
        raw = json.dumps(self._aggregator.result()).encode() if self.response.is_stream else self.response.body
        return Reply(self.status, self.response.headers, raw)

    @property
    def summary(self) -> str:
        """Status and error, for messages of failing tests."""
        return f"{self.status} {self.failure} {self.error or self.response.body[-500:].decode(errors='replace')}"

    def _payloads(self) -> list[bytes]:
        if self.response.is_stream:
            return [event.data for event in self.events]
        return [self.response.body] if self.response.whole else []

    # ---- waiting and disconnecting

    def wait(self, condition: Callable[["ClientRequest"], bool], problem: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self) or self._is_ended, LIMIT_S), (
                f"{problem}: {self.summary}"
            )
        assert condition(self), f"{problem}: {self.summary}"

    def wait_for_text(self) -> None:
        self.wait(lambda request: bool(request.text), "no content")

    def wait_until_ended(self) -> "ClientRequest":
        self.wait(lambda request: request.is_ended, "no end")
        return self

    def wait_while_bytes_come(self, silence_max_s: float) -> bool:
        """Wait for the end, or until no byte has come for so long; whether it has ended."""
        with self._changed:
            while not self._is_ended and (left_s := self.last_byte_at + silence_max_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
        return self._is_ended

    def disconnect(self, how: str = "fin") -> None:
        """Close the connection at once: in order ("fin"), or as a killed process does ("rst")."""
        self._leaving = how
        self._thread.join()

    def _send(self, data: bytes, pause_s: float) -> None:
        size = len(data) // SLOW_PIECES + 1 if pause_s else len(data)
        for start in range(0, len(data), size):
            time.sleep(pause_s)
            self._socket.sendall(data[start : start + size])

    # ---- the reader's thread

    def _read(self) -> None:
        try:
            while not self._leaving and self._read_some():
                time.sleep(self._pause_s)
        except OSError as error:
            self.failure = str(error)
        if self._leaving == "rst":
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._socket.close()
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def _read_some(self) -> bool:
        if not select.select([self._socket], [], [], LEAVE_POLL_S)[0]:
            return True
        data = self._socket.recv(READ_BYTES)
        if not data:
            self.failure = "" if self.response.whole else "the connection ended early"
            return False
        with self._changed:
            self.last_byte_at = time.monotonic()
            self._parse_body(self.response.feed(data))
            self._changed.notify_all()
        return not self.response.whole

    def _parse_body(self, body: bytes) -> None:
        if self.response.is_stream:
            for event in self._parser.feed(body):
                self.events.append(event)
                if event.data.startswith(b"{") and "choices" in (chunk := json.loads(event.data)):
                    self._add_chunk(chunk)
        elif self.is_complete:
            self._text = self.reply.text

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        self._aggregator.add(chunk)
        for choice in chunk["choices"]:
            self._text += choice["delta"].get("content") or ""
