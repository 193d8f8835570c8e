"""One response of several choices: each is computed as a request of its own and written into the same response.

The first choice of a prompt is dispatched first; the others follow once the backend has started it, and share its
prefill.  Concurrency is limited; no choice that holds a ticket waits for another, so there is no deadlock.  A choice
that fails ends all.  Event loop thread.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import msgspec

from warmline_proxy.api.base import ApiCall, Chunk, PromptProgress, ResponseEncoder, ResponseStart
from warmline_proxy.errors import ClientError, request_cancelled
from warmline_proxy.response.choices import ChoiceMerger, ChoiceRequest
from warmline_proxy.response.relay import ResponseWriter

CONCURRENT_BRANCHES_MAX = 16  # of one request


class Branch:
    """ResponseSink and ResponseEncoder of one choice: chunks go into the whole response, its end to the Fanout."""

    def __init__(self, fanout: "Fanout", index: int, choice: ChoiceRequest, call: ApiCall) -> None:
        self.call: ApiCall | None = replace(call, fields=choice.fields, session_hint="", retry_count=0)
        self._request_id = ""  # with which its chunks' ids end
        self._pending_chunks: list[Chunk] = []  # of a JSON response
        self.has_content = self.is_closed = False
        self.last_write_at = math.inf  # heartbeats are sent by the whole response
        self.index, self.choice = index, choice
        self.started_event = asyncio.Event()  # the backend has started it, once
        self.cancel: Callable[[ClientError], None] | None = None  # cancels its request, once there is one
        self._fanout = fanout

    @property
    def has_started(self) -> bool:
        return self._fanout.response.has_started

    def open_encoder(self, response_start: ResponseStart) -> ResponseEncoder:
        self.started_event.set()
        self._request_id = response_start.request_id
        self._pending_chunks.clear()  # of an earlier dispatch
        self._fanout.open_encoder(response_start)
        return self

    def encode_chunk(self, chunk: Chunk, raw: bytes) -> bytes:
        merged_chunk = self._fanout.merger.merge_chunk(self.index, self._request_id, chunk)
        if merged_chunk is None:
            return b""
        assert self.call is not None
        if self.call.stream:
            return self._fanout.encode(merged_chunk)
        self._pending_chunks.append(merged_chunk)
        return b""

    def encode_progress(self, progress: PromptProgress, loading: str = "", index: int = 0) -> bytes:
        """Progress of a prompt, once for all of its choices."""
        assert self._fanout.response.encoder is not None
        is_first = self.choice.sample_index == 0
        return self._fanout.response.encoder.encode_progress(progress, loading, self.index) if is_first else b""

    def encode_done(self) -> bytes:
        """Nothing: the whole response has an end of its own."""
        return b""

    encode_json = encode_done

    def encode_stream_error(self, error: ClientError) -> bytes:
        return b""

    async def write(self, data: bytes) -> None:
        await self._fanout.response.write(data)

    async def send_heartbeat(self, comment: bytes, progress: PromptProgress, loading: str) -> None:
        """Do nothing: the whole response sends heartbeats."""

    async def end(self, data: bytes = b"") -> None:
        if data:
            await self.write(data)
        self.is_closed = True

    async def send_json(self, body: bytes) -> None:
        """Encode the chunks of this choice, which is complete."""
        for chunk in self._pending_chunks:
            self._fanout.encode(chunk)
        self._pending_chunks.clear()
        self.is_closed = True

    async def fail(self, error: ClientError) -> None:
        raise error

    def close(self) -> None:
        self.is_closed = True


class Fanout:
    """The choices of one request, and their common response."""

    def __init__(
        self, response: ResponseWriter, choices: Sequence[ChoiceRequest], request_id: str, concurrency: int
    ) -> None:
        """`concurrency`: choices computed at once, CONCURRENT_BRANCHES_MAX at most."""
        assert response.call is not None
        self.response, self.merger = response, ChoiceMerger(request_id, choices)
        self.branches = [Branch(self, index, choice, response.call) for index, choice in enumerate(choices)]
        self._call, self._request_id = response.call, request_id
        self._slots = asyncio.Semaphore(min(concurrency, CONCURRENT_BRANCHES_MAX))

    async def run(
        self, compute: Callable[[Branch], Awaitable[None]], get_cancel_reason: Callable[[], ClientError | None]
    ) -> None:
        """Compute all branches, then end the response.  `get_cancel_reason`: of the whole request.

        Raises the first branch's failure, once all have ended; ClientError and UpstreamError are not written yet.
        """
        tasks = [
            asyncio.create_task(self._run_branch(branch, compute), name=f"choice {branch.index}")
            for branch in self.branches
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failure = next((error for task in tasks if task.done() and (error := task.exception())), None)
            sibling_failed = request_cancelled("Another choice has failed.", cancel_source="choice")
            reason = None if isinstance(failure, ConnectionResetError) else sibling_failed
        except asyncio.CancelledError:
            reason = get_cancel_reason()
            raise
        finally:
            await self._cancel_branches(tasks, reason)
        if failure:
            raise failure
        await self._end()

    async def _run_branch(self, branch: Branch, compute: Callable[[Branch], Awaitable[None]]) -> None:
        if branch.choice.sample_index:
            await self.branches[branch.index - branch.choice.sample_index].started_event.wait()
        async with self._slots:
            await compute(branch)

    async def _cancel_branches(self, tasks: Sequence["asyncio.Task[None]"], reason: ClientError | None) -> None:
        """End the branches that still run; `reason`: None where the client has left."""
        for task, branch in zip(tasks, self.branches, strict=True):
            if branch.cancel and reason:
                branch.cancel(reason)
            else:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- the common response

    def open_encoder(self, response_start: ResponseStart) -> None:
        """Open the common encoder at the first branch's start."""
        if self.response.encoder is None:
            self.response.open_encoder(replace(response_start, request_id=self._request_id))

    async def _end(self) -> None:
        last, encoder = self.encode(self.merger.build_usage_chunk()), self.response.encoder
        assert encoder is not None
        if self._call.stream:
            await self.response.end(last + encoder.encode_done())
        else:
            await self.response.send_json(encoder.encode_json())

    def encode(self, chunk: Chunk) -> bytes:
        """Encode a merged chunk."""
        assert self.response.encoder is not None
        return self.response.encoder.encode_chunk(chunk, msgspec.json.encode(chunk))
