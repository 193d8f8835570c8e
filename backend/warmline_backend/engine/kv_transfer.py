"""Restores and saves: KV from files to residents and back, while requests run.  Event loop thread.

The engine thread makes and copies arrays; loader, reader and writer threads only fill and drain their bytes.
"""

import asyncio
import errno
import math
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
import msgspec

from warmline_backend.engine.engine import Engine
from warmline_backend.engine.save_slices import LeafReader, Piece, SaveSlices
from warmline_backend.engine.segment_compression import SegmentCompression, WriteStats
from warmline_backend.kv_cache import segment_io
from warmline_backend.kv_cache.kv import KV, NamedArrays, RowsUnavailableError, leaf_of
from warmline_backend.kv_cache.segment_io import OperationCancelledError
from warmline_backend.model.model import ServedModel
from warmline_backend.scheduler.capacity import KvTooLargeError, restore_tokens
from warmline_backend.scheduler.scheduler import Scheduler
from warmline_common.protocol.messages import CheckpointRef, RestoreRequest, SavedFile, SaveRequest, SegmentSpec
from warmline_common.protocol.tokens import TOKEN_BYTES, pack_tokens, prefix_digest
from warmline_common.protocol.waits import MEMORY
from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_common.storage.segment_file import FileMeta

T = TypeVar("T")

