"""From the backend's events to the client's answer: streamed event by event, or one JSON, in the words of its API.

An error before the first byte is a proper HTTP status.  After content, or after a sign of life, it is an `error` event
without `[DONE]`, or an aborted connection; never a clean end.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec
from aiohttp import web

from warmline_common.protocol.messages import decode
from warmline_common.protocol.sse import Event, comment_event
from warmline_proxy.api.base import Api, Begun, Call, Chunk, Encoder
from warmline_proxy.errors import ClientError, bad_gateway, from_upstream
from warmline_proxy.http.bodies import send
from warmline_proxy.request_log import Trace
from warmline_proxy.upstream.client import Discarded, Leaderless, UpstreamError
from warmline_proxy.upstream.generation_stream import PREFILL, Generation

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
JSON_HEADERS = {"Content-Type": "application/json; charset=utf-8"}
CUT_OFF = "The backend ended its answer early."
LAST_WORD_TIMEOUT_S = 5.0  # for an error to a client that may not be reading


class Sink(Protocol):
    """Where one generation's answer goes: to its client, or into an answer of several choices (`chorus`)."""

    call: Call | None
    spoken: bool  # content was given to it
    ended: bool
    said_at: float

    @property
    def begun(self) -> bool: ...

    def opens(self, begun: Begun) -> Encoder:
        """Content may come: what is to encode it.  Again at each try, none of which has spoken."""

    async def write(self, data: bytes) -> None: ...

    async def beat(self) -> None: ...

    async def end(self, data: bytes = b"") -> None: ...

    async def whole(self, body: bytes) -> None: ...

    async def fail(self, error: ClientError) -> None: ...

    def close(self) -> None: ...


class Answer:
    """The client's side of one request: nothing sent, signs of life sent (`begun`), or content sent (`spoken`).

    `response` is what the handler is to return, once it has ended or failed.
    """

    def __init__(
        self,
        request: web.Request,
        api: Api,
        headers: Callable[[], Mapping[str, str]],
        send_timeout_s: float,
        refused: Callable[[ClientError], object],
    ) -> None:
        """`refused` hears of the error that the client is told."""
        self._api, self._refused = api, refused
        self.call: Call | None = None  # before that is known, nothing is sent
        self.encoder: Encoder | None = None  # once content may come
        self.spoken = False
        self.ended = False  # nothing more may be written
        self.said_at = time.monotonic()  # when the client last got a byte, or came
        self._request, self._headers, self._send_timeout_s = request, headers, send_timeout_s
        self._begun: web.StreamResponse | None = None
        self.response: web.StreamResponse | None = None
        self._sending = asyncio.Lock()
        self._beats_over = False

    @property
    def begun(self) -> bool:
        return self._begun is not None

    def opens(self, begun: Begun) -> Encoder:
        assert self.call is not None
        self.encoder = self.call.api.encoder(self.call, begun)
        return self.encoder

    async def write(self, data: bytes) -> None:
        """Raises ConnectionResetError where the client has left, or takes nothing for `send_timeout_s`."""
        async with self._sending:
            self.said_at = time.monotonic()
            if self._begun is None:
                assert self.call is not None
                kind = STREAM_HEADERS if self.call.stream else JSON_HEADERS
                response = web.StreamResponse(headers={**kind, **self._headers()})
                await response.prepare(self._request)
                self._begun = response
            await send(self._begun, data, self._send_timeout_s)

    async def beat(self) -> None:
        """A sign of life that means nothing: clients that wait for bytes wait on."""
        if self.call is None or self._beats_over or self._sending.locked():
            return
        with suppress(ConnectionResetError):  # the request's own task hears of it too
            await self.write(comment_event("working") if self.call.stream else b" ")

    async def end(self, data: bytes = b"") -> None:
        """The rest, and the end of it.  Raises ConnectionResetError."""
        await self._no_more_beats()
        if data:
            await self.write(data)
        assert self._begun is not None
        self.ended, self.response = True, self._begun
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._begun.write_eof()
        except TimeoutError:
            raise ConnectionResetError("the client did not take the end of its answer") from None

    async def whole(self, body: bytes) -> None:
        """A JSON answer, all at once where nothing was sent yet."""
        await self._no_more_beats()
        if self.begun:
            return await self.end(body)
        self.ended = True
        self.response = web.Response(body=body, content_type="application/json", headers=dict(self._headers()))

    async def fail(self, error: ClientError) -> None:
        """Raises ConnectionResetError once the connection is aborted: half an answer must not look whole."""
        self._refused(error)
        await self._no_more_beats()
        if not self.begun and not self.ended:
            self.response = error.response(self._api.refusal(error), dict(self._headers()))
            return
        if self.call and self.call.stream and not self.ended:
            self._send_timeout_s = min(self._send_timeout_s, LAST_WORD_TIMEOUT_S)
            await self.end((self.encoder or self._api).failure(error))
            return
        if self._request.transport:
            self._request.transport.abort()
        raise ConnectionResetError(f"aborted: {error}")

    def close(self) -> None:
        """Whatever happens from now on, the client hears nothing of it."""
        self._beats_over = self.ended = True

    async def _no_more_beats(self) -> None:
        async with self._sending:  # one may be on its way
            self._beats_over = True


