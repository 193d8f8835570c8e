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
from warmline_backend.kv_cache.kv import RowsUnavailableError
from warmline_backend.kv_cache.segment_io import (
    ChainLoader,
    OperationCancelledError,
    RawTensor,
    expose_bytes,
    write_segment_file,
)
from warmline_backend.model.model import ServedModel
from warmline_backend.scheduler.scheduler import Scheduler
from warmline_common.protocol.messages import CheckpointRef, RestoreRequest, SavedFile, SaveRequest, SegmentSpec
from warmline_common.protocol.tokens import TOKEN_BYTES, pack_tokens, prefix_digest
from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_common.storage.segment_file import FileMeta

T = TypeVar("T")

READER_THREADS = 4
LOADER_THREADS = 4


@dataclass(frozen=True)
class _FileContent:
    """What a file is made of, copied on the engine thread."""

    tensors: dict[str, RawTensor]
    tokens: list[int]  # all up to where it ends: its place is named by those before


class _TransferJob:
    """A restore or save under way."""

    def __init__(self, request_id: str, is_save: bool) -> None:
        self.request_id, self.is_save = request_id, is_save
        self.cancelled = threading.Event()  # read by other threads between two pieces of work
        self.done = asyncio.Event()
        self._pending: Future[Any] | None = None

    def cancel(self) -> None:
        """No longer wanted; `over` when nothing of it goes on."""
        self.cancelled.set()
        if self._pending is not None:
            self._pending.cancel()

    async def wait_for(self, work: "Future[T]") -> T:
        """What another thread makes of `work`.  Giving up withdraws what has not begun, and waits for what has.

        Raises Cancelled.
        """
        self._pending = work
        if self.cancelled.is_set():
            work.cancel()
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            if self.cancelled.is_set():
                raise OperationCancelledError from None
            raise

    def call_when_idle(self, work: Callable[[], object]) -> None:
        """Call `work` once, when no other thread is at anything for this job any more; on whatever thread that is."""
        if self._pending is None:
            work()
        else:
            self._pending.add_done_callback(lambda _: work())


