"""Segment and checkpoint files: evaluated arrays out to disk, verified bytes back into arrays.

Only `as_bytes` and `Loaded.build` run on the engine thread.  Writers read memory that the engine has evaluated and
touches no more; loaders fill arrays that they make and evaluate themselves, for the engine to take over.  The frame of
a file is `warmline_common.storage.segment_file`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from warmline_backend.kv_cache.codecs import CacheLayout, CodecKind, round_up_to_buffer
from warmline_backend.kv_cache.kv import KV, NamedArrays, select_fields
from warmline_common.protocol.messages import CheckpointRef, SavedFile, SegmentRef
from warmline_common.protocol.tokens import TOKEN_BYTES, count_common_tokens, prefix_digests, unpack_tokens
from warmline_common.storage import disk
from warmline_common.storage.segment_file import (
    CHECKSUMS_TENSOR,
    TOKENS_TENSOR,
    FileMeta,
    SegmentFileError,
    SegmentHeader,
    TensorInfo,
    encode_header,
    file_checksum,
    header_checksum,
    read_header,
    tensor_checksum,
)

T = TypeVar("T")

DTYPES = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
    "C64": mx.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Python's buffer protocol has no bfloat16, so bytes are always reached through an unsigned type of the same width.
UNSIGNED_DTYPES = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
READ_BYTES_MAX = 64 << 20  # one read call; some systems refuse 2 GiB and more


class BadChainError(Exception):
    """The request makes no sense: a gap, a position that is not the chain's, a checkpoint that is not there."""


class OperationCancelledError(Exception):
    """The save or restore was given up by its caller."""


@dataclass(frozen=True)
class RawTensor:
    """An evaluated array as its raw bytes; `keeps` holds the memory that `data` looks into."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    keeps: object = None


def expose_bytes(arrays: NamedArrays) -> dict[str, RawTensor]:
    """Evaluate arrays and expose their bytes.  Engine thread."""
    carried = {name: array.view(UNSIGNED_DTYPES[array.dtype.size]) for name, array in arrays.items()}
    mx.eval(carried)
    return {
        name: RawTensor(DTYPE_NAMES[arrays[name].dtype], arrays[name].shape, _view_bytes(array), array)
        for name, array in carried.items()
    }


def _view_bytes(array: mx.array) -> memoryview:
    buffer: Any = array  # has the buffer protocol, though its type stub doesn't say so
    return memoryview(buffer).cast("B") if array.nbytes else memoryview(b"")


# ---- writing


def write_segment_file(path: Path, meta: FileMeta, tensors: dict[str, RawTensor], tokens: bytes = b"") -> SavedFile:
    """Write, fsync and rename one file; when this returns it is durable.  Raises OSError, and leaves nothing then."""
    if meta.kind == "segment":
        tensors = {**tensors, TOKENS_TENSOR: RawTensor("U32", (len(tokens) // TOKEN_BYTES,), memoryview(tokens))}
    names = sorted(tensors)
    checksums = [tensor_checksum(name, *meta.span, [tensors[name].data]) for name in names]
    shapes: dict[str, tuple[str, Sequence[int]]] = {name: (tensors[name].dtype, tensors[name].shape) for name in names}
    checksums.append(header_checksum(meta, shapes))
    packed = b"".join(value.to_bytes(8, "little") for value in checksums)
    head = encode_header(meta, shapes | {CHECKSUMS_TENSOR: ("U64", (len(checksums),))})
    written = disk.write_durable(path, [head, *(tensors[name].data for name in names), packed])
    return SavedFile(id=meta.id, bytes_written=written, checksum=file_checksum(checksums))


def delete_drafts(folder: Path) -> int:
    """Delete what a process that died in the midst of a save has left.  Returns how many; before any save."""
    swept = 0
    for draft in list(folder.glob(f"*/.*{disk.DRAFT_SUFFIX}")):
        with suppress(OSError):  # the disk is read-only, or worse: who saves will say so
            disk.delete(draft)
            swept += 1
    return swept


# ---- reading


class DamagedFileError(Exception):
    """A file of the chain can't be used: `bad` names it, tokens below `good_prefix` come from files that can."""

    def __init__(self, file_id: str, good_prefix: int, reason: str, detail: str) -> None:
        super().__init__(f"{file_id}: {reason}: {detail}")
        self.file_id, self.good_prefix, self.reason, self.detail = file_id, good_prefix, reason, detail


