"""One generation at the backend.  Its pump outlives the client, so what the backend holds in the end is always learnt.

A slow client never holds the engine: events wait here, at most one answer's worth (the request's own token limit).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import msgspec

from warmline_proxy.background import Background
from warmline_proxy.upstream import ByteStream, UpstreamError
from warmline_wire.messages import SETTLED_EVENT, Settled, decode
from warmline_wire.stream import Event, EventParser

log = logging.getLogger(__name__)


class Generation:
    """Reads a stream to its end.  `events` is for one consumer; `on_settled` is called on the loop, before the end."""

    def __init__(
        self, stream: ByteStream, request_id: str, background: Background, on_settled: Callable[[Settled], None]
    ) -> None:
        self.request_id = request_id
        self.is_over = False  # the stream has ended, well or badly
        self._stream = stream
        self._on_settled = on_settled
        self._failure: UpstreamError | None = None
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._pump = background.spawn(self._read(), f"generation {request_id}")

    async def events(self) -> AsyncIterator[Event]:
        """Everything but the closing Warmline event; `[DONE]` comes once that one has been read, so whoever saw the
        end finds its request settling and its resident known.  Raises Broken where the stream breaks off.
        """
        while (event := await self._events.get()) is not None:
            yield event
        if self._failure:
            raise self._failure

    async def end(self, timeout_s: float) -> None:
        """Wait for the stream's end; after `timeout_s`, stop reading."""
        await asyncio.wait({self._pump}, timeout=timeout_s)
        self._pump.cancel()
        await asyncio.wait({self._pump})

    async def _read(self) -> None:
        parser, done = EventParser(), None
        try:
            async for data in self._stream.chunks():
                for event in parser.feed(data):
                    if event.name == SETTLED_EVENT.encode():
                        self._take_settled(event)
                    elif event.data == b"[DONE]":
                        done = event
                    else:
                        self._events.put_nowait(event)
        except UpstreamError as error:
            self._failure = error
        finally:
            self.is_over = True
            if done:
                self._events.put_nowait(done)
            self._events.put_nowait(None)
            await self._stream.close()

    def _take_settled(self, event: Event) -> None:
        try:
            self._on_settled(decode(event.data, Settled))
        except msgspec.DecodeError as error:
            log.error("request %s ended with an unreadable event: %s", self.request_id, error)
