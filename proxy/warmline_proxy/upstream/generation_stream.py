"""One generation's stream of events.  A task of its own reads it to the end, whether or not the client stays.

A slow client never delays the engine: events are queued here, and DeadlineMonitor ends a request whose queue is long.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from warmline_common.protocol.messages import RESULT_EVENT, GenerationResult, decode
from warmline_common.protocol.sse import SseEvent, SseParser
from warmline_proxy.tasks import BackgroundTasks
from warmline_proxy.upstream.client import ByteStream, UpstreamError

log = logging.getLogger(__name__)

STARTED = b"started"  # comments of the backend's stream
PREFILL = b"prefill "


def parse_prefill(comment: bytes) -> int | None:
    """Prompt tokens that have KV rows, as a comment says; None for other comments."""
    done = comment.removeprefix(PREFILL).partition(b"/")[0] if comment.startswith(PREFILL) else b""
    return int(done) if done.isdigit() else None


class GenerationListener(Protocol):
    """Callbacks of a generation, on the event loop as its stream is read.

    `on_started`: the engine works on the request.  `on_prefilled`: this many prompt tokens have KV rows.
    `on_progress`: bytes came.  `on_content`: a piece of the answer, as JSON.  `on_result`: the result, with the
    resident that the backend holds.  `on_end`: the stream has ended, whole or broken; the last call.
    """

    def on_started(self) -> None: ...
    def on_prefilled(self, tokens: int) -> None: ...
    def on_progress(self) -> None: ...
    def on_content(self, chunk: bytes) -> None: ...
    def on_result(self, result: GenerationResult) -> None: ...
    def on_end(self, is_complete: bool) -> None: ...


class GenerationStream:
    """Reader of one generation's stream to its end; `events` is for one consumer.  Event loop thread."""

    def __init__(
        self, stream: ByteStream, request_id: str, background: BackgroundTasks, listener: GenerationListener
    ) -> None:
        self.request_id = request_id
        self.is_over = False
        self.backlog_bytes = 0  # read from the backend, not yet taken by the consumer
        self._stream, self._listener = stream, listener
        self._error: UpstreamError | None = None
        self._events: asyncio.Queue[SseEvent | None] = asyncio.Queue()
        self._reader_task = background.spawn(self._read(), f"generation {request_id}")

    async def events(self) -> AsyncIterator[SseEvent]:
        """Yield all but the result event, which precedes `[DONE]` for the listener.  Raises UpstreamConnectionError."""
        while (event := await self._events.get()) is not None:
            self.backlog_bytes -= len(event.raw)
            yield event
        if self._error:
            raise self._error

    async def wait_ended(self, timeout_s: float | None = None) -> None:
        """Wait for the stream's end; after `timeout_s`, stop reading."""
        await asyncio.wait({self._reader_task}, timeout=timeout_s)
        self._reader_task.cancel()
        await asyncio.wait({self._reader_task})

    async def _read(self) -> None:
        parser, done = SseParser(), None
        try:
            async for data in self._stream.chunks():
                self._listener.on_progress()
                for event in parser.feed(data):
                    if event.name == RESULT_EVENT.encode():
                        self._handle_result(event)
                    elif event.data == b"[DONE]":
                        done = event
                    else:
                        self._notify_listener(event)
                        self._enqueue_event(event)
        except UpstreamError as error:
            self._error = error
        finally:
            self.is_over = True
            if done:
                self._enqueue_event(done)
            self._events.put_nowait(None)
            self._listener.on_end(is_complete=done is not None)
            await self._stream.close()

    def _enqueue_event(self, event: SseEvent) -> None:
        self.backlog_bytes += len(event.raw)
        self._events.put_nowait(event)

    def _notify_listener(self, event: SseEvent) -> None:
        if event.comment == STARTED:
            self._listener.on_started()
        elif (tokens := parse_prefill(event.comment)) is not None:
            self._listener.on_prefilled(tokens)
        elif event.data:
            self._listener.on_content(event.data)

    def _handle_result(self, event: SseEvent) -> None:
        try:
            self._listener.on_result(decode(event.data, GenerationResult))
        except msgspec.DecodeError as error:
            log.error("request %s ended with an unreadable event: %s", self.request_id, error)
