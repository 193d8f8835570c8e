"""Reading of tensors from segment files into memory, decoded and verified, while it is in the processor's cache."""

import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO

import numpy as np

from warmline_backend.kv_cache.byte_buffers import ByteBuffer
from warmline_common.storage import segment_file
from warmline_common.storage.segment_file import SegmentFileError, SegmentHeader, TensorInfo

DISK_BLOCK_BYTES = 512  # of the system's counts
HAS_THREAD_USAGE = hasattr(resource, "RUSAGE_THREAD")  # not on macOS
READ_AHEAD_BYTES = 2 << 20  # of a coded tensor; larger than a block
READ_BYTES_MAX = 4 << 20  # one read call: what it has read is in the processor's cache when its checksum is computed


@dataclass(frozen=True)
class ReadStats:
    """Bytes and times of reads, of all readers together."""

    bytes_read: int = 0
    bytes_decoded: int = 0
    wait_s: float = 0.0  # for the disk: the time in which readers did not compute; 0.0 of the page cache

    def __add__(self, other: "ReadStats") -> "ReadStats":
        return ReadStats(
            self.bytes_read + other.bytes_read,
            self.bytes_decoded + other.bytes_decoded,
            self.wait_s + other.wait_s,
        )


class TensorReader:
    """Reader of one open file; verifies each tensor's checksum.  Raises SegmentFileError, OSError."""

    def __init__(self, file: FileIO, header: SegmentHeader) -> None:
        self._began_s, self._cpu_began_s, self._blocks_began = (
            time.monotonic(),
            time.thread_time(),
            _count_disk_blocks(),
        )
        self._file, self._header, self._read_ahead = file, header, _ReadAhead(self._fill)
        self._bytes_read = self._bytes_decoded = header.tensors[segment_file.CHECKSUMS_TENSOR].bytes_count
        checksums = segment_file.read_checksums_from(file, header)
        header.verify(checksums)
        self._expected_checksums = dict(zip(header.list_checksummed_names(), checksums[:-1], strict=True))

    @property
    def stats(self) -> ReadStats:
        """All that was done since this reader was made, on the same thread."""
        computing_s = time.thread_time() - self._cpu_began_s
        wait_s = max(0.0, time.monotonic() - self._began_s - computing_s)
        disk_bytes = DISK_BLOCK_BYTES * (_count_disk_blocks() - self._blocks_began)
        if HAS_THREAD_USAGE and disk_bytes < self._bytes_read / 2:  # from the page cache: waits for a core or a lock
            wait_s = 0.0
        return ReadStats(self._bytes_read, self._bytes_decoded, wait_s)

    def read_tensor(self, name: str) -> bytes:
        data = bytearray(self._header.tensors[name].bytes_count)
        self.read_into(name, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, data: memoryview) -> None:
        self._verify_checksum(name, self._fill_all(self._header.tensors[name], [data]))

    def read_rows(self, name: str, buffer: ByteBuffer, upto: int) -> None:
        """Read rows [max(start, buffer.first), upto) of every head into the buffer, others for the checksum only."""
        info, meta, shape = self._header.tensors.get(name), self._header.meta, buffer.shape
        if info is None or info.dtype != shape.dtype or info.shape[1::2] != shape.shape[1::2]:
            raise SegmentFileError("foreign", f"{name} is {info and (info.dtype, info.shape)}")
        if info.shape[2] != meta.end - meta.start:
            raise SegmentFileError("rows", f"{name} has {info.shape[2]} rows for [{meta.start}, {meta.end})")
        self._verify_checksum(name, self._fill_all(info, self._iter_strips(info, buffer, upto)))

    def _iter_strips(self, info: TensorInfo, buffer: ByteBuffer, upto: int) -> Iterator[memoryview]:
        """Memory of each head's rows: those before, the needed ones in their buffer, those behind them."""
        start, end = self._header.meta.start, self._header.meta.end
        _, _, buffer_rows, width = buffer.shape.shape
        row_bytes = width * segment_file.DTYPE_BYTES[info.dtype]
        first = max(start, buffer.shape.first)
        before, after = (memoryview(bytearray(rows * row_bytes)) for rows in (first - start, end - upto))
        for head in range(info.shape[1]):
            into = (head * buffer_rows + first - buffer.shape.first) * row_bytes
            yield before
            yield buffer.data[into : into + (upto - first) * row_bytes]
            yield after

    def _fill_all(self, info: TensorInfo, strips: Iterable[memoryview]) -> Iterator[memoryview]:
        """Fill the strips with a tensor's decoded bytes, and yield each piece once it is filled."""
        self._file.seek(info.offset)
        decoded = None
        if info.is_coded:
            self._read_ahead.begin(info.stored_bytes)
            decoded = _PartCopier(segment_file.decode_tensor(info, self._read_ahead.read))
        for strip in strips:
            yield from decoded.fill(strip) if decoded else self._fill(strip)
        self._bytes_decoded += info.bytes_count

    def _fill(self, into: memoryview) -> Iterator[memoryview]:
        while into.nbytes:
            count = self._file.readinto(into[:READ_BYTES_MAX])
            if not count:
                raise SegmentFileError("truncated", "the file became shorter while it was read")
            self._bytes_read += count
            yield into[:count]
            into = into[count:]

    def _verify_checksum(self, name: str, pieces: Iterable[memoryview]) -> None:
        if segment_file.tensor_checksum(name, *self._header.meta.span, pieces) != self._expected_checksums[name]:
            raise SegmentFileError("checksum", f"{name} of {self._header.meta.kind} {self._header.meta.id}")