@dataclass(frozen=True)
class _ByteBuffer:
    """An array that a reader fills through its bytes.  Made and read on the engine thread, filled on any."""

    dtype: str
    shape: tuple[int, ...]
    array: mx.array  # of the unsigned type of the same width
    data: memoryview

    @classmethod
    def allocate(cls, dtype: str, shape: tuple[int, ...]) -> "_ByteBuffer":
        array = mx.zeros(shape, UNSIGNED_DTYPES[DTYPES[dtype].size])
        mx.eval(array)
        return cls(dtype, shape, array, _view_bytes(array))

    def view_typed(self) -> mx.array:
        """What was read, under its own type; shares the memory."""
        return self.array.view(DTYPES[self.dtype])


@dataclass(frozen=True)
class _RowTarget:
    """Where the rows of one tensor go: positions [first, position) of every head."""

    buffer: _ByteBuffer  # (1, heads, rows of room, width)
    first: int

    @property
    def row_bytes(self) -> int:
        """One row of one head."""
        return self.buffer.shape[3] * self.buffer.array.dtype.size


@dataclass
class LoadedChain:
    """Rows and state of [0, position), read and verified, not yet a cache."""

    position: int
    tokens: bytes
    bytes_read: int = 0
    rows: dict[str, _RowTarget] = field(default_factory=dict)
    state: dict[str, _ByteBuffer] = field(default_factory=dict)

    def build(self, layout: CacheLayout) -> KV:
        """The KV that these bytes are.  Engine thread."""
        state = {name: carrier.view_typed() for name, carrier in self.state.items()}
        arrays = state | {name: target.buffer.view_typed() for name, target in self.rows.items()}
        built = (
            leaf.codec.build(select_fields(arrays, leaf.name), self.position, leaf.template) for leaf in layout.leaves
        )
        kv = KV.from_leaves(layout, unpack_tokens(self.tokens), built)
        if state:
            kv.checkpoints[self.position] = state
        mx.eval([layer.state for layer in kv.layers], list(state.values()))
        return kv


class EngineRunner(Protocol):
    """Runs `work` on the engine thread and waits for what it returns."""

    def __call__(self, work: Callable[[], T]) -> T: ...