async def relay(answer: Sink, generation: Generation, begun: Begun, trace: Trace) -> None:
    """Raises ClientError or UpstreamError where no content was sent; ConnectionResetError where the client has left."""
    assert answer.call is not None
    encoder = answer.opens(begun)
    if answer.call.stream:
        await _relay_stream(answer, generation, encoder, trace)
    else:
        await _relay_json(answer, generation, encoder, trace)


async def _relay_stream(answer: Sink, generation: Generation, encoder: Encoder, trace: Trace) -> None:
    try:
        whole = False
        async for event in generation.events():
            if out := _client_event(event, encoder, trace):
                answer.spoken = answer.spoken or not event.comment
                await answer.write(out)
            whole = whole or event.data == b"[DONE]"
        if not whole:
            raise bad_gateway(CUT_OFF)
    except (ClientError, UpstreamError) as error:
        if not answer.spoken:
            raise
        trace.failed(error)
        await answer.fail(from_upstream(error))
    else:
        await answer.end()


async def _relay_json(answer: Sink, generation: Generation, encoder: Encoder, trace: Trace) -> None:
    whole = False
    async for event in generation.events():
        if event.data == b"[DONE]":
            whole = True
        elif event.data:
            encoder.chunk(_checked_chunk(event, trace), event.data)
    if not whole:
        raise bad_gateway(CUT_OFF)
    await answer.whole(encoder.whole())


def _client_event(event: Event, encoder: Encoder, trace: Trace) -> bytes:
    """What of an event the client gets: b"" for nothing.  Raises ClientError for the backend's error event."""
    if event.comment:
        return event.raw if event.comment.startswith(PREFILL) else b""
    if event.data == b"[DONE]":
        return encoder.done()
    if not event.data:
        return event.raw
    return encoder.chunk(_checked_chunk(event, trace), event.data)


def _checked_chunk(event: Event, trace: Trace) -> Chunk:
    chunk: Chunk = _parse(event.data, Chunk)
    if "error" in chunk:
        raise _stream_error(event.data)
    if not trace.ttft_s and _has_content(event.data):
        trace.saw_content()
    return chunk


def _has_content(data: bytes) -> bool:
    """Whether a chunk carries text, or ends a text that was empty."""
    for choice in _parse(data, dict[str, Any]).get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or choice.get("finish_reason") or any(delta[key] for key in delta if key != "role"):
            return True
    return False


def _parse(data: bytes, kind: Any) -> Any:
    try:
        return decode(data, kind)
    except msgspec.DecodeError as error:
        raise bad_gateway(f"The backend sent an unreadable chunk: {error}") from error


def _stream_error(payload: bytes) -> ClientError | UpstreamError:
    """The backend's own words, under the status that suits them, or what to do about them."""
    error = _parse(payload, dict[str, Any])["error"]
    kind, code = (error.get("type"), error.get("code")) if isinstance(error, dict) else ("", "")
    if code in ("discarded", "cancelled"):  # whoever is told of a cancel did not ask for it: the backend is stopping
        return Discarded(str(error.get("message")) if code == "discarded" else "the backend was stopped")
    if code == "leaderless":
        return Leaderless(str(error.get("message")))
    return ClientError(400 if kind == "invalid_request_error" else 500, payload)