def _count_disk_blocks() -> int:
    """Blocks that a disk has read for this thread; 0 where the system does not tell."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock if HAS_THREAD_USAGE else 0


class _ReadAhead:
    """Stored bytes of one tensor after the other, in memory that is used again; few reads wait for the disk."""

    def __init__(self, fill: Callable[[memoryview], Iterable[object]]) -> None:
        self._fill = fill
        self._memory, self._at, self._end, self._left = memoryview(b""), 0, 0, 0

    def begin(self, stored_bytes: int) -> None:
        """Begin with a tensor, at the file's position."""
        if not self._memory:
            self._memory = memoryview(bytearray(READ_AHEAD_BYTES))
        self._at, self._end, self._left = 0, 0, stored_bytes

    def read(self, count: int) -> memoryview:
        """The next bytes, valid until the next read; READ_AHEAD_BYTES at most.  Raises SegmentFileError, OSError."""
        if self._end - self._at < count:
            rest = self._end - self._at
            self._memory[:rest] = self._memory[self._at : self._end]
            more = self._memory[rest : rest + self._left]
            for _ in self._fill(more):
                pass
            self._at, self._end, self._left = 0, rest + len(more), self._left - len(more)
        if self._end < self._at + count:
            raise SegmentFileError("truncated", "a coded tensor ends before its last block")
        self._at += count
        return self._memory[self._at - count : self._at]


class _PartCopier:
    """Copies parts, cut anywhere, into memory, cut anywhere else."""

    def __init__(self, parts: Iterator[memoryview]) -> None:
        self._parts, self._rest = parts, memoryview(b"")

    def fill(self, into: memoryview) -> Iterator[memoryview]:
        """Fill `into` with the next bytes, and yield each piece once it is filled."""
        while into.nbytes:
            if not self._rest:
                self._rest = next(self._parts)
            piece, into = into[: len(self._rest)], into[len(self._rest) :]
            # With numpy, which lets other readers go on meanwhile: fresh memory is slow to write to for the first time.
            np.copyto(np.frombuffer(piece, np.uint8), np.frombuffer(self._rest[: len(piece)], np.uint8))
            self._rest = self._rest[len(piece) :]
            yield piece