@dataclass(frozen=True)
class ChainLoader:
    """Reads chains of one model.  `segment_file` maps an id to its path; `pool` reads segments side by side.

    `on_engine` has work done on the engine thread: arrays are made there, and nowhere else.
    """

    layout: CacheLayout
    row_names: frozenset[str]  # every tensor that a segment of this model has
    fingerprint: str
    segment_file: Callable[[str], Path]
    reader_pool: Executor
    run_on_engine: EngineRunner

    def load(
        self,
        tokens: bytes,
        chain: list[SegmentRef],
        checkpoint: CheckpointRef | None,
        is_cancelled: Callable[[], bool],
        root: bytes = b"",
    ) -> LoadedChain:
        """Read and verify all that continuing after `tokens` takes.  Raises Damaged, Cancelled, BadChain.

        `root`: whose chain it is; what was saved under another one is foreign.
        """
        loaded = LoadedChain(len(tokens) // TOKEN_BYTES, tokens)
        _check_chain(chain, checkpoint, loaded.position, self.layout)
        prefixes = prefix_digests(root, tokens, [*(link.start for link in chain), loaded.position])
        headers = [self._read_segment_header(link) for link in chain]
        if headers:
            loaded.rows = self.run_on_engine(lambda: self._allocate_targets(loaded.position, headers[0]))
        jobs = [
            self.reader_pool.submit(self._read_segment, link, header, prefixes[link.start], loaded, is_cancelled)
            for link, header in zip(chain, headers, strict=True)
        ]
        try:
            for job in jobs:  # in order, so that the first damage found is the shallowest
                loaded.bytes_read += job.result()
        finally:
            for job in jobs:
                job.cancel()
            for job in jobs:  # none may write into memory that nobody holds any more
                if not job.cancelled():
                    job.exception()
        if checkpoint is not None:
            self._read_state(checkpoint, prefixes[loaded.position], loaded)
        return loaded

    def _read_segment_header(self, segment_ref: SegmentRef) -> SegmentHeader:
        """The header of a link that is what the index says it is, of this model, in this place."""
        try:
            header = read_header(self.segment_file(segment_ref.id))
        except SegmentFileError as error:
            raise DamagedFileError(segment_ref.id, segment_ref.start, error.reason, error.detail) from error
        meta = header.meta
        if meta.fingerprint != self.fingerprint:
            raise DamagedFileError(
                segment_ref.id, segment_ref.start, "foreign", f"made by another model ({meta.fingerprint[:12]})"
            )
        if header.select_kv_tensors().keys() != self.row_names:
            raise DamagedFileError(segment_ref.id, segment_ref.start, "foreign", "its tensors are not this model's")
        if (meta.kind, meta.id, meta.start, meta.end) != (
            "segment",
            segment_ref.id,
            segment_ref.start,
            segment_ref.end,
        ):
            raise DamagedFileError(
                segment_ref.id, segment_ref.start, "foreign", f"{meta.kind} {meta.id} of [{meta.start}, {meta.end})"
            )
        return header

    def _allocate_targets(self, position: int, header: SegmentHeader) -> dict[str, _RowTarget]:
        """Room for [0, position) of every tensor with rows; for rotating layers, of their window.  Engine thread."""
        room, targets = round_up_to_buffer(position), {}
        for leaf in self.layout.leaves:
            if leaf.codec.kind is CodecKind.STATE:
                continue
            windowed = leaf.codec.kind is CodecKind.WINDOW
            first = max(0, position - leaf.template.max_size) if windowed else 0
            rows = position - first if windowed else room
            for name, place in select_fields(header.tensors, leaf.name).items():
                one, heads, _, width = place.shape
                carrier = _ByteBuffer.allocate(place.dtype, (one, heads, rows, width))
                targets[f"{leaf.name}.{name}"] = _RowTarget(carrier, first)
        return targets

    def _read_segment(
        self,
        segment_ref: SegmentRef,
        header: SegmentHeader,
        prefix: str,
        loaded_chain: LoadedChain,
        is_cancelled: Callable[[], bool],
    ) -> int:
        try:
            _check_prefix(header.meta, prefix)
            with disk.open_to_read(self.segment_file(segment_ref.id)) as file:
                reader = _TensorReader(file, header)
                self._check_tokens(segment_ref, reader, loaded_chain)
                for name, target in loaded_chain.rows.items():
                    if is_cancelled():
                        raise OperationCancelledError
                    if segment_ref.upto > target.first:
                        reader.read_rows(name, target, segment_ref.upto)
                return reader.bytes_read
        except SegmentFileError as error:
            raise DamagedFileError(segment_ref.id, segment_ref.start, error.reason, error.detail) from error
        except OSError as error:
            raise DamagedFileError(segment_ref.id, segment_ref.start, _classify_os_error(error), str(error)) from error

    def _check_tokens(self, segment_ref: SegmentRef, reader: "_TensorReader", loaded_chain: LoadedChain) -> None:
        """Equality decides, here too: the file's own tokens against those of the prompt."""
        wanted = loaded_chain.tokens[segment_ref.start * TOKEN_BYTES : segment_ref.upto * TOKEN_BYTES]
        stored = reader.read_tensor(TOKENS_TENSOR)
        equal = count_common_tokens(stored, wanted)
        if equal < segment_ref.upto - segment_ref.start:
            raise SegmentFileError("tokens", f"differs at token {segment_ref.start + equal}")

    def _read_state(self, checkpoint: CheckpointRef, prefix: str, loaded_chain: LoadedChain) -> None:
        try:
            path = self.segment_file(checkpoint.id)
            header = read_header(path)
            meta = header.meta
            wanted = ("checkpoint", checkpoint.id, loaded_chain.position, self.fingerprint)
            if (meta.kind, meta.id, meta.position, meta.fingerprint) != wanted:
                raise SegmentFileError("foreign", f"{meta.kind} {meta.id} at {meta.position}")
            _check_prefix(meta, prefix)
            loaded_chain.state = self.run_on_engine(
                lambda: {
                    name: _ByteBuffer.allocate(place.dtype, place.shape)
                    for name, place in header.select_kv_tensors().items()
                }
            )
            with disk.open_to_read(path) as file:
                reader = _TensorReader(file, header)
                for name, carrier in loaded_chain.state.items():
                    reader.read_into(name, carrier.data)
                loaded_chain.bytes_read += reader.bytes_read
        except SegmentFileError as error:
            raise DamagedFileError(checkpoint.id, loaded_chain.position, error.reason, error.detail) from error
        except OSError as error:
            raise DamagedFileError(
                checkpoint.id, loaded_chain.position, _classify_os_error(error), str(error)
            ) from error


def _classify_os_error(error: OSError) -> str:
    """Whether a file is gone, or can't be read now."""
    return "missing" if isinstance(error, FileNotFoundError) else "io"


def _check_prefix(meta: FileMeta, prefix: str) -> None:
    """What a file holds is true only after the tokens that it was computed after."""
    if meta.prefix != prefix:
        raise SegmentFileError("foreign", f"{meta.kind} {meta.id} was computed after other tokens")


def _check_chain(chain: list[SegmentRef], checkpoint: CheckpointRef | None, position: int, layout: CacheLayout) -> None:
    """Raises BadChain where a chain is not what a restore of `position` tokens takes."""
    reached = 0
    for link in chain:
        if link.start != reached or not link.start < link.upto <= link.end:
            raise BadChainError(
                f"segment {link.id}: [{link.start}, {link.upto}) of end {link.end} after {reached} tokens"
            )
        reached = link.upto
    if reached != position or position == 0:
        raise BadChainError(f"the chain holds {reached} tokens, the request names {position}")
    if layout.has_states and (checkpoint is None or checkpoint.position != position):
        raise BadChainError(f"a model with recurrent layers needs a checkpoint at {position}")


class _TensorReader:
    """Reads tensors of one open file, each compared with its checksum.  Raises SegmentFileError, OSError."""

    def __init__(self, file: FileIO, header: SegmentHeader) -> None:
        self._file = file
        self._header = header
        self.bytes_read = 0
        place = header.tensors[CHECKSUMS_TENSOR]
        packed = bytearray(place.bytes_count)
        self._fill(memoryview(packed), place.offset)
        checksums = [int.from_bytes(packed[at : at + 8], "little") for at in range(0, len(packed), 8)]
        header.verify(checksums)
        self._expected_checksums = dict(zip(header.list_checksummed_names(), checksums[:-1], strict=True))

    def read_tensor(self, name: str) -> bytes:
        data = bytearray(self._header.tensors[name].bytes_count)
        self.read_into(name, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, data: memoryview) -> None:
        self._fill(data, self._header.tensors[name].offset)
        self._verify_checksum(name, [data])

    def read_rows(self, name: str, target: _RowTarget, upto: int) -> None:
        """Rows [max(start, target.first), upto) of every head, straight into place.

        What else the tensor holds is read for its checksum alone.
        """
        place, meta = self._header.tensors.get(name), self._header.meta
        carrier = target.buffer
        if place is None or place.dtype != carrier.dtype or place.shape[1::2] != carrier.shape[1::2]:
            raise SegmentFileError("foreign", f"{name} is {place and (place.dtype, place.shape)}")
        if place.shape[2] != meta.end - meta.start:
            raise SegmentFileError("rows", f"{name} has {place.shape[2]} rows for [{meta.start}, {meta.end})")
        self._verify_checksum(name, self._read_strips(place, target, upto))

    def _read_strips(self, place: TensorInfo, target: _RowTarget, upto: int) -> Iterator[memoryview]:
        """Head by head: the rows before the wanted ones, the wanted ones in their place, those behind them."""
        start, end = self._header.meta.start, self._header.meta.end
        row, room = target.row_bytes, target.buffer.shape[2]
        first = max(start, target.first)
        before, after = memoryview(bytearray((first - start) * row)), memoryview(bytearray((end - upto) * row))
        offset = place.offset
        for head in range(place.shape[1]):
            into = (head * room + first - target.first) * row
            for strip in (before, target.buffer.data[into : into + (upto - first) * row], after):
                self._fill(strip, offset)
                offset += strip.nbytes
                yield strip

    def _fill(self, into: memoryview, offset: int) -> None:
        self._file.seek(offset)
        done = 0
        while done < into.nbytes:
            count = self._file.readinto(into[done : done + READ_BYTES_MAX])
            if not count:
                raise SegmentFileError("truncated", "the file became shorter while it was read")
            done += count
        self.bytes_read += done

    def _verify_checksum(self, name: str, pieces: Iterable[memoryview]) -> None:
        if tensor_checksum(name, *self._header.meta.span, pieces) != self._expected_checksums[name]:
            raise SegmentFileError("checksum", f"{name} of {self._header.meta.kind} {self._header.meta.id}")
