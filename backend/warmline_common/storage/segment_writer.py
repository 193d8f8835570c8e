"""Bytes of a new segment or checkpoint file in order, its tensors coded or not."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import xxhash

from warmline_common.storage.segment_file import (
    CHECKSUMS_TENSOR,
    CODED_DTYPE,
    CODING_RATIO_MAX,
    DTYPE_BYTES,
    FileMeta,
    encode_header,
    file_checksum,
    header_checksum,
    tensor_hasher,
)

Bytes = bytes | bytearray | memoryview
PIECE_BYTES_MAX = 4 << 20
CODED_BYTES_MIN = 1024  # of a tensor: a frame of less is hardly shorter


class SegmentWriter:
    """File that `meta` names, with tensors of these dtypes and shapes, those of bfloat16 coded where `is_coded`.

    Coded sizes are known at the end: the first chunk is then a header of the final length, which `header` replaces.
    Used once, on one thread.
    """

    def __init__(self, meta: FileMeta, shapes: Mapping[str, tuple[str, Sequence[int]]], is_coded: bool) -> None:
        self._shapes = {name: shapes[name] for name in sorted(shapes)}
        sizes = {name: math.prod(shape) * DTYPE_BYTES[dtype] for name, (dtype, shape) in self._shapes.items()}
        self._coded_bytes = {  # at most; and what was written, once a tensor is coded
            name: CODING_RATIO_MAX * size
            for name, size in sizes.items()
            if is_coded and shapes[name][0] == CODED_DTYPE and size >= CODED_BYTES_MIN
        }
        self.meta = meta.with_coding(bool(self._coded_bytes))
        self.decoded_bytes = sum(sizes.values())
        self.checksum = ""  # as in SavedFile, once `iter_chunks` has ended
        self.header = self._encode_header()

    @property
    def bytes_count(self) -> int:
        """Size of the file, unless it is coded."""
        return len(self.header) + self.decoded_bytes + 8 * (len(self._shapes) + 1)

    @property
    def is_coded(self) -> bool:
        return bool(self._coded_bytes)

    def iter_chunks(self, read_tensor: Callable[[str], Iterable[Bytes]]) -> Iterator[Bytes]:
        """All bytes in order; `read_tensor` returns the decoded bytes of a tensor, cut anywhere.

        A chunk is valid until the next.
        """
        yield self.header
        checksums: list[int] = []
        for name in self._shapes:
            hasher = tensor_hasher(name, *self.meta.span)
            pieces = update_hasher(hasher, read_tensor(name))
            yield from self._code(name, pieces) if name in self._coded_bytes else pieces
            checksums.append(hasher.intdigest())
        checksums.append(header_checksum(self.meta, self._shapes))
        self.checksum = file_checksum(checksums)
        self.header = self._encode_header(len(self.header))
        yield b"".join(value.to_bytes(8, "little") for value in checksums)

    def _code(self, name: str, parts: Iterable[Bytes]) -> Iterator[Bytes]:
        from warmline_common.storage import segment_coding  # here, since most files have no coded tensors

        self._coded_bytes[name] = 0
        for chunk in segment_coding.encode(parts):
            self._coded_bytes[name] += len(chunk)
            yield chunk

    def _encode_header(self, bytes_min: int = 0) -> bytes:
        checksums = {CHECKSUMS_TENSOR: ("U64", (len(self._shapes) + 1,))}
        return encode_header(self.meta, self._shapes | checksums, self._coded_bytes, bytes_min)


def update_hasher(hasher: xxhash.xxh3_64, parts: Iterable[Bytes]) -> Iterator[memoryview]:
    """The parts, each given to the hasher before; large ones in pieces, which are still in the processor's cache."""
    for part in parts:
        for start in range(0, len(part), PIECE_BYTES_MAX):
            piece = memoryview(part)[start : start + PIECE_BYTES_MAX]
            hasher.update(piece)
            yield piece
