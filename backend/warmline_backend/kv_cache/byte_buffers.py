"""Byte buffers: mlx arrays reached through their bytes, to be written to files, or allocated and filled from them.

Arrays are made on the engine thread.  Their bytes may be read and filled on any other thread once they are evaluated.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import msgspec

from warmline_common.storage.segment_file import DTYPE_BYTES

# Python's buffer protocol has no bfloat16, so bytes are always reached through an unsigned type of the same width.
UNSIGNED_DTYPES = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
DTYPES = {"BOOL": mx.bool_, "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32, "C64": mx.complex64}
DTYPES |= {f"U{8 * width}": dtype for width, dtype in UNSIGNED_DTYPES.items()}
DTYPES |= {"I8": mx.int8, "I16": mx.int16, "I32": mx.int32, "I64": mx.int64}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def evaluate_unsigned(arrays: Iterable[mx.array]) -> list[mx.array]:
    """The arrays as ones of unsigned types, evaluated.  Engine thread."""
    unsigned = [array.view(UNSIGNED_DTYPES[array.dtype.size]) for array in arrays]
    mx.eval(unsigned)
    return unsigned


def view_bytes(array: mx.array) -> memoryview:
    """The bytes of an evaluated array of an unsigned type, writable.

    On some GPUs this moves them to memory that the host can read, and takes as long.
    """
    buffer: Any = array  # has the buffer protocol, though its type stub doesn't say so
    return memoryview(buffer).cast("B") if array.nbytes else memoryview(b"")


@dataclass(frozen=True)
class BufferShape:
    """Shape of a buffer; rows have (1, heads, buffer rows, width) and begin with the position `first`."""

    dtype: str
    shape: tuple[int, ...]
    first: int = 0


@dataclass(frozen=True)
class ByteBuffer:
    """An array that a reader fills through its bytes."""

    shape: BufferShape
    unsigned: mx.array  # of the unsigned type of the same width
    data: memoryview

    @property
    def array(self) -> mx.array:
        """The array in its own type; shares the memory.  Engine thread."""
        return self.unsigned.view(DTYPES[self.shape.dtype])


def allocate_buffers(shapes: Mapping[str, BufferShape]) -> dict[str, ByteBuffer]:
    """Allocate buffers whose content is undefined until it is filled.  Engine thread.

    Zeros would be written to all of the memory once more, on this thread, and on a GPU they would be made on the device
    and copied to the host.
    """
    file: Any = _UnreadFile(shapes)
    loaded: Any = mx.load(file, format="safetensors") if shapes else {}
    mx.eval(loaded)
    return {name: ByteBuffer(shape, loaded[name], view_bytes(loaded[name])) for name, shape in shapes.items()}


class _UnreadFile:
    """File of which only the header is read: mlx allocates its tensors, and their memory stays as it is."""

    closed = False

    def __init__(self, shapes: Mapping[str, BufferShape]) -> None:
        fields, end = {}, 0
        for name, each in shapes.items():
            begin, width = end, DTYPE_BYTES[each.dtype]
            end += math.prod(each.shape) * width
            fields[name] = {"dtype": f"U{8 * width}", "shape": each.shape, "data_offsets": (begin, end)}
        text = msgspec.json.encode(fields)
        self._header = len(text).to_bytes(8, "little") + text
        self._size, self._at = len(self._header) + end, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, into: memoryview) -> int:
        part = self._header[self._at : self._at + len(into)]
        into[: len(part)] = part
        self._at += len(into)
        return len(into)
