"""One generation at the backend.  Its pump outlives the client, so what the backend holds in the end is always learnt.

A slow client never holds the engine: events wait here, and the alarm ends a request whose client lets too many wait.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from warmline_common.protocol.messages import SETTLED_EVENT, Settled, decode
from warmline_common.protocol.sse import Event, EventParser
from warmline_proxy.tasks import Background
from warmline_proxy.upstream.client import ByteStream, UpstreamError

log = logging.getLogger(__name__)

STARTED = b"started"  # comments of the backend's stream
PREFILL = b"prefill "


class Listener(Protocol):
    """What a generation tells, on the loop, as it reads, whether or not anybody reads its events."""

    def started(self) -> None:
        """The engine works on it from now on."""

    def prefilled(self, tokens: int) -> None:
        """So many of the prompt's tokens have rows."""

    def progressed(self) -> None:
        """Something came."""

    def spoke(self, chunk: bytes) -> None:
        """A piece of the answer, as JSON."""

    def settled(self, settled: Settled) -> None:
        """It has ended; this is what the backend holds of it."""

    def over(self, whole: bool) -> None:
        """The stream has ended, or broken off.  Last."""


class Generation:
    """Reads a stream to its end.  `events` is for one consumer."""

    def __init__(self, stream: ByteStream, request_id: str, background: Background, listener: Listener) -> None:
        self.request_id = request_id
        self.is_over = False
        self.backlog_bytes = 0  # read, but not yet taken by the consumer
        self._stream = stream
        self._listener = listener
        self._failure: UpstreamError | None = None
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._pump = background.spawn(self._read(), f"generation {request_id}")

    async def events(self) -> AsyncIterator[Event]:
        """Everything but the closing Warmline event; `[DONE]` comes once that one has been read, so whoever saw the
        end finds its request settling and its resident known.  Raises Broken where the stream breaks off.
        """
        while (event := await self._events.get()) is not None:
            self.backlog_bytes -= len(event.raw)
            yield event
        if self._failure:
            raise self._failure

    async def end(self, timeout_s: float | None = None) -> None:
        """Wait for the stream's end; after `timeout_s`, stop reading."""
        await asyncio.wait({self._pump}, timeout=timeout_s)
        self._pump.cancel()
        await asyncio.wait({self._pump})

    async def _read(self) -> None:
        parser, done = EventParser(), None
        try:
            async for data in self._stream.chunks():
                self._listener.progressed()
                for event in parser.feed(data):
                    if event.name == SETTLED_EVENT.encode():
                        self._take_settled(event)
                    elif event.data == b"[DONE]":
                        done = event
                    else:
                        self._hear(event)
                        self._offer(event)
        except UpstreamError as error:
            self._failure = error
        finally:
            self.is_over = True
            if done:
                self._offer(done)
            self._events.put_nowait(None)
            self._listener.over(whole=done is not None)
            await self._stream.close()

    def _offer(self, event: Event) -> None:
        self.backlog_bytes += len(event.raw)
        self._events.put_nowait(event)

    def _hear(self, event: Event) -> None:
        if event.comment == STARTED:
            self._listener.started()
        elif event.comment.startswith(PREFILL):
            done = event.comment.removeprefix(PREFILL).partition(b"/")[0]
            if done.isdigit():
                self._listener.prefilled(int(done))
        elif event.data:
            self._listener.spoke(event.data)

    def _take_settled(self, event: Event) -> None:
        try:
            self._listener.settled(decode(event.data, Settled))
        except msgspec.DecodeError as error:
            log.error("request %s ended with an unreadable event: %s", self.request_id, error)
