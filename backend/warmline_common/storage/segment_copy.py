"""Copies of segment or checkpoint files: all rows or some, under another id, in another namespace.

Bytes are copied, never computed with: no mlx.  They are compared with their checksums on the way, so that a copy is
as sound as its source, or is not made.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from warmline_common.protocol.messages import SavedFile
from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_common.storage import disk
from warmline_common.storage.segment_file import (
    CHECKSUMS_TENSOR,
    DTYPE_BYTES,
    TOKENS_TENSOR,
    FileMeta,
    SegmentFileError,
    SegmentHeader,
    TensorInfo,
    encode_header,
    file_checksum,
    header_checksum,
    iter_bytes,
    read_checksums_from,
    tensor_hasher,
)

ROWS_AXIS = 2  # of a segment's tensors: (1, heads, rows, width)


class SegmentCopy:
    """File that `meta` names, with the rows of [meta.start, meta.end) of an open source file.

    Raises SegmentFileError; a checkpoint is copied whole.
    """

    def __init__(self, source: BinaryIO, header: SegmentHeader, meta: FileMeta) -> None:
        self.meta = meta
        self.checksum = ""  # as in SavedFile, once `read_chunks` has ended
        self._source, self._header = source, header
        whole = meta.kind == "checkpoint"
        span = (0, 1) if whole else (meta.start - header.meta.start, meta.end - header.meta.start)
        rows = 1 if whole else header.meta.end - header.meta.start
        if meta.kind != header.meta.kind or not 0 <= span[0] < span[1] <= rows:
            raise SegmentFileError("rows", f"[{meta.start}, {meta.end}) of [{header.meta.start}, {header.meta.end})")
        self._row_range = _RowRange(*span, rows)
        self._shapes = {
            name: self._row_range.slice_shape(name, header.tensors[name]) for name in header.list_checksummed_names()
        }
        self._expected_checksums = header.verify(read_checksums_from(source, header))
        checksums_shape = (len(self._expected_checksums) + 1,)
        self._encoded_header = encode_header(meta, self._shapes | {CHECKSUMS_TENSOR: ("U64", checksums_shape)})

    @property
    def bytes_count(self) -> int:
        """Bytes of all chunks together."""
        tensors = sum(math.prod(shape) * DTYPE_BYTES[dtype] for dtype, shape in self._shapes.values())
        return len(self._encoded_header) + tensors + 8 * (len(self._shapes) + 1)

    @property
    def tensor_count(self) -> int:
        """Number of tensors without tokens and checksums."""
        return len(self._header.select_kv_tensors())

    def read_chunks(self) -> Iterator[bytes]:
        """Bytes of the copy in order.  They are verified at its end."""
        yield self._encoded_header
        checksums: list[int] = []
        for name in self._shapes:
            checksums.append((yield from self._copy_tensor(name)))
        checksums.append(header_checksum(self.meta, self._shapes))
        self.checksum = file_checksum(checksums)
        yield b"".join(value.to_bytes(8, "little") for value in checksums)

    def _copy_tensor(self, name: str) -> Generator[bytes, None, int]:
        """Selected bytes of one tensor; returns their checksum."""
        place, old = self._header.tensors[name], tensor_hasher(name, *self._header.meta.span)
        new = tensor_hasher(name, *self.meta.span)
        self._source.seek(place.offset)
        for is_selected, length in self._row_range.iter_byte_spans(name, place):
            for part in iter_bytes(self._source, length):
                old.update(part)
                if is_selected:
                    new.update(part)
                    yield part
        if old.intdigest() != self._expected_checksums[name]:
            raise SegmentFileError("checksum", f"{name} of {self._header.meta.kind} {self._header.meta.id}")
        return new.intdigest()


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
    size = disk.write_durable(path, copy.read_chunks())
    return SavedFile(id=copy.meta.id, bytes_written=size, checksum=copy.checksum)
