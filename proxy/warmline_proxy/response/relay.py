"""Relay of the backend's events to the client: streamed event by event, or as one JSON, encoded by the client's API.

An error before the first byte is an HTTP status.  After content or a heartbeat it is an `error` event without
`[DONE]`, or an aborted connection; never a clean end.  Event loop thread.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from aiohttp import web

from warmline_common.protocol.messages import decode
from warmline_common.protocol.sse import SseEvent
from warmline_proxy.api.base import Api, ApiCall, Chunk, PromptProgress, ResponseEncoder, ResponseStart
from warmline_proxy.errors import ClientError, bad_gateway
from warmline_proxy.http.bodies import bytes_response, write_chunk
from warmline_proxy.request_log import RequestLog
from warmline_proxy.response.progress import measure_progress
from warmline_proxy.upstream.client import LeaderLostError, StepFailedError, UpstreamError, translate_upstream_error
from warmline_proxy.upstream.generation_stream import STARTED, GenerationStream, parse_prefill

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
JSON_HEADERS = {"Content-Type": "application/json; charset=utf-8"}
TRUNCATED_MESSAGE = "The backend ended its answer early."
ERROR_SEND_TIMEOUT_S = 5.0  # for the error of a client that may not be reading


class ResponseSink(Protocol):
    """Destination of one generation: the client (ResponseWriter), or a response of several choices (Branch)."""

    call: ApiCall | None
    has_content: bool  # content was written
    is_closed: bool
    last_write_at: float

    @property
    def has_started(self) -> bool: ...
    def open_encoder(self, response_start: ResponseStart) -> ResponseEncoder:
        """Encoder for the content; a new one at each dispatch, before which no content was written."""

    async def write(self, data: bytes) -> None: ...
    async def send_heartbeat(self, comment: bytes, progress: PromptProgress, loading: str) -> None: ...
    async def end(self, data: bytes = b"") -> None: ...
    async def send_json(self, body: bytes) -> None: ...
    async def fail(self, error: ClientError) -> None: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class ResponseWriter:
    """The client's side of one request: nothing sent, heartbeats sent (`has_started`), or content (`has_content`).

    `http_response` is the handler's result, once the response has ended or failed.
    """

    http_request: web.Request
    api: Api
    get_headers: Callable[[], Mapping[str, str]]
    describe_start: Callable[[], ResponseStart]  # for what is sent before the first dispatch
    send_timeout_s: float
    on_error: Callable[[ClientError], object]  # called with the error that is written to the client
    wait_until_stored: Callable[[], Awaitable[None]]  # awaited before each write: what says that it is stored, is
    call: ApiCall | None = field(default=None, init=False)  # nothing is sent before it is known
    encoder: ResponseEncoder | None = field(default=None, init=False)  # from the first dispatch on
    has_content: bool = field(default=False, init=False)
    is_closed: bool = field(default=False, init=False)  # nothing more may be written
    last_write_at: float = field(default_factory=time.monotonic, init=False)  # of the last byte, or of the arrival
    http_response: web.StreamResponse | None = field(default=None, init=False)
    _stream_response: web.StreamResponse | None = field(default=None, init=False)
    _send_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _is_heartbeat_stopped: bool = field(default=False, init=False)

    @property
    def has_started(self) -> bool:
        return self._stream_response is not None

    def open_encoder(self, response_start: ResponseStart) -> ResponseEncoder:
        assert self.call is not None
        self.encoder = self.call.api.create_encoder(self.call, response_start, self.encoder)
        return self.encoder

    async def write(self, data: bytes) -> None:
        """Raises ConnectionResetError where the client has left, or takes nothing for `send_timeout_s`."""
        async with self._send_lock:
            await self.wait_until_stored()
            self.last_write_at = time.monotonic()
            if self._stream_response is None:
                assert self.call is not None
                kind = STREAM_HEADERS if self.call.stream else JSON_HEADERS
                response = web.StreamResponse(headers={**kind, **self.get_headers()})
                await response.prepare(self.http_request)
                self._stream_response = response
            await write_chunk(self._stream_response, data, self.send_timeout_s)

    async def send_heartbeat(self, comment: bytes, progress: PromptProgress, loading: str) -> None:
        """Send a comment, or the progress where the client reads that, so that the client does not time out.

        One that waits for JSON gets white space.
        """
        if self.call is None or self._is_heartbeat_stopped or self._send_lock.locked():
            return
        event, interval_s = comment, self.call.progress_interval_s
        if self.call.stream and interval_s is not None and (interval_s or not self.has_content):
            event = (self.encoder or self.open_encoder(self.describe_start())).encode_progress(progress, loading)
        with suppress(ConnectionResetError):  # also raised in the request's own task
            await self.write(event if self.call.stream else b" ")

    async def end(self, data: bytes = b"") -> None:
        """Write the rest, and end the response.  Raises ConnectionResetError."""
        await self._stop_heartbeats()
        if data:
            await self.write(data)
        assert self._stream_response is not None
        self.is_closed, self.http_response = True, self._stream_response
        try:
            async with asyncio.timeout(self.send_timeout_s):
                await self._stream_response.write_eof()
        except TimeoutError:
            raise ConnectionResetError("the client did not take the end of its answer") from None

    async def send_json(self, body: bytes) -> None:
        """Send a JSON response, with a Content-Length where nothing was sent yet."""
        await self._stop_heartbeats()
        await self.wait_until_stored()
        if self.has_started:
            return await self.end(body)
        self.is_closed = True
        self.http_response = bytes_response(body, headers=self.get_headers())

    async def fail(self, error: ClientError) -> None:
        """Write an error, or abort the connection (ConnectionResetError): half an answer must not look whole."""
        self.on_error(error)
        await self._stop_heartbeats()
        if not self.has_started and not self.is_closed:
            self.http_response = error.build_response(self.api.encode_error(error), dict(self.get_headers()))
            return
        if self.call and self.call.stream and not self.is_closed:
            self.send_timeout_s = min(self.send_timeout_s, ERROR_SEND_TIMEOUT_S)
            await self.end((self.encoder or self.api).encode_stream_error(error))
            return
        if self.http_request.transport:
            self.http_request.transport.abort()
        raise ConnectionResetError(f"aborted: {error}")

    def close(self) -> None:
        """Write nothing more."""
        self._is_heartbeat_stopped = self.is_closed = True

    async def _stop_heartbeats(self) -> None:
        async with self._send_lock:  # one may be in progress
            self._is_heartbeat_stopped = True


@dataclass
class Relay:
    """One generation's way to its sink, encoded by the sink's encoder for this dispatch."""

    sink: ResponseSink
    generation: GenerationStream
    encoder: ResponseEncoder
    request_log: RequestLog
    on_first_token: Callable[[], None]
    _progressed_at: float = field(default_factory=time.monotonic, init=False)  # the last event of progress
    _is_progress_sent: bool = field(default=False, init=False)

    async def run(self) -> None:
        """Raises ClientError or UpstreamError if no content was sent, ConnectionResetError if the client has left."""
        assert self.sink.call is not None
        await (self._run_stream() if self.sink.call.stream else self._run_json())

    async def _run_stream(self) -> None:
        try:
            is_complete = False
            async for event in self.generation.events():
                if out := self._encode_event(event):
                    self.sink.has_content = self.sink.has_content or not event.comment
                    await self.sink.write(out)
                is_complete = is_complete or event.data == b"[DONE]"
            if not is_complete:
                raise bad_gateway(TRUNCATED_MESSAGE)
        except (ClientError, UpstreamError) as error:
            if not self.sink.has_content:
                raise
            self.request_log.record_failure(error)
            await self.sink.fail(translate_upstream_error(error))
        else:
            await self.sink.end()

    async def _run_json(self) -> None:
        is_complete = False
        async for event in self.generation.events():
            if event.data == b"[DONE]":
                is_complete = True
            elif event.data:
                self._encode_chunk(event.data)
        if not is_complete:
            raise bad_gateway(TRUNCATED_MESSAGE)
        await self.sink.send_json(self.encoder.encode_json())

    def _encode_event(self, event: SseEvent) -> bytes:
        """Bytes for the client; b"" for none.  Raises ClientError for the backend's error event."""
        if event.comment == STARTED:
            reuse = self.request_log.plan.reuse if self.request_log.plan else 0
            return self._encode_progress(reuse)
        if event.comment:
            tokens = parse_prefill(event.comment)
            return b"" if tokens is None else event.raw + self._encode_progress(tokens)
        if event.data == b"[DONE]":
            return self.encoder.encode_done()
        return self._encode_chunk(event.data) if event.data else event.raw

    def _encode_progress(self, processed: int) -> bytes:
        assert self.sink.call is not None
        interval_s = self.sink.call.progress_interval_s
        if interval_s is None or (now := time.monotonic()) - self._progressed_at < interval_s:
            return b""
        self._progressed_at, self._is_progress_sent = now, True
        return self.encoder.encode_progress(measure_progress(self.request_log, processed))

    def _encode_last_progress(self) -> bytes:
        """The end of the prefill, once, where its progress was sent: the first token has come."""
        if not self._is_progress_sent:
            return b""
        self._is_progress_sent = False
        return self.encoder.encode_progress(measure_progress(self.request_log, self.request_log.prompt_tokens))

    def _encode_chunk(self, data: bytes) -> bytes:
        chunk: Chunk = _decode_json(data, Chunk)
        if "error" in chunk:
            raise _parse_stream_error(data)
        if not self.request_log.ttft_s and _has_content(data):
            self.on_first_token()
        return self._encode_last_progress() + self.encoder.encode_chunk(chunk, data)


def _has_content(data: bytes) -> bool:
    """True if a chunk carries text, or ends an empty one."""
    for choice in _decode_json(data, dict[str, Any]).get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or choice.get("finish_reason") or any(delta[key] for key in delta if key != "role"):
            return True
    return False


def _decode_json(data: bytes, kind: Any) -> Any:
    try:
        return decode(data, kind)
    except msgspec.DecodeError as error:
        raise bad_gateway(f"The backend sent an unreadable chunk: {error}") from error


def _parse_stream_error(payload: bytes) -> ClientError | UpstreamError:
    """The backend's error with its HTTP status, or an UpstreamError that is dispatched again."""
    error = _decode_json(payload, dict[str, Any])["error"]
    kind, code = (error.get("type"), error.get("code")) if isinstance(error, dict) else ("", "")
    if code in ("discarded", "cancelled"):  # cancelled by others than the proxy: the backend is stopping
        return StepFailedError(str(error.get("message")) if code == "discarded" else "the backend was stopped")
    if code == "leaderless":
        return LeaderLostError(str(error.get("message")))
    return ClientError(400 if kind == "invalid_request_error" else 500, payload)
