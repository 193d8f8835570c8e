"""Segment and checkpoint files: evaluated arrays out to disk, verified bytes back into arrays.

Only `expose_bytes` and `LoadedChain.build` run on the engine thread.  Writers read memory that the engine has evaluated
and no longer changes; loaders fill arrays made for them on the engine thread.  The file format is
`warmline_common.storage.segment_file`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import mlx.core as mx

from warmline_backend.kv_cache.codecs import CacheLayout, CodecKind, round_up_to_buffer
from warmline_backend.kv_cache.kv import KV, NamedArrays, select_fields
from warmline_common.protocol.messages import CheckpointRef, SavedFile, SegmentRef
from warmline_common.protocol.tokens import TOKEN_BYTES, count_common_tokens, prefix_digests, unpack_tokens
from warmline_common.storage import disk, segment_file
from warmline_common.storage.segment_file import FileMeta, SegmentFileError, SegmentHeader

# Python's buffer protocol has no bfloat16, so bytes are always reached through an unsigned type of the same width.
UNSIGNED_DTYPES = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
DTYPES = {"BOOL": mx.bool_, "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32, "C64": mx.complex64}
DTYPES |= {f"U{8 * width}": dtype for width, dtype in UNSIGNED_DTYPES.items()}
DTYPES |= {"I8": mx.int8, "I16": mx.int16, "I32": mx.int32, "I64": mx.int64}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
READ_BYTES_MAX = 64 << 20  # one read call; some systems refuse 2 GiB and more


class BadChainError(Exception):
    """The requested chain is invalid: a gap, a wrong end, or a missing checkpoint."""


class OperationCancelledError(Exception):
    """The save or restore was cancelled by its caller."""


@dataclass(frozen=True)
class RawTensor:
    """An evaluated array as raw bytes; `owner` keeps the memory of `data` alive."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    owner: object = None


def expose_bytes(arrays: NamedArrays) -> dict[str, RawTensor]:
    """Evaluate arrays and expose their bytes.  Engine thread."""
    unsigned = {name: array.view(UNSIGNED_DTYPES[array.dtype.size]) for name, array in arrays.items()}
    mx.eval(unsigned)
    return {
        name: RawTensor(DTYPE_NAMES[arrays[name].dtype], arrays[name].shape, _view_bytes(array), array)
        for name, array in unsigned.items()
    }


def _view_bytes(array: mx.array) -> memoryview:
    buffer: Any = array  # has the buffer protocol, though its type stub doesn't say so
    return memoryview(buffer).cast("B") if array.nbytes else memoryview(b"")


# ---- writing