class KvTransfer:
    """Owns the jobs and the threads that read and write segment files."""

    def __init__(self, home: Home, engine: Engine, served: ServedModel, fingerprint: str) -> None:
        self._home, self._engine, self._served, self._fingerprint = home, engine, served, fingerprint
        self._jobs: set[_TransferJob] = set()
        self._reader_pool = ThreadPoolExecutor(READER_THREADS, "segment-reader")
        self._loader_pool = ThreadPoolExecutor(LOADER_THREADS, "restore")
        self._writer_pool = ThreadPoolExecutor(1, "segment-writer")
        self._loader = ChainLoader(
            served.layout, served.row_names, fingerprint, home.segment_file, self._reader_pool, self._run_on_engine
        )

    def close(self) -> None:
        """Give up what is under way; its threads end with what they are at."""
        for job in self._jobs:
            job.cancel()
        for pool in (self._loader_pool, self._reader_pool, self._writer_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def is_saving(self) -> bool:
        return any(job.is_save for job in self._jobs)

    def cancel_restores(self) -> None:
        """Without waiting."""
        for job in self._jobs:
            if not job.is_save:
                job.cancel()

    async def cancel(self, request_id: str) -> bool:
        """End a restore or save, and answer when nothing of it goes on; False where none has that name."""
        jobs = [job for job in self._jobs if job.request_id == request_id]
        for job in jobs:
            job.cancel()
        for job in jobs:
            await job.done.wait()
        return bool(jobs)

    # ---- restore

    async def restore(self, request: RestoreRequest) -> tuple[str, int, float]:
        """(resident, bytes read, seconds).  Raises segments.Damaged, Cancelled, BadChain, TooLarge."""
        name = f"{request.request_id} {secrets.token_hex(4)}"  # whoever asks again must not lose its memory to this one
        with self._track_job(request.request_id, is_save=False) as job:
            try:
                await self._reserve_memory(name, job, self._served.kv_bytes(len(request.tokens) // TOKEN_BYTES))
                return await self._load_resident(name, request, job)
            finally:  # not before the last reader has stopped: until then the memory is in use
                job.call_when_idle(lambda: self._engine.submit(lambda scheduler: scheduler.admission.release(name)))

    async def _reserve_memory(self, reservation_id: str, job: _TransferJob, bytes_needed: int) -> None:
        """Wait until running requests leave room: a prefill would want as much, and take longer."""
        room: Future[None] = Future()

        def granted() -> None:
            if room.set_running_or_notify_cancel():
                room.set_result(None)

        await job.wait_for(
            self._engine.submit(lambda scheduler: scheduler.admission.reserve(reservation_id, bytes_needed, granted))
        )
        await job.wait_for(room)

    async def _load_resident(
        self, reservation_id: str, request: RestoreRequest, job: _TransferJob
    ) -> tuple[str, int, float]:
        began = time.monotonic()
        read = await job.wait_for(
            self._loader_pool.submit(
                self._loader.load,
                request.tokens,
                request.chain,
                request.checkpoint,
                job.cancelled.is_set,
                request.root,
            )
        )

        read_s = time.monotonic() - began  # what comes next waits for the engine's present step, as a prefill would

        def install(scheduler: Scheduler) -> tuple[str, int, float]:
            resident = scheduler.install_resident(reservation_id, read.build(self._served.layout), request.root)
            scheduler.rates.record_restore(read.bytes_read, read_s)
            return resident, read.bytes_read, time.monotonic() - began

        installed = self._engine.submit(install)
        try:
            answer = await job.wait_for(installed)
            if job.cancelled.is_set():  # while it was being installed
                raise OperationCancelledError
            return answer
        except BaseException:
            installed.add_done_callback(self._delete_installed)
            raise

    def _delete_installed(self, installed: "Future[tuple[str, int, float]]") -> None:
        """Nobody will ever name this resident."""
        if not installed.cancelled() and installed.exception() is None:
            resident = installed.result()[0]
            self._engine.submit(lambda scheduler: scheduler.residents.delete(resident))

    # ---- save

    async def save(self, request: SaveRequest) -> tuple[list[SavedFile], list[SavedFile], float]:
        """(segments, checkpoints, seconds), written one after the other while decoding goes on.

        All or nothing.  Raises ResidentGone, RowsGone, Cancelled, OSError.
        """
        began = time.monotonic()
        try:
            with self._track_job(request.request_id, is_save=True) as job:
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
            scheduler.rates.record_save(bytes_written, seconds)
            scheduler.save_source.mark_saved(request.resident, request.running, until)

        self._engine.submit(settle)  # not waited for: from here on the files are their caller's
        return written, states, seconds

    async def _save_segment(self, request: SaveRequest, spec: SegmentSpec, job: _TransferJob) -> SavedFile:
        def copy_rows(scheduler: Scheduler) -> _FileContent:
            held = scheduler.save_source.find_kv(spec.end, resident_id=request.resident, running_id=request.running)
            return _FileContent(expose_bytes(held.slice_rows(spec.start, spec.end)), held.tokens[: spec.end])

        content = await job.wait_for(self._engine.submit(copy_rows))

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
            return write_segment_file(self._home.segment_file(spec.id), meta, content.tensors, own)

        return await self._write_file(spec.id, write, job)

    async def _save_checkpoint(self, request: SaveRequest, ref: CheckpointRef, job: _TransferJob) -> SavedFile:
        def copy_state(scheduler: Scheduler) -> _FileContent:
            held = scheduler.save_source.find_kv(ref.position, resident_id=request.resident, running_id=request.running)
            if ref.position not in held.checkpoints:
                raise RowsUnavailableError(f"no state at {ref.position}")
            return _FileContent(expose_bytes(held.checkpoints[ref.position]), held.tokens[: ref.position])

        content = await job.wait_for(self._engine.submit(copy_state))

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
            return write_segment_file(self._home.segment_file(ref.id), meta, content.tensors)

        return await self._write_file(ref.id, write, job)

    async def _write_file(self, file_id: str, write: Callable[[], SavedFile], job: _TransferJob) -> SavedFile:
        """Have the writer thread write one file, unless the job is given up."""

        def write_unless_given_up() -> SavedFile:
            if job.cancelled.is_set():
                raise OperationCancelledError
            saved = write()
            if job.cancelled.is_set():  # meanwhile: the handler has gone and won't hear of this file
                disk.delete(self._home.segment_file(file_id))
                raise OperationCancelledError
            return saved

        return await job.wait_for(self._writer_pool.submit(write_unless_given_up))

    # ---- shared

    @contextmanager
    def _track_job(self, request_id: str, *, is_save: bool) -> Iterator[_TransferJob]:
        """A job that `give_up(request_id)`, or the end of its handler, ends."""
        job = _TransferJob(request_id, is_save)
        self._jobs.add(job)
        try:
            yield job
        finally:
            job.cancel()
            job.done.set()
            self._jobs.discard(job)

    def _run_on_engine(self, work: Callable[[], T]) -> T:
        """Have a loader thread's arrays made where mlx computes; waits for the present step."""
        return self._engine.submit(lambda _: work()).result()
