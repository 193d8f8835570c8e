"""A segment or checkpoint file made of another one: all of its rows or some, under another id, in another namespace.

Bytes are copied, never computed with: no mlx.  What is read is compared with its checksums on the way, so that a copy
is as good as its source, or is not made.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from warmline_common.protocol.messages import SavedFile
from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_common.storage import disk
from warmline_common.storage.segment_file import (
    CHECKSUMS,
    DTYPE_BYTES,
    READ_BYTES,
    TOKENS,
    FileMeta,
    SegmentFileError,
    SegmentHeader,
    TensorPlace,
    checksums_in,
    file_checksum,
    frame,
    header_checksum,
    tensor_hasher,
)

ROWS_AXIS = 2  # of a segment's tensors: (1, heads, rows, width)


class SegmentCopy:
    """The file that `meta` names, with the rows of [meta.start, meta.end), out of an open one that holds them.

    Raises SegmentFileError; a checkpoint is copied whole.
    """

    def __init__(self, source: BinaryIO, header: SegmentHeader, meta: FileMeta) -> None:
        self.meta = meta
        self.checksum = ""  # as in SavedFile, once all `parts` were taken
        self._source, self._header = source, header
        whole = meta.kind == "checkpoint"
        span = (0, 1) if whole else (meta.start - header.meta.start, meta.end - header.meta.start)
        rows = 1 if whole else header.meta.end - header.meta.start
        if meta.kind != header.meta.kind or not 0 <= span[0] < span[1] <= rows:
            raise SegmentFileError("rows", f"[{meta.start}, {meta.end}) of [{header.meta.start}, {header.meta.end})")
        self._cut = _Cut(*span, rows)
        self._shapes = {name: self._cut.shape(name, header.tensors[name]) for name in header.checksummed()}
        checksums = checksums_in(source, header)
        header.verify(checksums)
        self._wanted = dict(zip(header.checksummed(), checksums[:-1], strict=True))
        self._frame = frame(meta, self._shapes | {CHECKSUMS: ("U64", (len(checksums),))})

    @property
    def bytes_count(self) -> int:
        """Of all `parts` together."""
        tensors = sum(math.prod(shape) * DTYPE_BYTES[dtype] for dtype, shape in self._shapes.values())
        return len(self._frame) + tensors + 8 * (len(self._shapes) + 1)

    @property
    def tensor_count(self) -> int:
        """Without tokens and checksums."""
        return len(self._header.content())

    def parts(self) -> Iterator[bytes]:
        """The copy's bytes in order.  Only once all were taken is what came before known to be sound."""
        yield self._frame
        checksums: list[int] = []
        for name in self._shapes:
            checksums.append((yield from self._copied(name)))
        checksums.append(header_checksum(self.meta, self._shapes))
        self.checksum = file_checksum(checksums)
        yield b"".join(value.to_bytes(8, "little") for value in checksums)

    def _copied(self, name: str) -> Generator[bytes, None, int]:
        """One tensor's wanted bytes; returns their checksum."""
        place, old = self._header.tensors[name], tensor_hasher(name, *self._header.meta.span)
        new = tensor_hasher(name, *self.meta.span)
        self._source.seek(place.offset)
        for wanted, length in self._cut.strips(name, place):
            for part in self._read(length):
                old.update(part)
                if wanted:
                    new.update(part)
                    yield part
        if old.intdigest() != self._wanted[name]:
            raise SegmentFileError("checksum", f"{name} of {self._header.meta.kind} {self._header.meta.id}")
        return new.intdigest()

    def _read(self, length: int) -> Iterator[bytes]:
        while length:
            part = self._source.read(min(length, READ_BYTES))
            if not part:
                raise SegmentFileError("truncated", "the file became shorter while it was read")
            length -= len(part)
            yield part


class _Cut:
    """Rows [first, end) of all `rows`, in each of a segment's tensors (pure)."""

    def __init__(self, first: int, end: int, rows: int) -> None:
        self._first, self._end, self._rows = first, end, rows

    @property
    def _is_whole(self) -> bool:
        return (self._first, self._end) == (0, self._rows)

    def shape(self, name: str, place: TensorPlace) -> tuple[str, Sequence[int]]:
        """(dtype, shape) of what is left of a tensor."""
        if self._is_whole:
            return place.dtype, place.shape
        count = self._end - self._first
        if name == TOKENS:
            return place.dtype, (count * TOKEN_BYTES // DTYPE_BYTES[place.dtype],)
        if len(place.shape) != 4 or place.shape[ROWS_AXIS] != self._rows:
            raise SegmentFileError("rows", f"{name} of shape {list(place.shape)} has not one of {self._rows} rows each")
        return place.dtype, (*place.shape[:ROWS_AXIS], count, *place.shape[ROWS_AXIS + 1 :])

    def strips(self, name: str, place: TensorPlace) -> Iterator[tuple[bool, int]]:
        """(wanted, bytes) of a tensor's stretches in their order."""
        if self._is_whole:
            yield True, place.bytes_count
            return
        heads = 1 if name == TOKENS else math.prod(place.shape[:ROWS_AXIS])
        row = place.bytes_count // (heads * self._rows) if heads else 0
        for _ in range(heads):
            yield False, self._first * row
            yield True, (self._end - self._first) * row
            yield False, (self._rows - self._end) * row


def write_copy(path: Path, make: Callable[[], SegmentCopy]) -> SavedFile:
    """The file of what `make` gives, complete and durable.  Blocks; raises SegmentFileError, OSError.

    Made and written anew where its draft is gone: a backend that starts meanwhile sweeps drafts, once.
    """
    try:
        return _write(path, make())
    except FileNotFoundError:
        return _write(path, make())


def _write(path: Path, copy: SegmentCopy) -> SavedFile:
    size = disk.write_whole(path, copy.parts())
    return SavedFile(id=copy.meta.id, bytes_written=size, checksum=copy.checksum)
