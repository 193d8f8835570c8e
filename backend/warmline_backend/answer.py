"""One generation's events as the bytes of its answer: a stream of server-sent events, or one JSON folded from it."""

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec

from warmline_backend.chunks import ChunkWriter, TokenLogprob, TokenNames
from warmline_backend.prompt_store import StoredPrompt
from warmline_backend.sequence import Ended, Event, Piece, Progress, Started
from warmline_wire.messages import SETTLED_EVENT, encode
from warmline_wire.stream import DONE, ChunkFold, EventParser, comment_event, data_event

ANSWERED = ("stop", "length")  # every other finish is an error to whoever asked


class Answer:
    """`finish` and `error` say how it ended once it has."""

    def __init__(self, prompt: StoredPrompt, request_id: str, model: str, names: TokenNames, with_usage: bool) -> None:
        self._prompt, self._names, self._with_usage = prompt, names, with_usage
        self._writer = ChunkWriter(prompt.endpoint, request_id, model, int(time.time()))
        self._pending: list[TokenLogprob] = []  # of tokens whose text is held back
        self._begun = False
        self.finish = ""
        self.error = ""

    async def stream(self, events: "asyncio.Queue[Event]", *, closing_event: bool) -> AsyncIterator[bytes]:
        """What is there at once goes out at once, in one piece."""
        while not self.finish:
            parts = [self._say(await events.get(), closing_event)]
            while not events.empty():
                parts.append(self._say(events.get_nowait(), closing_event))
            if data := b"".join(parts):
                yield data

    async def whole(self, events: "asyncio.Queue[Event]") -> object:
        """The folded answer; of no use where there is an `error`."""
        fold, parser = ChunkFold(), EventParser()
        async for data in self.stream(events, closing_event=False):
            for event in parser.feed(data):
                if event.data and event.data != b"[DONE]":
                    fold.add(msgspec.json.decode(event.data))
        return fold.result()

    def _say(self, event: Event, closing_event: bool) -> bytes:
        if isinstance(event, Started):
            return comment_event("started")
        if isinstance(event, Progress):
            return comment_event(f"prefill {event.done}/{event.total}")
        if isinstance(event, Piece):
            return self._begin() + self._piece(event)
        return self._end(event, closing_event)

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return self._writer.role()

    def _piece(self, piece: Piece) -> bytes:
        if piece.logprobs is not None:
            detail = piece.logprobs
            self._pending.append(self._names.logprob(detail.token, detail.logprob, detail.top))
        if not piece.text:
            return b""
        logprobs, self._pending = self._pending, []
        return self._writer.text(piece.text, logprobs)

    def _end(self, ended: Ended, closing_event: bool) -> bytes:
        settled, self.finish = ended.settled, ended.settled.finish
        closing = data_event(encode(settled), SETTLED_EVENT) if closing_event else b""
        if settled.finish not in ANSWERED:
            self.error = settled.error or f"the request was {settled.finish}"
            return self._writer.error(self.error, code=settled.finish) + closing
        parts = [self._begin()]
        if self._pending:
            parts.append(self._writer.text("", self._pending))
        parts.append(self._writer.finish(settled.finish))
        if self._with_usage:
            parts.append(self._writer.usage(len(self._prompt.tokens), settled.timings.decoded, ended.reused))
        return b"".join(parts) + DONE + closing
