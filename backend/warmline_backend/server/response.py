"""One generation's events as the bytes of its answer: a stream of server-sent events, or one JSON folded from it."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator

import msgspec

from warmline_backend.generation.sequence import Ended, Event, Piece, Progress, Started
from warmline_backend.output.events import Called, Part, Said, Thought
from warmline_backend.server.chunks import ChunkWriter, TokenLogprob, TokenNames
from warmline_backend.server.prompt_store import StoredPrompt
from warmline_common.protocol.messages import SETTLED_EVENT, SampledTurn, encode
from warmline_common.protocol.sse import DONE, ChunkFold, EventParser, comment_event, data_event
from warmline_common.protocol.tokens import pack_tokens

ANSWERED = ("stop", "length")  # every other finish is an error to whoever asked
SILENT_TOKENS_MAX = 16  # a call is told once it is whole; until then, so often, that the engine moves


class Answer:
    """`finish` and `error` say how it ended once it has."""

    def __init__(self, prompt: StoredPrompt, request_id: str, model: str, names: TokenNames, with_usage: bool) -> None:
        self._prompt, self._names, self._with_usage = prompt, names, with_usage
        self._writer = ChunkWriter(prompt.endpoint, request_id, model, int(time.time()))
        self._pending: list[TokenLogprob] = []  # of tokens whose text is held back
        self._begun = False
        self._silent = 0  # tokens since the last that was told of
        self._sampled: list[int] = []
        self._reasoned = 0  # tokens
        self._stop_word = ""
        self._calls: dict[str, Called] = {}  # by id, as told
        self._spoke = bool(prompt.echo)  # there is content
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
        return self._writer.role() + (self._writer.text(self._prompt.echo) if self._prompt.echo else b"")

    def _piece(self, piece: Piece) -> bytes:
        self._sampled.append(piece.token)
        self._reasoned += piece.reasons
        self._stop_word = piece.stop_word
        if piece.logprobs is not None:
            detail = piece.logprobs
            self._pending.append(self._names.logprob(detail.token, detail.logprob, detail.top))
        if not piece.parts:
            self._silent += 1
            return b"" if self._silent % SILENT_TOKENS_MAX else comment_event("held")
        self._silent = 0
        return b"".join([self._part(part) for part in piece.parts])

    def _part(self, part: Part) -> bytes:
        logprobs, self._pending = self._pending, []
        if isinstance(part, Said):
            self._spoke = True
            return self._writer.text(part.text, logprobs)
        if isinstance(part, Thought):
            return self._writer.reasoning(part.text, logprobs)
        index, call_id = len(self._calls), f"call_{secrets.token_hex(12)}"
        self._calls[call_id] = part
        return self._writer.call(index, call_id, part.name, part.arguments, logprobs)

    def _turn(self) -> SampledTurn | None:
        """What is to stand in later prompts where the client sends these calls back."""
        if not self._calls:
            return None
        last = list(self._calls.values())[-1]
        if last.start < 0:
            return None
        return SampledTurn(calls=list(self._calls), tokens=pack_tokens(self._sampled[last.start : last.end]))

    def _end(self, ended: Ended, closing_event: bool) -> bytes:
        settled = msgspec.structs.replace(ended.settled, turn=self._turn())
        self.finish = settled.finish
        closing = data_event(encode(settled), SETTLED_EVENT) if closing_event else b""
        if settled.finish not in ANSWERED:
            self.error = settled.error or f"the request was {settled.finish}"
            return self._writer.error(self.error, code=settled.finish) + closing
        parts = [self._begin()]
        if self._pending:
            parts.append(self._writer.rest(self._pending))
        reason = "tool_calls" if self._calls and settled.finish == "stop" else settled.finish
        parts.append(self._writer.finish(reason, self._stop_word, empty=not (self._spoke or self._calls)))
        if self._with_usage:
            decoded = settled.timings.decoded
            parts.append(self._writer.usage(len(self._prompt.tokens), decoded, ended.reused, self._reasoned))
        return b"".join(parts) + DONE + closing
