"""Restores and saves: KV from files to residents and back, while everything else goes on.  Event loop thread.

The engine thread makes and copies arrays; loader, reader and writer threads only fill and drain their bytes.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from warmline_backend.engine.engine import Engine
from warmline_backend.kv_cache.kv import RowsGone
from warmline_backend.kv_cache.segment_io import Cancelled, Loader, Tensor, as_bytes, write_file
from warmline_backend.model.model import ServedModel
from warmline_backend.scheduler.scheduler import Scheduler
from warmline_common.protocol.messages import CheckpointRef, RestoreRequest, SavedFile, SaveRequest, SegmentSpec
from warmline_common.protocol.tokens import TOKEN_BYTES, pack_tokens, prefix_digest
from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_common.storage.segment_file import FileMeta

T = TypeVar("T")

READERS = 4
LOADERS = 4


@dataclass(frozen=True)
class _Content:
    """What a file is made of, copied on the engine thread."""

    tensors: dict[str, Tensor]
    tokens: list[int]  # all up to where it ends: its place is named by those before


class _Job:
    """A restore or save under way."""

    def __init__(self, request_id: str, saves: bool) -> None:
        self.request_id, self.saves = request_id, saves
        self.given_up = threading.Event()  # read by other threads between two pieces of work
        self.over = asyncio.Event()
        self._awaited: Future[Any] | None = None

    def give_up(self) -> None:
        """No longer wanted; `over` when nothing of it goes on."""
        self.given_up.set()
        if self._awaited is not None:
            self._awaited.cancel()

    async def wait_for(self, work: "Future[T]") -> T:
        """What another thread makes of `work`.  Giving up withdraws what has not begun, and waits for what has.

        Raises Cancelled.
        """
        self._awaited = work
        if self.given_up.is_set():
            work.cancel()
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            if self.given_up.is_set():
                raise Cancelled from None
            raise

    def afterwards(self, work: Callable[[], object]) -> None:
        """Call `work` once, when no other thread is at anything for this job any more; on whatever thread that is."""
        if self._awaited is None:
            work()
        else:
            self._awaited.add_done_callback(lambda _: work())


class Storage:
    """Owns the jobs and the threads that read and write segment files."""

    def __init__(self, home: Home, engine: Engine, served: ServedModel, fingerprint: str) -> None:
        self._home, self._engine, self._served, self._fingerprint = home, engine, served, fingerprint
        self._jobs: set[_Job] = set()
        self._readers = ThreadPoolExecutor(READERS, "segment-reader")
        self._loaders = ThreadPoolExecutor(LOADERS, "restore")
        self._writer = ThreadPoolExecutor(1, "segment-writer")
        self._loader = Loader(
            served.layout, served.row_names, fingerprint, home.segment_file, self._readers, self._on_engine
        )

    def close(self) -> None:
        """Give up what is under way; its threads end with what they are at."""
        for job in self._jobs:
            job.give_up()
        for pool in (self._loaders, self._readers, self._writer):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def saving(self) -> bool:
        return any(job.saves for job in self._jobs)

    def give_up_restores(self) -> None:
        """Without waiting."""
        for job in self._jobs:
            if not job.saves:
                job.give_up()

    async def give_up(self, request_id: str) -> bool:
        """End a restore or save, and answer when nothing of it goes on; False where none has that name."""
        jobs = [job for job in self._jobs if job.request_id == request_id]
        for job in jobs:
            job.give_up()
        for job in jobs:
            await job.over.wait()
        return bool(jobs)

    # ---- restore

    async def restore(self, request: RestoreRequest) -> tuple[str, int, float]:
        """(resident, bytes read, seconds).  Raises segments.Damaged, Cancelled, BadChain, TooLarge."""
        name = f"{request.request_id} {secrets.token_hex(4)}"  # whoever asks again must not lose its memory to this one
        with self._job(request.request_id, saves=False) as job:
            try:
                await self._reserve(name, job, self._served.bytes_of(len(request.tokens) // TOKEN_BYTES))
                return await self._load(name, request, job)
            finally:  # not before the last reader has stopped: until then the memory is in use
                job.afterwards(lambda: self._engine.ask(lambda scheduler: scheduler.release(name)))

    async def _reserve(self, name: str, job: _Job, bytes_wanted: int) -> None:
        """Wait until running requests leave room: a prefill would want as much, and take longer."""
        room: Future[None] = Future()

        def granted() -> None:
            if room.set_running_or_notify_cancel():
                room.set_result(None)

        await job.wait_for(self._engine.ask(lambda scheduler: scheduler.reserve(name, bytes_wanted, granted)))
        await job.wait_for(room)

    async def _load(self, name: str, request: RestoreRequest, job: _Job) -> tuple[str, int, float]:
        began = time.monotonic()
        read = await job.wait_for(
            self._loaders.submit(
                self._loader.load,
                request.tokens,
                request.chain,
                request.checkpoint,
                job.given_up.is_set,
                request.root,
            )
        )

        read_s = time.monotonic() - began  # what comes next waits for the engine's present step, as a prefill would

        def install(scheduler: Scheduler) -> tuple[str, int, float]:
            resident = scheduler.install(name, read.build(self._served.layout), request.root)
            scheduler.rates.restored(read.bytes_read, read_s)
            return resident, read.bytes_read, time.monotonic() - began

        installed = self._engine.ask(install)
        try:
            answer = await job.wait_for(installed)
            if job.given_up.is_set():  # while it was being installed
                raise Cancelled
            return answer
        except BaseException:
            installed.add_done_callback(self._drop)
            raise

    def _drop(self, installed: "Future[tuple[str, int, float]]") -> None:
        """Nobody will ever name this resident."""
        if not installed.cancelled() and installed.exception() is None:
            resident = installed.result()[0]
            self._engine.ask(lambda scheduler: scheduler.residents.drop(resident))

    # ---- save

    async def save(self, request: SaveRequest) -> tuple[list[SavedFile], list[SavedFile], float]:
        """(segments, checkpoints, seconds), written one after the other while decoding goes on.

        All or nothing.  Raises ResidentGone, RowsGone, Cancelled, OSError.
        """
        began = time.monotonic()
        try:
            with self._job(request.request_id, saves=True) as job:
                written = [await self._save_segment(request, spec, job) for spec in request.segments]
                states = [await self._save_checkpoint(request, ref, job) for ref in request.checkpoints]
        except BaseException:  # whatever ended it, its caller too: nobody will ever name these files
            ids = [*(spec.id for spec in request.segments), *(ref.id for ref in request.checkpoints)]
            for file_id in ids:  # all of them: one may be written and not told yet
                disk.delete(self._home.segment_file(file_id))
            raise
        seconds = time.monotonic() - began
        bytes_written = sum(file.bytes_written for file in (*written, *states))
        until = max((spec.end for spec in request.segments), default=0)

        def settle(scheduler: Scheduler) -> None:
            scheduler.rates.saved(bytes_written, seconds)
            scheduler.saved(request.resident, request.running, until)

        self._engine.ask(settle)  # not waited for: from here on the files are their caller's
        return written, states, seconds

    async def _save_segment(self, request: SaveRequest, spec: SegmentSpec, job: _Job) -> SavedFile:
        def copy_rows(scheduler: Scheduler) -> _Content:
            held = scheduler.kv_of(spec.end, resident=request.resident, running=request.running)
            return _Content(as_bytes(held.rows(spec.start, spec.end)), held.tokens[: spec.end])

        content = await job.wait_for(self._engine.ask(copy_rows))

        def write() -> SavedFile:
            tokens = pack_tokens(content.tokens)
            before, own = tokens[: spec.start * TOKEN_BYTES], tokens[spec.start * TOKEN_BYTES :]
            meta = FileMeta(
                kind="segment",
                id=spec.id,
                fingerprint=self._fingerprint,
                root=request.root.hex(),
                prefix=prefix_digest(request.root, before),
                start=spec.start,
                end=spec.end,
                parent=spec.parent,
                model=self._served.name,
            )
            return write_file(self._home.segment_file(spec.id), meta, content.tensors, own)

        return await self._write(spec.id, write, job)

    async def _save_checkpoint(self, request: SaveRequest, ref: CheckpointRef, job: _Job) -> SavedFile:
        def copy_state(scheduler: Scheduler) -> _Content:
            held = scheduler.kv_of(ref.position, resident=request.resident, running=request.running)
            if ref.position not in held.checkpoints:
                raise RowsGone(f"no state at {ref.position}")
            return _Content(as_bytes(held.checkpoints[ref.position]), held.tokens[: ref.position])

        content = await job.wait_for(self._engine.ask(copy_state))

        def write() -> SavedFile:
            meta = FileMeta(
                kind="checkpoint",
                id=ref.id,
                fingerprint=self._fingerprint,
                root=request.root.hex(),
                prefix=prefix_digest(request.root, pack_tokens(content.tokens)),
                start=0,
                end=0,
                position=ref.position,
                model=self._served.name,
            )
            return write_file(self._home.segment_file(ref.id), meta, content.tensors)

        return await self._write(ref.id, write, job)

    async def _write(self, file_id: str, write: Callable[[], SavedFile], job: _Job) -> SavedFile:
        """Have the writer thread write one file, unless the job is given up."""

        def write_unless_given_up() -> SavedFile:
            if job.given_up.is_set():
                raise Cancelled
            saved = write()
            if job.given_up.is_set():  # meanwhile: the handler has gone and won't hear of this file
                disk.delete(self._home.segment_file(file_id))
                raise Cancelled
            return saved

        return await job.wait_for(self._writer.submit(write_unless_given_up))

    # ---- shared

    @contextmanager
    def _job(self, request_id: str, *, saves: bool) -> Iterator[_Job]:
        """A job that `give_up(request_id)`, or the end of its handler, ends."""
        job = _Job(request_id, saves)
        self._jobs.add(job)
        try:
            yield job
        finally:
            job.give_up()
            job.over.set()
            self._jobs.discard(job)

    def _on_engine(self, work: Callable[[], T]) -> T:
        """Have a loader thread's arrays made where mlx computes; waits for the present step."""
        return self._engine.ask(lambda _: work()).result()
