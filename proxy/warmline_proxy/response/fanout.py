"""One answer made of several: each choice is computed as a request of its own, and speaks through the same answer.

The first choice of a prompt leads; the others begin once the backend has begun with it, and so can share its prefill.
Only a few are under way at once, each in a place of its own.  None that holds a place waits for another, so all come to
their end.  One that fails ends all.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import msgspec

from warmline_proxy.api.base import Begun, Call, Chunk, Encoder
from warmline_proxy.errors import ClientError, cancelled
from warmline_proxy.response.choices import Choice, Merger
from warmline_proxy.response.relay import Answer

TOGETHER_MAX = 16  # choices of one request under way at once


class Part:
    """A relay.Sink for one choice: its chunks go into the whole answer, its end and its failure to the chorus."""

    def __init__(self, chorus: "Chorus", index: int, choice: Choice, call: Call) -> None:
        self.call: Call | None = replace(call, fields=choice.fields, session_hint="", retry_count=0)
        self.encoder: Encoder | None = None
        self.spoken = self.ended = False
        self.said_at = math.inf  # the whole answer keeps their client patient
        self.index, self.choice = index, choice
        self.computing = asyncio.Event()  # the backend has begun with it, once
        self.ring: Callable[[ClientError], None] | None = None  # ends it, once it is under way
        self._chorus = chorus

    @property
    def begun(self) -> bool:
        return self._chorus.answer.begun

    def opens(self, begun: Begun) -> Encoder:
        self.computing.set()
        self.encoder = self._chorus.voice(self.index, begun)
        return self.encoder

    async def write(self, data: bytes) -> None:
        await self._chorus.answer.write(data)

    async def beat(self) -> None:
        """The whole answer does that."""

    async def end(self, data: bytes = b"") -> None:
        if data:
            await self.write(data)
        self.ended = True

    async def whole(self, body: bytes) -> None:
        self._chorus.fold(self.index)
        self.ended = True

    async def fail(self, error: ClientError) -> None:
        raise error

    def close(self) -> None:
        self.ended = True


class Chorus:
    """Belongs to one request; owned by the event loop."""

    def __init__(self, answer: Answer, call: Call, choices: Sequence[Choice], request_id: str, together: int) -> None:
        """`together`: how many choices may be under way at once."""
        self.answer = answer
        self.parts = [Part(self, index, choice, call) for index, choice in enumerate(choices)]
        self._call, self._request_id = call, request_id
        self._merger = Merger(request_id, choices)
        self._unfolded: list[list[Chunk]] = [[] for _ in choices]  # of a JSON answer: of each choice's present try
        self._places = asyncio.Semaphore(min(together, TOGETHER_MAX))

    async def sing(
        self, compute: Callable[[Part], Awaitable[None]], why_ended: Callable[[], ClientError | None]
    ) -> None:
        """Have all parts computed, and end the answer.  `why_ended`: whether somebody has ended it from outside.

        Raises what the first part raised that failed, once all have ended; ClientError or UpstreamError is for the
        answer to tell.
        """
        tasks = [asyncio.create_task(self._sing(part, compute), name=f"choice {part.index}") for part in self.parts]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failed = next((error for task in tasks if task.done() and (error := task.exception())), None)
            told = cancelled("Another choice has failed.", by="choice")
            reason = None if isinstance(failed, ConnectionResetError) else told
        except asyncio.CancelledError:
            reason = why_ended()
            raise
        finally:
            await self._hush(tasks, reason)
        if failed:
            raise failed
        await self._end()

    async def _sing(self, part: Part, compute: Callable[[Part], Awaitable[None]]) -> None:
        if part.choice.number:
            await self.parts[part.index - part.choice.number].computing.wait()
        async with self._places:
            await compute(part)

    async def _hush(self, tasks: Sequence["asyncio.Task[None]"], reason: ClientError | None) -> None:
        """End what still runs: for a reason, or because the client has left."""
        for task, part in zip(tasks, self.parts, strict=True):
            if part.ring and reason:
                part.ring(reason)
            else:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- the one answer

    def voice(self, index: int, begun: Begun) -> Encoder:
        """One part's; what it said in an earlier try is forgotten."""
        if self.answer.encoder is None:
            self.answer.opens(replace(begun, request_id=self._request_id))
        self._unfolded[index].clear()
        return _Voice(self, index, begun.request_id)

    def say(self, index: int, part_id: str, chunk: Chunk) -> bytes:
        merged = self._merger.chunk(index, part_id, chunk)
        if merged is None:
            return b""
        if not self._call.stream:
            self._unfolded[index].append(merged)
            return b""
        return self._encoded(merged)

    def fold(self, index: int) -> None:
        """Of a JSON answer: this choice is complete, and not tried again."""
        for chunk in self._unfolded[index]:
            self._encoded(chunk)
        self._unfolded[index].clear()

    async def _end(self) -> None:
        last, encoder = self._encoded(self._merger.usage()), self.answer.encoder
        assert encoder is not None
        if self._call.stream:
            await self.answer.end(last + encoder.done())
        else:
            await self.answer.whole(encoder.whole())

    def _encoded(self, chunk: Chunk) -> bytes:
        assert self.answer.encoder is not None
        return self.answer.encoder.chunk(chunk, msgspec.json.encode(chunk))


class _Voice:
    """An apis.Encoder that gives a part's chunks to the chorus; the end is the chorus's to say."""

    def __init__(self, chorus: Chorus, index: int, part_id: str) -> None:
        self._chorus, self._index, self._part_id = chorus, index, part_id

    def chunk(self, chunk: Chunk, raw: bytes) -> bytes:
        return self._chorus.say(self._index, self._part_id, chunk)

    def done(self) -> bytes:
        return b""

    def whole(self) -> bytes:
        return b""

    def failure(self, error: ClientError) -> bytes:
        return b""