def write_segment_file(path: Path, meta: FileMeta, tensors: dict[str, RawTensor], tokens: bytes = b"") -> SavedFile:
    """Write, fsync and rename one file; durable on return.  Raises OSError, and leaves no file then."""
    if meta.kind == "segment":
        tensors = {
            **tensors,
            segment_file.TOKENS_TENSOR: RawTensor("U32", (len(tokens) // TOKEN_BYTES,), memoryview(tokens)),
        }
    names = sorted(tensors)
    checksums = [segment_file.tensor_checksum(name, *meta.span, [tensors[name].data]) for name in names]
    shapes: dict[str, tuple[str, Sequence[int]]] = {name: (tensors[name].dtype, tensors[name].shape) for name in names}
    checksums.append(segment_file.header_checksum(meta, shapes))
    packed = b"".join(value.to_bytes(8, "little") for value in checksums)
    head = segment_file.encode_header(meta, shapes | {segment_file.CHECKSUMS_TENSOR: ("U64", (len(checksums),))})
    written = disk.write_durable(path, [head, *(tensors[name].data for name in names), packed])
    return SavedFile(id=meta.id, bytes_written=written, checksum=segment_file.file_checksum(checksums))


def delete_drafts(folder: Path) -> int:
    """Delete drafts of saves that a killed process has left, and return their number.  Call before any save."""
    deleted = 0
    for draft in list(folder.glob(f"*/.*{disk.DRAFT_SUFFIX}")):
        with suppress(OSError):  # a read-only disk, or worse, is reported by the first save
            disk.delete(draft)
            deleted += 1
    return deleted


# ---- reading


class DamagedFileError(Exception):
    """A file of the chain is unusable; tokens below `good_prefix` come from intact files."""

    def __init__(self, file_id: str, good_prefix: int, reason: str, detail: str) -> None:
        super().__init__(f"{file_id}: {reason}: {detail}")
        self.file_id, self.good_prefix, self.reason, self.detail = file_id, good_prefix, reason, detail


@contextmanager
def _translate_file_errors(file_id: str, good_prefix: int) -> Iterator[None]:
    """Translate SegmentFileError and OSError of one file into DamagedFileError."""
    try:
        yield
    except SegmentFileError as error:
        raise DamagedFileError(file_id, good_prefix, error.reason, error.detail) from error
    except OSError as error:
        reason = "missing" if isinstance(error, FileNotFoundError) else "io"
        raise DamagedFileError(file_id, good_prefix, reason, str(error)) from error


@dataclass(frozen=True)
class _ByteBuffer:
    """An array that a reader fills through its bytes.  Made and read on the engine thread, filled on any.

    Rows have the shape (1, heads, buffer rows, width) and begin with the position `first`.
    """

    dtype: str
    shape: tuple[int, ...]
    first: int
    array: mx.array  # of the unsigned type of the same width
    data: memoryview

    @classmethod
    def allocate(cls, dtype: str, shape: tuple[int, ...], first: int = 0) -> "_ByteBuffer":
        array = mx.zeros(shape, UNSIGNED_DTYPES[DTYPES[dtype].size])
        mx.eval(array)
        return cls(dtype, shape, first, array, _view_bytes(array))


_Buffers = dict[str, _ByteBuffer]  # by the tensor's name
EngineRunner = Callable[[Callable[[], _Buffers]], _Buffers]  # runs its argument on the engine thread, and waits


@dataclass
class LoadedChain:
    """Rows and state of [0, position), read and verified, not yet a cache."""

    position: int
    tokens: bytes
    bytes_read: int = 0
    rows: _Buffers = field(default_factory=dict)
    state: _Buffers = field(default_factory=dict)

    def build(self, layout: CacheLayout) -> KV:
        """Make a KV of the loaded buffers.  Engine thread."""
        buffers = self.rows | self.state
        arrays = {name: buffer.array.view(DTYPES[buffer.dtype]) for name, buffer in buffers.items()}
        state = {name: arrays[name] for name in self.state}
        built = (
            leaf.codec.build(select_fields(arrays, leaf.name), self.position, leaf.template) for leaf in layout.leaves
        )
        kv = KV.from_leaves(layout, unpack_tokens(self.tokens), built)
        if state:
            kv.checkpoints[self.position] = state
        mx.eval([layer.state for layer in kv.layers], list(state.values()))
        return kv


@dataclass(frozen=True)
class ChainLoader:
    """Reads chains of one model.  `segment_file` maps an id to its path; `reader_pool` reads segments side by side."""

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
        """Read and verify the rows and state of `tokens`; files saved under another `root` are foreign.

        Raises DamagedFileError, OperationCancelledError, BadChainError.
        """
        loaded = LoadedChain(len(tokens) // TOKEN_BYTES, tokens)
        _check_chain(chain, checkpoint, loaded.position, self.layout)
        prefixes = prefix_digests(root, tokens, [*(ref.start for ref in chain), loaded.position])
        headers = [self._read_segment_header(ref) for ref in chain]
        if headers:
            loaded.rows = self.run_on_engine(lambda: self._allocate_rows(loaded.position, headers[0]))
        jobs = [
            self.reader_pool.submit(self._read_segment, ref, header, prefixes[ref.start], loaded, is_cancelled)
            for ref, header in zip(chain, headers, strict=True)
        ]
        try:
            for job in jobs:  # in order, so that the first damage found is the shallowest
                loaded.bytes_read += job.result()
        finally:
            for job in jobs:
                job.cancel()
            for job in jobs:  # no reader may write into freed memory
                if not job.cancelled():
                    job.exception()
        if checkpoint is not None:
            self._read_state(checkpoint, prefixes[loaded.position], loaded)
        return loaded

    def _read_segment_header(self, ref: SegmentRef) -> SegmentHeader:
        """Read the header of a segment, and check that it is of this model and position."""
        with _translate_file_errors(ref.id, ref.start):
            header = segment_file.read_header(self.segment_file(ref.id))
            meta = header.meta
            if meta.fingerprint != self.fingerprint:
                raise SegmentFileError("foreign", f"made by another model ({meta.fingerprint[:12]})")
            if header.select_kv_tensors().keys() != self.row_names:
                raise SegmentFileError("foreign", "its tensors are not this model's")
            expected = ("segment", ref.id, ref.start, ref.end)
            if (meta.kind, meta.id, meta.start, meta.end) != expected:
                raise SegmentFileError("foreign", f"{meta.kind} {meta.id} of [{meta.start}, {meta.end})")
        return header

    def _allocate_rows(self, position: int, header: SegmentHeader) -> _Buffers:
        """Allocate buffers for the rows [0, position), or those in a window, of each tensor.  Engine thread."""
        buffers = {}
        for leaf in self.layout.leaves:
            if leaf.codec.kind is CodecKind.STATE:
                continue
            first, rows = 0, round_up_to_buffer(position)
            if leaf.codec.kind is CodecKind.WINDOW:
                first = max(0, position - leaf.template.max_size)
                rows = position - first
            for name, info in select_fields(header.tensors, leaf.name).items():
                one, heads, _, width = info.shape
                shape = one, heads, rows, width
                buffers[f"{leaf.name}.{name}"] = _ByteBuffer.allocate(info.dtype, shape, first)
        return buffers

    def _read_segment(
        self,
        ref: SegmentRef,
        header: SegmentHeader,
        prefix: str,
        loaded: LoadedChain,
        is_cancelled: Callable[[], bool],
    ) -> int:
        with _translate_file_errors(ref.id, ref.start):
            _check_prefix(header.meta, prefix)
            with disk.open_to_read(self.segment_file(ref.id)) as file:
                reader = _TensorReader(file, header)
                self._check_tokens(ref, reader, loaded)
                for name, buffer in loaded.rows.items():
                    if is_cancelled():
                        raise OperationCancelledError
                    if ref.upto > buffer.first:
                        reader.read_rows(name, buffer, ref.upto)
                return reader.bytes_read

    def _check_tokens(self, ref: SegmentRef, reader: "_TensorReader", loaded: LoadedChain) -> None:
        """Compare the file's tokens with the prompt's: equality decides, not the hash."""
        prompt = loaded.tokens[ref.start * TOKEN_BYTES : ref.upto * TOKEN_BYTES]
        equal = count_common_tokens(reader.read_tensor(segment_file.TOKENS_TENSOR), prompt)
        if equal < ref.upto - ref.start:
            raise SegmentFileError("tokens", f"differs at token {ref.start + equal}")

    def _read_state(self, checkpoint: CheckpointRef, prefix: str, loaded: LoadedChain) -> None:
        with _translate_file_errors(checkpoint.id, loaded.position):
            path = self.segment_file(checkpoint.id)
            header = segment_file.read_header(path)
            meta = header.meta
            expected = ("checkpoint", checkpoint.id, loaded.position, self.fingerprint)
            if (meta.kind, meta.id, meta.position, meta.fingerprint) != expected:
                raise SegmentFileError("foreign", f"{meta.kind} {meta.id} at {meta.position}")
            _check_prefix(meta, prefix)
            tensors = header.select_kv_tensors().items()
            loaded.state = self.run_on_engine(
                lambda: {name: _ByteBuffer.allocate(info.dtype, info.shape) for name, info in tensors}
            )
            with disk.open_to_read(path) as file:
                reader = _TensorReader(file, header)
                for name, buffer in loaded.state.items():
                    reader.read_into(name, buffer.data)
                loaded.bytes_read += reader.bytes_read


def _check_prefix(meta: FileMeta, prefix: str) -> None:
    """Raise SegmentFileError unless the file was computed after the same tokens."""
    if meta.prefix != prefix:
        raise SegmentFileError("foreign", f"{meta.kind} {meta.id} was computed after other tokens")


def _check_chain(chain: list[SegmentRef], checkpoint: CheckpointRef | None, position: int, layout: CacheLayout) -> None:
    """Raise BadChainError where a chain does not restore exactly `position` tokens."""
    reached = 0
    for ref in chain:
        if ref.start != reached or not ref.start < ref.upto <= ref.end:
            raise BadChainError(f"segment {ref.id}: [{ref.start}, {ref.upto}) of end {ref.end} after {reached} tokens")
        reached = ref.upto
    if reached != position or position == 0:
        raise BadChainError(f"the chain holds {reached} tokens, the request names {position}")
    if layout.has_states and (checkpoint is None or checkpoint.position != position):
        raise BadChainError(f"a model with recurrent layers needs a checkpoint at {position}")


class _TensorReader:
    """Reader of one open file; verifies each tensor's checksum.  Raises SegmentFileError, OSError."""

    def __init__(self, file: FileIO, header: SegmentHeader) -> None:
        self._file, self._header = file, header
        self.bytes_read = header.tensors[segment_file.CHECKSUMS_TENSOR].bytes_count
        checksums = segment_file.read_checksums_from(file, header)
        header.verify(checksums)
        self._expected_checksums = dict(zip(header.list_checksummed_names(), checksums[:-1], strict=True))

    def read_tensor(self, name: str) -> bytes:
        data = bytearray(self._header.tensors[name].bytes_count)
        self.read_into(name, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, data: memoryview) -> None:
        self._fill(data, self._header.tensors[name].offset)
        self._verify_checksum(name, [data])

    def read_rows(self, name: str, buffer: _ByteBuffer, upto: int) -> None:
        """Read rows [max(start, buffer.first), upto) of every head into the buffer, others for the checksum only."""
        info, meta = self._header.tensors.get(name), self._header.meta
        if info is None or info.dtype != buffer.dtype or info.shape[1::2] != buffer.shape[1::2]:
            raise SegmentFileError("foreign", f"{name} is {info and (info.dtype, info.shape)}")
        if info.shape[2] != meta.end - meta.start:
            raise SegmentFileError("rows", f"{name} has {info.shape[2]} rows for [{meta.start}, {meta.end})")
        self._verify_checksum(name, self._read_strips(info, buffer, upto))

    def _read_strips(self, info: segment_file.TensorInfo, buffer: _ByteBuffer, upto: int) -> Iterator[memoryview]:
        """Yield each head's rows: those before, the needed ones in their buffer, those behind them."""
        start, end = self._header.meta.start, self._header.meta.end
        row_bytes, buffer_rows = buffer.shape[3] * buffer.array.dtype.size, buffer.shape[2]
        first = max(start, buffer.first)
        before, after = (memoryview(bytearray(rows * row_bytes)) for rows in (first - start, end - upto))
        offset = info.offset
        for head in range(info.shape[1]):
            into = (head * buffer_rows + first - buffer.first) * row_bytes
            for strip in (before, buffer.data[into : into + (upto - first) * row_bytes], after):
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
        if segment_file.tensor_checksum(name, *self._header.meta.span, pieces) != self._expected_checksums[name]:
            raise SegmentFileError("checksum", f"{name} of {self._header.meta.kind} {self._header.meta.id}")