READER_THREADS = max(4, min(8, (os.cpu_count() or 1) // 2))
LOADER_THREADS = 4


class TransferJob:
    """A restore or save in progress."""

    def __init__(self, request_id: str, is_save: bool) -> None:
        self.request_id, self.is_save = request_id, is_save
        self.write_left_s = math.inf  # of a save
        self.cancelled = threading.Event()  # read by other threads between two pieces of work
        self.done = asyncio.Event()
        self._pending: Future[Any] | None = None
        self._awaited_by_writer: Future[Any] | None = None
        self._write_limit: asyncio.Timeout | None = None  # while the writer is at work
        self._write_resumed_at = 0.0

    def cancel(self) -> None:
        """Cancel the job; `done` is set once no work of it goes on."""
        self.cancelled.set()
        for work in (self._pending, self._awaited_by_writer):
            if work is not None:
                work.cancel()

    async def wait_for(self, work: "Future[T]") -> T:
        """Wait for another thread's result.  Cancelling withdraws work not begun, and waits for the rest.

        Raises OperationCancelledError.
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

    def wait_on_writer(self, loop: asyncio.AbstractEventLoop, work: "Future[T]") -> T:
        """Wait for the engine's result, a time that does not count as the disk's.  Writer thread.

        Raises OperationCancelledError.
        """
        self._awaited_by_writer = work
        if self.cancelled.is_set():
            work.cancel()
        counts = not work.done()
        try:
            if counts:
                loop.call_soon_threadsafe(self._pause_write_limit)
            result = work.result()
            if counts:
                loop.call_soon_threadsafe(self._resume_write_limit)
            return result
        except CancelledError:
            raise OperationCancelledError from None

    @asynccontextmanager
    async def limit_writing(self) -> AsyncIterator[asyncio.Timeout]:
        """Limit of a block that ends with TimeoutError where the disk takes longer than the save allows."""
        limit = asyncio.timeout(self.write_left_s if math.isfinite(self.write_left_s) else None)
        async with limit:
            self._write_limit, self._write_resumed_at = limit, time.monotonic()
            try:
                yield limit
            finally:
                self._pause_write_limit()
                self._write_limit = None

    def _pause_write_limit(self) -> None:
        if self._write_limit is not None and self._write_limit.when() is not None and not self._write_limit.expired():
            self.write_left_s -= time.monotonic() - self._write_resumed_at
            self._write_limit.reschedule(None)

    def _resume_write_limit(self) -> None:
        if self._write_limit is not None and not self._write_limit.expired() and math.isfinite(self.write_left_s):
            self._write_resumed_at = time.monotonic()
            self._write_limit.reschedule(asyncio.get_running_loop().time() + self.write_left_s)

    def call_when_idle(self, work: Callable[[], object]) -> None:
        """Call `work` once no other thread works for this job any more, on any thread."""
        if self._pending is None:
            work()
        else:
            self._pending.add_done_callback(lambda _: work())


class KvTransfer:
    """Restore and save jobs, and the threads that read and write segment files."""

    def __init__(
        self, home: Home, engine: Engine, served: ServedModel, fingerprint: str, *, compress: bool = False
    ) -> None:
        """`compress`: where it is worthwhile, and where KV is of bfloat16."""
        self._compression = SegmentCompression(
            compress and served.describe_layout().dtype == "bfloat16", READER_THREADS
        )
        self._home, self._engine, self._served, self._fingerprint = home, engine, served, fingerprint
        self._jobs: set[TransferJob] = set()
        self._reader_pool = ThreadPoolExecutor(READER_THREADS, "segment-reader")
        self._loader_pool = ThreadPoolExecutor(LOADER_THREADS, "restore")
        self._writer_pool = ThreadPoolExecutor(1, "segment-writer")
        self._view_pool = ThreadPoolExecutor(1, "segment-view")
        self._loader = segment_io.ChainLoader(
            served.layout,
            served.row_names,
            fingerprint,
            home.segment_file,
            self._reader_pool,
            run_on_engine=lambda work: engine.submit(lambda _: work()).result(),  # waits for the present step
        )

    def close(self) -> None:
        """Cancel all jobs; threads end after their present work."""
        for job in self._jobs:
            job.cancel()
        for pool in (self._loader_pool, self._reader_pool, self._writer_pool, self._view_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def is_saving(self) -> bool:
        return any(job.is_save for job in self._jobs)

    def cancel_restores(self) -> None:
        """Cancel all restores, without waiting."""
        for job in self._jobs:
            if not job.is_save:
                job.cancel()

    async def cancel(self, request_id: str) -> bool:
        """Cancel the jobs of a request and wait for their end; False where there are none."""
        jobs = [job for job in self._jobs if job.request_id == request_id]
        for job in jobs:
            job.cancel()
        for job in jobs:
            await job.done.wait()
        return bool(jobs)

    # ---- restore

    async def restore(self, request: RestoreRequest) -> tuple[str, int, float, dict[str, float]]:
        """Restore a resident: (id, bytes read, seconds, waits before that by reason).

        Raises DamagedFileError, OperationCancelledError, BadChainError, KvTooLargeError.
        """
        name = f"{request.request_id} {secrets.token_hex(4)}"  # unique: a retry has a reservation of its own
        with self._track_job(request.request_id, is_save=False) as job:
            try:
                position, budget_bytes = len(request.tokens) // TOKEN_BYTES, self._engine.snapshot.memory_budget_bytes
                tokens_max = restore_tokens(self._served, position, request.prompt_tokens, budget_bytes)
                waits = await self._reserve_memory(name, job, self._served.kv_bytes(tokens_max))
                return *await self._load_resident(name, request, tokens_max, job), waits
            finally:  # after the last reader has stopped: until then the memory is in use
                job.call_when_idle(lambda: self._engine.submit(lambda scheduler: scheduler.admission.release(name)))

    async def _reserve_memory(self, reservation_id: str, job: TransferJob, bytes_needed: int) -> dict[str, float]:
        """Wait until running requests leave room: a prefill would need as much, and take longer.  Returns the waits."""
        granted: Future[None] = Future()

        def on_granted() -> None:
            if granted.set_running_or_notify_cancel():
                granted.set_result(None)

        def on_refused(error: KvTooLargeError) -> None:
            if granted.set_running_or_notify_cancel():
                granted.set_exception(error)

        def reserve(scheduler: Scheduler) -> str:
            scheduler.admission.reserve(reservation_id, bytes_needed, on_granted, on_refused)
            return scheduler.step_reason

        began = time.monotonic()
        step_reason = await job.wait_for(self._engine.submit(reserve))
        queued = time.monotonic()
        await job.wait_for(granted)
        return {step_reason: queued - began, MEMORY: time.monotonic() - queued}

    async def _load_resident(
        self, reservation_id: str, request: RestoreRequest, tokens_max: int, job: TransferJob
    ) -> tuple[str, int, float]:
        began = time.monotonic()
        load = partial(self._loader.load, request.tokens, request.chain, request.checkpoint)
        loaded = await job.wait_for(self._loader_pool.submit(load, job.cancelled.is_set, request.root, tokens_max))
        self._compression.record_restore(loaded.stats, time.monotonic() - began)
        load_s = time.monotonic() - began  # without the wait for the engine's present step, which a prefill would share

        def install(scheduler: Scheduler) -> tuple[str, int, float]:
            resident = scheduler.install_resident(reservation_id, loaded.build(self._served.layout), request.root)
            scheduler.rates.restore.add(loaded.stats.bytes_decoded, load_s)  # plans know decoded sizes
            return resident, loaded.stats.bytes_read, time.monotonic() - began

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
        """Delete a resident that no caller will know of."""
        if not installed.cancelled() and installed.exception() is None:
            resident = installed.result()[0]
            self._engine.submit(lambda scheduler: scheduler.residents.delete(resident))

    # ---- save

    async def save(self, request: SaveRequest) -> tuple[list[SavedFile], list[SavedFile], float]:
        """Write (segments, checkpoints, seconds), one file after the other while decoding goes on.

        All or nothing.  Raises ResidentNotFoundError, RowsUnavailableError, OperationCancelledError, OSError.
        """
        began = time.monotonic()
        try:
            with self._track_job(request.request_id, is_save=True) as job:
                job.write_left_s = request.write_timeout_s or math.inf
                segments = [await self._save_segment(request, spec, job) for spec in request.segments]
                states = [await self._save_checkpoint(request, ref, job) for ref in request.checkpoints]
        except BaseException:  # also a cancelled caller: no caller will name these files
            ids = [*(spec.id for spec in request.segments), *(ref.id for ref in request.checkpoints)]
            for file_id in ids:  # all: one may be written and not reported yet
                disk.delete(self._home.segment_file(file_id))
            raise
        seconds = time.monotonic() - began
        bytes_written = sum(file.bytes_written for file in (*segments, *states))
        end = max((spec.end for spec in request.segments), default=0)

        def mark_saved(scheduler: Scheduler) -> None:
            scheduler.rates.save.add(bytes_written, seconds)
            scheduler.save_source.mark_saved(request.resident, request.running, end)

        self._engine.submit(mark_saved)  # not waited for: the files are their caller's from here on
        return segments, states, seconds

    async def _save_segment(self, request: SaveRequest, spec: SegmentSpec, job: TransferJob) -> SavedFile:
        def read_rows(kv: KV, leaves: Collection[str] | None, piece: Piece) -> NamedArrays:
            return kv.slice_rows(spec.start, spec.end, leaves, piece)

        meta = self._make_meta(request, kind="segment", id=spec.id, start=spec.start, end=spec.end, parent=spec.parent)
        return await self._save_file(request, meta, spec.end, job, read_rows)

    async def _save_checkpoint(self, request: SaveRequest, ref: CheckpointRef, job: TransferJob) -> SavedFile:
        state: NamedArrays = {}  # kept while it is saved, also where the KV drops it

        def read_state(kv: KV, leaves: Collection[str] | None, piece: Piece) -> NamedArrays:
            if not state and ref.position not in kv.checkpoints:
                raise RowsUnavailableError(f"no state at {ref.position}")
            state.update(state or kv.checkpoints[ref.position])
            return {
                name: mx.contiguous(array[piece])
                for name, array in state.items()
                if leaves is None or leaf_of(name) in leaves
            }

        meta = self._make_meta(request, kind="checkpoint", id=ref.id, start=0, end=0, position=ref.position)
        return await self._save_file(request, meta, ref.position, job, read_state)

    def _make_meta(self, request: SaveRequest, **fields: Any) -> FileMeta:
        """Make a file's metadata; its prefix digest is set once its tokens are known."""
        model, root = self._served.name, request.root.hex()
        return FileMeta(fingerprint=self._fingerprint, root=root, prefix="", model=model, **fields)

    async def _save_file(
        self, request: SaveRequest, meta: FileMeta, end: int, job: TransferJob, read_leaves: LeafReader
    ) -> SavedFile:
        """Copy the first slice on the engine thread, and have the writer thread write the file."""

        def find_kv(scheduler: Scheduler) -> KV:
            return scheduler.save_source.find_kv(end, resident_id=request.resident, running_id=request.running)

        slices = SaveSlices(self._engine, self._view_pool, find_kv, read_leaves, meta.start, end)
        await job.wait_for(self._engine.submit(slices.begin))
        path, wait = self._home.segment_file(meta.id), partial(job.wait_on_writer, asyncio.get_running_loop())
        is_coded, owner = self._compression.choose(request.disk_used_share), self._home.instance

        def write_unless_cancelled() -> tuple[SavedFile, WriteStats]:
            if job.cancelled.is_set():
                raise OperationCancelledError
            tokens, first = pack_tokens(slices.tokens), (meta.start if meta.kind == "segment" else end) * TOKEN_BYTES
            placed = msgspec.structs.replace(meta, prefix=prefix_digest(request.root, tokens[:first]))
            meter = self._compression.make_meter(slices)
            stream = slices.open_stream(lambda work: meter.exclude(lambda: wait(work).result()))
            try:
                saved = segment_io.write_segment_file(path, placed, stream, tokens[first:], is_coded, owner)
            finally:
                slices.close()
            if job.cancelled.is_set():  # meanwhile: the handler has gone and won't learn of this file
                disk.delete(path)
                raise OperationCancelledError
            return saved, meter.finish(saved.bytes_written)

        saved, stats = await self._write(job, write_unless_cancelled)
        self._compression.record_save(stats)
        return saved

    async def _write(self, job: TransferJob, work: Callable[[], T]) -> T:
        """Have the writer thread write a file.  Raises OSError where the disk takes longer than the save allows."""
        try:
            async with job.limit_writing():
                return await job.wait_for(self._writer_pool.submit(work))
        except TimeoutError:
            job.cancel()
            raise OSError(errno.ETIMEDOUT, "the disk has not written a segment in time") from None

    # ---- shared

    @contextmanager
    def _track_job(self, request_id: str, *, is_save: bool) -> Iterator[TransferJob]:
        """A job that `cancel(request_id)`, or the end of its handler, ends."""
        job = TransferJob(request_id, is_save)
        self._jobs.add(job)
        try:
            yield job
        finally:
            job.cancel()
            job.done.set()
            self._jobs.discard(job)
