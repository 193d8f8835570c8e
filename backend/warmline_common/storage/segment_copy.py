"""Copies of segment or checkpoint files: all rows or some, under another id, in another namespace.

Bytes are copied, never computed with: no mlx.  They are compared with their checksums on the way, so that a copy is
as sound as its source, or is not made.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from warmline_common.protocol.messages import SavedFile
from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_common.storage import disk
from warmline_common.storage.segment_file import (
    DTYPE_BYTES,
    TOKENS_TENSOR,
    FileMeta,
    SegmentFileError,
    SegmentHeader,
    TensorInfo,
    iter_tensor_bytes,
    read_checksums_from,
    tensor_hasher,
)
from warmline_common.storage.segment_writer import Bytes, SegmentWriter, update_hasher

ROWS_AXIS = 2  # of a segment's tensors: (1, heads, rows, width)


class SegmentCopy:
    """File that `meta` names, with the rows of [meta.start, meta.end) of an open source file.

    Coded tensors are decoded, for whoever can't read them, unless `keeps_coding`.  Raises SegmentFileError; a
    checkpoint is copied whole.
    """

    def __init__(self, source: BinaryIO, header: SegmentHeader, meta: FileMeta, keeps_coding: bool = False) -> None:
        self._source, self._header = source, header
        whole = meta.kind == "checkpoint"
        span = (0, 1) if whole else (meta.start - header.meta.start, meta.end - header.meta.start)
        rows = 1 if whole else header.meta.end - header.meta.start
        if meta.kind != header.meta.kind or not 0 <= span[0] < span[1] <= rows:
            raise SegmentFileError("rows", f"[{meta.start}, {meta.end}) of [{header.meta.start}, {header.meta.end})")
        self._row_range = _RowRange(*span, rows)
        shapes = {
            name: self._row_range.slice_shape(name, header.tensors[name]) for name in header.list_checksummed_names()
        }
        self._expected_checksums = header.verify(read_checksums_from(source, header))
        self._writer = SegmentWriter(meta, shapes, keeps_coding and header.is_coded)

    @property
    def meta(self) -> FileMeta:
        return self._writer.meta

    @property
    def checksum(self) -> str:
        """As in SavedFile, once `read_chunks` has ended."""
        return self._writer.checksum

    @property
    def is_coded(self) -> bool:
        return self._writer.is_coded

    @property
    def bytes_count(self) -> int:
        """Bytes of all chunks together, unless they are coded."""
        return self._writer.bytes_count

    @property
    def tensor_count(self) -> int:
        """Number of tensors without tokens and checksums."""
        return len(self._header.select_kv_tensors())

    def read_chunks(self) -> Iterator[Bytes]:
        """Bytes of the copy in order.  They are verified at its end; where they are coded, `read_header` replaces the
        first ones then.
        """
        return self._writer.iter_chunks(self._read_tensor)

    def read_header(self) -> bytes:
        """The header, once `read_chunks` has ended."""
        return self._writer.header

    def _read_tensor(self, name: str) -> Iterator[Bytes]:
        """Selected bytes of one tensor; all are compared with their checksum."""
        place, hasher = self._header.tensors[name], tensor_hasher(name, *self._header.meta.span)
        parts = update_hasher(hasher, iter_tensor_bytes(self._source, place))
        yield from _select_spans(parts, self._row_range.iter_byte_spans(name, place))
        if hasher.intdigest() != self._expected_checksums[name]:
            raise SegmentFileError("checksum", f"{name} of {self._header.meta.kind} {self._header.meta.id}")


def _select_spans(parts: Iterator[Bytes], spans: Iterator[tuple[bool, int]]) -> Iterator[Bytes]:
    """The bytes of selected spans, of (selected, bytes) in order; reads all parts."""
    view = memoryview(b"")
    for is_selected, length in spans:
        while length:
            if not view:
                view = memoryview(next(parts))
            part, view = view[:length], view[length:]
            length -= len(part)
            if is_selected:
                yield part


class _RowRange:
    """Rows [first, end) of all `rows`, in each of a segment's tensors.  Pure."""

    def __init__(self, first: int, end: int, rows: int) -> None:
        self._first, self._end, self._rows = first, end, rows

    @property
    def _is_whole(self) -> bool:
        return (self._first, self._end) == (0, self._rows)

    def slice_shape(self, name: str, tensor: TensorInfo) -> tuple[str, Sequence[int]]:
        """(dtype, shape) of the selected rows of a tensor."""
        if self._is_whole:
            return tensor.dtype, tensor.shape
        count = self._end - self._first
        if name == TOKENS_TENSOR:
            return tensor.dtype, (count * TOKEN_BYTES // DTYPE_BYTES[tensor.dtype],)
        if len(tensor.shape) != 4 or tensor.shape[ROWS_AXIS] != self._rows:
            raise SegmentFileError(
                "rows", f"{name} of shape {list(tensor.shape)} has not one of {self._rows} rows each"
            )
        return tensor.dtype, (*tensor.shape[:ROWS_AXIS], count, *tensor.shape[ROWS_AXIS + 1 :])

    def iter_byte_spans(self, name: str, tensor: TensorInfo) -> Iterator[tuple[bool, int]]:
        """(selected, bytes) of a tensor's spans in order."""
        if self._is_whole:
            yield True, tensor.bytes_count
            return
        heads = 1 if name == TOKENS_TENSOR else math.prod(tensor.shape[:ROWS_AXIS])
        row = tensor.bytes_count // (heads * self._rows) if heads else 0
        for _ in range(heads):
            yield False, self._first * row
            yield True, (self._end - self._first) * row
            yield False, (self._rows - self._end) * row


def write_copy(path: Path, make_copy: Callable[[], SegmentCopy]) -> SavedFile:
    """Write the copy that `make_copy` returns, complete and durable.  Blocks; raises SegmentFileError, OSError.

    Written again where its draft is gone: a backend that starts meanwhile sweeps drafts, once.
    """
    try:
        return _write(path, make_copy())
    except FileNotFoundError:
        return _write(path, make_copy())


def _write(path: Path, copy: SegmentCopy) -> SavedFile:
    size = disk.write_durable(path, copy.read_chunks(), copy.read_header if copy.is_coded else None)
    return SavedFile(id=copy.meta.id, bytes_written=size, checksum=copy.checksum)
