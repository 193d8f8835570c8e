"""Segment and checkpoint files: evaluated arrays out to disk, verified bytes back into arrays.

Only `expose_bytes`, the allocation of buffers and `LoadedChain.build` run on the engine thread.  Writers read memory
that the engine has evaluated and no longer changes; readers fill buffers made for them on the engine thread.  The file
format is `warmline_common.storage.segment_file`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import mlx.core as mx

from warmline_backend.kv_cache.batch_caches import round_up_to_buffer
from warmline_backend.kv_cache.byte_buffers import (
    DTYPE_NAMES,
    BufferShape,
    ByteBuffer,
    allocate_buffers,
    evaluate_unsigned,
    view_bytes,
)
from warmline_backend.kv_cache.codecs import CacheLayout, CodecKind
from warmline_backend.kv_cache.kv import KV, NamedArrays, select_fields
from warmline_backend.kv_cache.tensor_reader import ReadStats, TensorReader
from warmline_common.protocol.messages import CheckpointRef, SavedFile, SegmentRef
from warmline_common.protocol.tokens import TOKEN_BYTES, TokenArray, count_common_tokens, prefix_digests
from warmline_common.storage import disk, segment_file
from warmline_common.storage.drafts import make_draft_path
from warmline_common.storage.segment_file import FileMeta, SegmentFileError, SegmentHeader
from warmline_common.storage.segment_writer import SegmentWriter

JOB_BYTES_MIN = 16 << 20  # of a reader, unless its segment is smaller


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
    unsigned = evaluate_unsigned(arrays.values())
    return {
        name: RawTensor(DTYPE_NAMES[array.dtype], array.shape, view_bytes(evaluated), evaluated)
        for (name, array), evaluated in zip(arrays.items(), unsigned, strict=True)
    }


# ---- writing


@dataclass(frozen=True)
class TensorStream:
    """Tensors of a file that are made while it is written.

    `read` returns the bytes of a tensor, cut anywhere; it is called once for each, in the order of their names.
    """

    shapes: Mapping[str, tuple[str, Sequence[int]]]  # dtype, shape
    read: Callable[[str], Iterable[bytes | memoryview]]


def write_segment_file(
    path: Path,
    meta: FileMeta,
    tensors: Mapping[str, RawTensor] | TensorStream,
    tokens: bytes = b"",
    is_coded: bool = False,
    owner: str = "",
) -> SavedFile:
    """Write, fsync and rename one file, its tensors of bfloat16 coded where `is_coded`; durable on return.

    `owner`: the instance of the backend, for the draft's name.  Raises OSError, and what the stream raises; leaves no
    file then.
    """
    if not isinstance(tensors, TensorStream):
        held = tensors
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in held.items()}
        tensors = TensorStream(shapes, lambda name: [held[name].data])
    if meta.kind == "segment":
        tensors = _add_tokens(tensors, tokens)
    writer = SegmentWriter(meta, tensors.shapes, is_coded)
    read_head = (lambda: writer.header) if writer.is_coded else None
    draft = make_draft_path(path, owner)
    written = disk.write_durable(path, writer.iter_chunks(tensors.read), read_head, draft)
    return SavedFile(id=meta.id, bytes_written=written, checksum=writer.checksum)


def _add_tokens(tensors: TensorStream, tokens: bytes) -> TensorStream:
    name, shape = segment_file.TOKENS_TENSOR, ("U32", (len(tokens) // TOKEN_BYTES,))
    return TensorStream({**tensors.shapes, name: shape}, lambda each: [tokens] if each == name else tensors.read(each))


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


_Buffers = dict[str, ByteBuffer]  # by the tensor's name
EngineRunner = Callable[[Callable[[], _Buffers]], _Buffers]  # runs its argument on the engine thread, and waits


@dataclass
class LoadedChain:
    """Rows and state of [0, position), read and verified, not yet a cache."""

    position: int
    tokens: bytes
    stats: ReadStats = field(default_factory=ReadStats)
    rows: _Buffers = field(default_factory=dict)
    state: _Buffers = field(default_factory=dict)

    def build(self, layout: CacheLayout) -> KV:
        """Make a KV of the loaded buffers.  Engine thread."""
        arrays = {name: buffer.array for name, buffer in (self.rows | self.state).items()}
        state = {name: arrays[name] for name in self.state}
        built = (
            leaf.codec.build(select_fields(arrays, leaf.name), self.position, leaf.template) for leaf in layout.leaves
        )
        kv = KV.from_leaves(layout, TokenArray.from_bytes(self.tokens), built)
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
        tokens_max: int = 0,
    ) -> LoadedChain:
        """Read and verify the rows and state of `tokens`; files saved under another `root` are foreign.

        The buffers have room for `tokens_max` tokens, whose content is undefined.  Raises DamagedFileError,
        OperationCancelledError, BadChainError.
        """
        loaded = LoadedChain(len(tokens) // TOKEN_BYTES, tokens)
        _check_chain(chain, checkpoint, loaded.position, self.layout)
        prefixes = prefix_digests(root, tokens, [*(ref.start for ref in chain), loaded.position])
        headers = [self._read_segment_header(ref) for ref in chain]
        if headers:
            shapes = self._shape_rows(loaded.position, max(loaded.position, tokens_max), headers[0])
            loaded.rows = self.run_on_engine(lambda: allocate_buffers(shapes))
        read = partial(self._read_tensors, loaded=loaded, is_cancelled=is_cancelled)
        jobs = [
            self.reader_pool.submit(read, ref, header, prefixes[ref.start], names)
            for ref, header in zip(chain, headers, strict=True)
            for names in _divide_tensors(header, [segment_file.TOKENS_TENSOR, *loaded.rows])
        ]
        loaded.stats += _collect_stats(jobs)
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

    def _shape_rows(self, position: int, tokens_max: int, header: SegmentHeader) -> dict[str, BufferShape]:
        """Shapes of buffers for the rows [0, tokens_max), or those in a window at `position`, of each tensor."""
        shapes = {}
        for leaf in self.layout.leaves:
            if leaf.codec.kind is CodecKind.STATE:
                continue
            first, rows = 0, round_up_to_buffer(tokens_max)
            if leaf.codec.kind is CodecKind.WINDOW:
                first = max(0, position - leaf.template.max_size)
                rows = position - first
            for name, info in select_fields(header.tensors, leaf.name).items():
                one, heads, _, width = info.shape
                shapes[f"{leaf.name}.{name}"] = BufferShape(info.dtype, (one, heads, rows, width), first)
        return shapes

    def _read_tensors(
        self,
        ref: SegmentRef,
        header: SegmentHeader,
        prefix: str,
        names: Sequence[str],
        *,
        loaded: LoadedChain,
        is_cancelled: Callable[[], bool],
    ) -> ReadStats:
        """Compare the tokens of a segment, and read other tensors into their buffers; returns the bytes read.

        Reader thread.
        """
        with _translate_file_errors(ref.id, ref.start):
            _check_prefix(header.meta, prefix)
            with disk.open_to_read(self.segment_file(ref.id)) as file:
                reader = TensorReader(file, header)
                for name in names:
                    if is_cancelled():
                        raise OperationCancelledError
                    if name == segment_file.TOKENS_TENSOR:
                        self._check_tokens(ref, reader, loaded)
                    elif ref.upto > loaded.rows[name].shape.first:
                        reader.read_rows(name, loaded.rows[name], ref.upto)
                return reader.stats

    def _check_tokens(self, ref: SegmentRef, reader: TensorReader, loaded: LoadedChain) -> None:
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
            shapes = {name: BufferShape(info.dtype, info.shape) for name, info in tensors}
            loaded.state = self.run_on_engine(lambda: allocate_buffers(shapes))
            with disk.open_to_read(path) as file:
                reader = TensorReader(file, header)
                for name, buffer in loaded.state.items():
                    reader.read_into(name, buffer.data)
                loaded.stats += reader.stats


def _divide_tensors(header: SegmentHeader, names: list[str]) -> Iterator[list[str]]:
    """Divide the tensors of a segment among readers."""
    group: list[str] = []
    group_bytes = 0
    for name in names:
        group.append(name)
        group_bytes += header.tensors[name].bytes_count
        if group_bytes >= JOB_BYTES_MIN:
            yield group
            group, group_bytes = [], 0
    if group:
        yield group


def _collect_stats(jobs: list["Future[ReadStats]"]) -> ReadStats:
    """Sum of what the readers did, once none of them writes any more.  Raises the error of the first that failed."""
    try:
        return sum((job.result() for job in jobs), ReadStats())  # in order: the first damage found is the shallowest
    finally:
        for job in jobs:
            job.cancel()
        for job in jobs:  # no reader may write into freed memory
            if not job.cancelled():
                job.exception()


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
