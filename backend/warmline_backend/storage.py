"""Restores and saves: KV from files to residents and back, while everything else goes on.  Event loop thread.

The engine thread makes and copies arrays; loader, reader and writer threads only fill and drain their bytes.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from warmline_backend.engine import Engine
from warmline_backend.kv import RowsGone
from warmline_backend.model import ServedModel
from warmline_backend.scheduler import Scheduler
from warmline_backend.segments import Cancelled, Loader, Tensor, as_bytes, write_file
from warmline_wire.home import Home
from warmline_wire.keys import TOKEN_BYTES, pack_tokens
from warmline_wire.messages import CheckpointRef, RestoreRequest, SavedFile, SaveRequest, SegmentSpec
from warmline_wire.segment_file import FileMeta

T = TypeVar("T")

READERS = 4
LOADERS = 4


class _Job:
    """A restore or save under way."""

    def __init__(self) -> None:
        self.given_up = threading.Event()  # read by other threads between two pieces of work
        self.over = asyncio.Event()
        self.room: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def give_up(self) -> None:
        self.given_up.set()
        self.room.cancel()


class Storage:
    """Owns the jobs and the threads that read and write segment files."""

    def __init__(self, home: Home, engine: Engine, served: ServedModel, fingerprint: str) -> None:
        self._home, self._engine, self._served, self._fingerprint = home, engine, served, fingerprint
        self._jobs: dict[str, _Job] = {}
        self._readers = ThreadPoolExecutor(READERS, "segment-reader")
        self._loaders = ThreadPoolExecutor(LOADERS, "restore")
        self._writer = ThreadPoolExecutor(1, "segment-writer")
        self._loader = Loader(
            served.layout, served.row_names, fingerprint, home.segment_file, self._readers, self._on_engine
        )

    def close(self) -> None:
        """Give up what is under way; its threads end with what they are at."""
        for job in self._jobs.values():
            job.give_up()
        for pool in (self._loaders, self._readers, self._writer):
            pool.shutdown(wait=False, cancel_futures=True)

    async def give_up(self, request_id: str) -> bool:
        """End a restore or save, and answer when nothing of it goes on; False where none has that name."""
        if (job := self._jobs.get(request_id)) is None:
            return False
        job.give_up()
        await job.over.wait()
        return True

    # ---- restore

    async def restore(self, request: RestoreRequest) -> tuple[str, int, float]:
        """(resident, bytes read, seconds).  Raises segments.Damaged, Cancelled, BadChain, TooLarge."""
        name = request.request_id
        with self._job(name) as job:
            try:
                await self._reserve(name, job, self._served.bytes_of(len(request.tokens) // TOKEN_BYTES))
                return await self._load(request, job)
            finally:
                self._engine.ask(lambda scheduler: scheduler.release(name))

    async def _reserve(self, name: str, job: _Job, bytes_wanted: int) -> None:
        """Wait until running requests leave room: a prefill would want as much, and take longer."""
        loop = asyncio.get_running_loop()

        def enter() -> None:
            if not job.room.done():
                job.room.set_result(None)

        def granted() -> None:
            loop.call_soon_threadsafe(enter)

        await self._ask(lambda scheduler: scheduler.reserve(name, bytes_wanted, granted))
        try:
            await job.room
        except asyncio.CancelledError:
            if job.given_up.is_set():
                raise Cancelled from None
            raise

    async def _load(self, request: RestoreRequest, job: _Job) -> tuple[str, int, float]:
        began = time.monotonic()
        read = await asyncio.get_running_loop().run_in_executor(
            self._loaders,
            self._loader.load,
            request.tokens,
            request.chain,
            request.checkpoint,
            job.given_up.is_set,
        )

        def install(scheduler: Scheduler) -> tuple[str, int, float]:
            resident = scheduler.install(request.request_id, read.build(self._served.layout))
            seconds = time.monotonic() - began
            scheduler.rates.restored(read.bytes_read, seconds)
            return resident, read.bytes_read, seconds

        return await self._ask(install)

    # ---- save

    async def save(self, request: SaveRequest) -> tuple[list[SavedFile], list[SavedFile], float]:
        """(segments, checkpoints, seconds), written one after the other while decoding goes on.

        All or nothing.  Raises ResidentGone, RowsGone, Cancelled, OSError.
        """
        began = time.monotonic()
        try:
            with self._job(request.request_id) as job:
                written = [await self._save_segment(request, spec, job) for spec in request.segments]
                states = [await self._save_checkpoint(request, ref, job) for ref in request.checkpoints]
        except BaseException:  # whatever ended it, its caller too: nobody will ever name these files
            ids = [*(spec.id for spec in request.segments), *(ref.id for ref in request.checkpoints)]
            for file_id in ids:  # all of them: one may be written and not told yet
                self._home.segment_file(file_id).unlink(missing_ok=True)
            raise
        seconds = time.monotonic() - began
        bytes_written = sum(file.bytes_written for file in (*written, *states))
        until = max((spec.end for spec in request.segments), default=0)

        def settle(scheduler: Scheduler) -> None:
            scheduler.rates.saved(bytes_written, seconds)
            scheduler.saved(request.resident, request.running, until)

        await self._ask(settle)
        return written, states, seconds

    async def _save_segment(self, request: SaveRequest, spec: SegmentSpec, job: _Job) -> SavedFile:
        def copy_rows(scheduler: Scheduler) -> tuple[dict[str, Tensor], bytes]:
            held = scheduler.kv_of(spec.end, resident=request.resident, running=request.running)
            tokens = pack_tokens(held.tokens[spec.start : spec.end])
            return as_bytes(held.rows(spec.start, spec.end)), tokens

        tensors, tokens = await self._ask(copy_rows)
        meta = FileMeta(
            kind="segment",
            id=spec.id,
            fingerprint=self._fingerprint,
            start=spec.start,
            end=spec.end,
            parent=spec.parent,
        )
        return await self._write(meta, tensors, tokens, job)

    async def _save_checkpoint(self, request: SaveRequest, ref: CheckpointRef, job: _Job) -> SavedFile:
        def copy_state(scheduler: Scheduler) -> dict[str, Tensor]:
            held = scheduler.kv_of(ref.position, resident=request.resident, running=request.running)
            if ref.position not in held.checkpoints:
                raise RowsGone(f"no state at {ref.position}")
            return as_bytes(held.checkpoints[ref.position])

        tensors = await self._ask(copy_state)
        meta = FileMeta(
            kind="checkpoint", id=ref.id, fingerprint=self._fingerprint, start=0, end=0, position=ref.position
        )
        return await self._write(meta, tensors, b"", job)

    async def _write(self, meta: FileMeta, tensors: dict[str, Tensor], tokens: bytes, job: _Job) -> SavedFile:
        path = self._home.segment_file(meta.id)

        def write() -> SavedFile:
            if job.given_up.is_set():
                raise Cancelled
            saved = write_file(path, meta, tensors, tokens)
            if job.given_up.is_set():  # meanwhile: the handler has gone and won't hear of this file
                path.unlink(missing_ok=True)
                raise Cancelled
            return saved

        return await asyncio.get_running_loop().run_in_executor(self._writer, write)

    # ---- shared

    @contextmanager
    def _job(self, request_id: str) -> Iterator[_Job]:
        """A job that `give_up(request_id)`, or the end of its handler, ends."""
        job = self._jobs[request_id] = _Job()
        try:
            yield job
        finally:
            job.give_up()
            job.over.set()
            self._jobs.pop(request_id, None)

    def _ask(self, work: Callable[[Scheduler], T]) -> Awaitable[T]:
        return asyncio.wrap_future(self._engine.ask(work))

    def _on_engine(self, work: Callable[[], T]) -> T:
        """Have a loader thread's arrays made where mlx computes; waits for the present step."""
        return self._engine.ask(lambda _: work()).result()
