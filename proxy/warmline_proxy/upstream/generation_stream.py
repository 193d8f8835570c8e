"""One generation at the backend.  Its pump outlives the client, so what the backend holds in the end is always learnt.

A slow client never holds the engine: events wait here, and the alarm ends a request whose client lets too many wait.
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


class GenerationListener(Protocol):
    """What a generation tells, on the loop, as it reads, whether or not anybody reads its events."""

    def on_started(self) -> None:
        """The engine works on it from now on."""

    def on_prefilled(self, tokens: int) -> None:
        """So many of the prompt's tokens have rows."""

    def on_progress(self) -> None:
        """Something came."""

    def on_content(self, chunk: bytes) -> None:
        """A piece of the answer, as JSON."""

    def on_settled(self, settled: GenerationResult) -> None:
        """It has ended; this is what the backend holds of it."""

    def on_over(self, whole: bool) -> None:
        """The stream has ended, or broken off.  Last."""


class GenerationStream:
    """Reads a stream to its end.  `events` is for one consumer."""

    def __init__(
        self, stream: ByteStream, request_id: str, background: BackgroundTasks, listener: GenerationListener
    ) -> None:
        self.request_id = request_id
        self.is_over = False
        self.backlog_bytes = 0  # read, but not yet taken by the consumer
        self._stream = stream
        self._listener = listener
        self._error: UpstreamError | None = None
        self._events: asyncio.Queue[SseEvent | None] = asyncio.Queue()
        self._reader_task = background.spawn(self._read(), f"generation {request_id}")

    async def events(self) -> AsyncIterator[SseEvent]:
        """Everything but the closing Warmline event; `[DONE]` comes once that one has been read, so whoever saw the
        end finds its request settling and its resident known.  Raises Broken where the stream breaks off.
        """
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
                        self._handle_comment(event)
                        self._enqueue_event(event)
        except UpstreamError as error:
            self._error = error
        finally:
            self.is_over = True
            if done:
                self._enqueue_event(done)
            self._events.put_nowait(None)
            self._listener.on_over(whole=done is not None)
            await self._stream.close()

    def _enqueue_event(self, event: SseEvent) -> None:
        self.backlog_bytes += len(event.raw)
        self._events.put_nowait(event)

    def _handle_comment(self, event: SseEvent) -> None:
        if event.comment == STARTED:
            self._listener.on_started()
        elif event.comment.startswith(PREFILL):
            done = event.comment.removeprefix(PREFILL).partition(b"/")[0]
            if done.isdigit():
                self._listener.on_prefilled(int(done))
        elif event.data:
            self._listener.on_content(event.data)

    def _handle_result(self, event: SseEvent) -> None:
        try:
            self._listener.on_settled(decode(event.data, GenerationResult))
        except msgspec.DecodeError as error:
            log.error("request %s ended with an unreadable event: %s", self.request_id, error)
