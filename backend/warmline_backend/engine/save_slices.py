"""Slices of a save: the tensors of one file, copied from a KV between the engine's steps, one ahead of the writer."""

import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future

from warmline_backend.engine.engine import Engine
from warmline_backend.kv_cache.byte_buffers import DTYPE_NAMES
from warmline_backend.kv_cache.kv import KV, NamedArrays, RowsUnavailableError, leaf_of
from warmline_backend.kv_cache.segment_io import RawTensor, TensorStream, expose_bytes
from warmline_backend.scheduler.scheduler import Scheduler
from warmline_common.protocol.tokens import TokenArray

SLICE_S_MAX = 0.02  # about a decode step of a large model; a slice has one tensor at least
SLICE_BYTES_MAX = 64 << 20  # likewise; two slices are in memory at a time

KvFinder = Callable[[Scheduler], KV]  # raises ResidentNotFoundError, RowsUnavailableError
LeafReader = Callable[[KV, Collection[str] | None], NamedArrays]  # lazy arrays of these leaves, or of all
EngineWait = Callable[["Future[dict[str, RawTensor]]"], dict[str, RawTensor]]  # raises what the engine raised


class SaveSlices:
    """Tensors of one file as slices, each of as many as can be copied in SLICE_S_MAX.

    The KV is looked up for each slice: it may have moved from a resident to a request, and holding its arrays from step
    to step would make each step copy them.  What is saved of it does not change, as `tokens` shows.
    """

    def __init__(self, engine: Engine, find_kv: KvFinder, read_leaves: LeafReader, start: int, end: int) -> None:
        self._engine, self._find_kv, self._read_leaves = engine, find_kv, read_leaves
        self._start, self._end = start, end
        self.tokens = TokenArray()  # [0, end)
        self._shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._names: list[str] = []  # of tensors that are not copied yet, in the order of the file
        self._slice: dict[str, RawTensor] = {}
        self._next: Future[dict[str, RawTensor]] | None = None

    def begin(self, scheduler: Scheduler) -> None:
        """Find out what is to be saved, and copy the first slice.  Engine thread.

        Raises ResidentNotFoundError, RowsUnavailableError.
        """
        kv = self._find_kv(scheduler)
        self.tokens = kv.tokens[: self._end]
        arrays = self._read_leaves(kv, None)
        self._shapes = {name: (DTYPE_NAMES[array.dtype], array.shape) for name, array in arrays.items()}
        self._names = sorted(arrays)
        del arrays
        self._slice = self._copy_slice(scheduler)

    def open_stream(self, wait: EngineWait) -> TensorStream:
        """Stream of the tensors for the writer; `wait` is called on its thread."""
        return TensorStream(self._shapes, lambda name: self._read_tensor(name, wait))

    def find_sample(self, dtype: str) -> memoryview | None:
        """Bytes of the largest tensor of a dtype in the present slice."""
        data = [tensor.data for tensor in self._slice.values() if tensor.dtype == dtype]
        return max(data, key=len, default=None)

    def close(self) -> None:
        """Withdraw the slice that is asked for.  Any thread."""
        if self._next is not None:
            self._next.cancel()

    def _read_tensor(self, name: str, wait: EngineWait) -> Iterator[memoryview]:
        if name not in self._slice and self._next is not None:
            self._slice, self._next = wait(self._next), None
        if self._next is None and self._names:
            self._next = self._engine.submit(self._copy_slice)
        yield self._slice[name].data

    def _copy_slice(self, scheduler: Scheduler) -> dict[str, RawTensor]:
        """Copy the next tensors.  Engine thread."""
        kv = self._find_kv(scheduler)
        if kv.tokens[self._start : self._end] != self.tokens[self._start :]:
            raise RowsUnavailableError(f"rows [{self._start}, {self._end}) are of other tokens by now")
        tensors: dict[str, RawTensor] = {}
        began, bytes_copied = time.perf_counter(), 0
        while self._names and time.perf_counter() - began < SLICE_S_MAX and bytes_copied < SLICE_BYTES_MAX:
            name = self._names.pop(0)
            array = self._read_leaves(kv, {leaf_of(name)})[name]
            tensors |= expose_bytes({name: array})
            bytes_copied += array.nbytes
        return tensors
