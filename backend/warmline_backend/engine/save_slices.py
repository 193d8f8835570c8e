"""Slices of a save: pieces of one file's tensors, copied from a KV between steps, one slice ahead of the writer."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future

import mlx.core as mx

from warmline_backend.engine.engine import Engine
from warmline_backend.kv_cache.byte_buffers import DTYPE_NAMES, evaluate_unsigned, view_bytes
from warmline_backend.kv_cache.kv import KV, NamedArrays, RowsUnavailableError, leaf_of
from warmline_backend.kv_cache.segment_io import TensorStream
from warmline_backend.scheduler.scheduler import Scheduler
from warmline_common.protocol.tokens import TokenArray

SLICE_S_MAX = 0.02  # while requests compute: a stream's reader sees a longer pause, and a chunk takes a second or so
SLICE_STEP_SHARE = 0.5  # of a decode step's time: the rate varies, and no step is to be a step late
SLICE_BYTES_MAX = 16 << 20  # two slices are in memory; from freed memory of more, malloc returns pages to the system
CHUNK_SLICE_BYTES_MAX = 64 << 20  # while prompts prefill alone: a chunk, which takes long, follows each slice
PIECE_BYTES_MAX = 1 << 20  # half a millisecond to copy on a slow machine

Piece = tuple[slice, ...]  # index of the first axes of a tensor, for bytes that follow each other in the file
Views = list[memoryview]
KvFinder = Callable[[Scheduler], KV]  # raises ResidentNotFoundError, RowsUnavailableError
# Lazy, contiguous arrays: this piece of the tensors of these leaves, or of all.
LeafReader = Callable[[KV, Collection[str] | None, Piece], NamedArrays]
EngineWait = Callable[["Future[Future[Views]]"], Views]  # raises what the engine raised


def choose_slice_bytes(copy_bytes_per_s: float, decode_step_s: float, is_prefilling: bool) -> int:
    """Bytes of the next slice, where recent ones were copied at this rate; 0.0: unknown.

    `decode_step_s` is the usual decode step's time; 0.0 where no request decodes.
    """
    if not decode_step_s:
        bytes_max = CHUNK_SLICE_BYTES_MAX if is_prefilling else SLICE_BYTES_MAX
        return min(max(int(copy_bytes_per_s * SLICE_S_MAX), SLICE_BYTES_MAX), bytes_max)
    seconds = min(decode_step_s * SLICE_STEP_SHARE, SLICE_S_MAX)
    return min(max(int(copy_bytes_per_s * seconds), PIECE_BYTES_MAX), SLICE_BYTES_MAX)


def list_pieces(shape: Sequence[int], item_bytes: int) -> Iterator[Piece]:
    """Pieces of a tensor in the order of its bytes, each of PIECE_BYTES_MAX at most, or of one number."""
    if not shape:
        yield ()
        return
    entry_bytes = math.prod(shape[1:]) * item_bytes
    if entry_bytes > PIECE_BYTES_MAX:
        for n in range(shape[0]):
            yield from ((slice(n, n + 1), *rest) for rest in list_pieces(shape[1:], item_bytes))
        return
    count = max(1, PIECE_BYTES_MAX // max(1, entry_bytes))
    for start in range(0, shape[0], count):
        yield (slice(start, min(shape[0], start + count)),)


class SaveSlices:
    """Tensors of one file as slices, each of some pieces: of as many as can be copied before a step is late.

    The KV is looked up for each slice: it may have moved from a resident to a request, and holding its arrays from step
    to step would make each step copy them.  What is saved of it does not change, as `tokens` shows.
    """

    def __init__(
        self,
        engine: Engine,
        view_pool: Executor,
        find_kv: KvFinder,
        read_leaves: LeafReader,
        start: int,
        end: int,
    ) -> None:
        """`view_pool`: a thread that reaches the bytes of copies, which takes longer than copying on some devices."""
        self._engine, self._view_pool, self._find_kv, self._read_leaves = engine, view_pool, find_kv, read_leaves
        self._start, self._end = start, end
        self.tokens = TokenArray()  # [0, end)
        self._shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._pieces: list[tuple[str, Piece, int]] = []  # name, piece, bytes of those not copied yet, the next one last
        self._counts: dict[str, int] = {}  # of pieces, by tensor
        self._first: Views = []
        self._next: Future[Future[Views]] | None = None

    def begin(self, scheduler: Scheduler) -> None:
        """Find out what is to be saved, and copy the first piece.  Engine thread.

        Raises ResidentNotFoundError, RowsUnavailableError.
        """
        kv = self._find_kv(scheduler)
        self.tokens = kv.tokens[: self._end]
        arrays = self._read_leaves(kv, None, ())
        self._shapes = {name: (DTYPE_NAMES[array.dtype], array.shape) for name, array in arrays.items()}
        for name, array in sorted(arrays.items(), reverse=True):
            pieces = list(list_pieces(array.shape, array.itemsize))
            self._counts[name] = len(pieces)
            self._pieces += [(name, piece, _count_bytes(array, piece)) for piece in reversed(pieces)]
        del arrays
        self._first = _view_all(self._copy_pieces(scheduler, 1)) if self._pieces else []

    def open_stream(self, wait: EngineWait) -> TensorStream:
        """Stream of the tensors for the writer; `wait` is called on its thread."""
        views = self._iter_views(wait)
        return TensorStream(self._shapes, lambda name: (next(views) for _ in range(self._counts[name])))

    def find_sample(self, dtype: str) -> memoryview | None:
        """Bytes of a tensor of a dtype, of the first slice."""
        first = next(iter(sorted(self._shapes)), "")
        return self._first[0] if self._first and self._shapes[first][0] == dtype else None

    def close(self) -> None:
        """Withdraw the slice that is asked for.  Any thread."""
        if self._next is not None:
            self._next.cancel()

    def _iter_views(self, wait: EngineWait) -> Iterator[memoryview]:
        """Bytes of all pieces in order.  The next slice is asked for when a slice begins to be written."""
        views, self._first = self._first, []
        while views:
            self._next = self._engine.submit(self._copy_slice) if self._pieces else None
            yield from views
            views = []  # its memory is used again
            if self._next is not None:
                views = wait(self._next)

    def _copy_slice(self, scheduler: Scheduler) -> Future[Views]:
        """Copy the next pieces, and have their bytes reached meanwhile.  Engine thread."""
        step_s = scheduler.rates.step_durations.usual_decode_s if scheduler.is_decoding else 0.0
        rate = scheduler.rates.copy.per_second
        arrays = self._copy_pieces(scheduler, choose_slice_bytes(rate, step_s, scheduler.is_prefilling))
        return self._view_pool.submit(_view_all, arrays)

    def _copy_pieces(self, scheduler: Scheduler, bytes_wanted: int) -> list[mx.array]:
        """Copies of the next pieces, of no more than `bytes_wanted` together, but of one at least."""
        began = time.perf_counter()
        kv = self._find_kv(scheduler)
        if kv.tokens[self._start : self._end] != self.tokens[self._start :]:
            raise RowsUnavailableError(f"rows [{self._start}, {self._end}) are of other tokens by now")
        arrays: list[mx.array] = []
        bytes_chosen = 0
        while self._pieces and (not arrays or bytes_chosen + self._pieces[-1][2] <= bytes_wanted):
            name, piece, bytes_count = self._pieces.pop()
            arrays.append(self._read_leaves(kv, {leaf_of(name)}, piece)[name])
            bytes_chosen += bytes_count
        copies = evaluate_unsigned(arrays)
        scheduler.rates.copy.add(bytes_chosen, time.perf_counter() - began)
        return copies


def _count_bytes(array: mx.array, piece: Piece) -> int:
    lengths = [part.stop - part.start for part in piece]
    return math.prod((*lengths, *array.shape[len(lengths) :])) * array.itemsize


def _view_all(arrays: list[mx.array]) -> Views:
    return [view_bytes(array) for array in arrays]
