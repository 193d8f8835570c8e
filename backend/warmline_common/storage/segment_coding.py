"""Coding of bfloat16 tensors in segment files, bit for bit: zstandard on the upper bytes, lower bytes as they are.

A bfloat16's upper byte is its sign and seven of its eight exponent bits, which take few values in KV; its lower byte is
nearly random.  A tensor is a sequence of blocks of BLOCK_VALUES values, the last may be shorter:

    u32le          bytes of the upper plane as stored; as many as values: stored as it is
    upper plane    a zstandard frame with its content size, or the bytes
    lower plane    a byte a value

So at least half of the decoded bytes are stored, and at most BLOCK_OVERHEAD_BYTES a block more than these.  Needs
numpy and zstandard, which take a while to import: `segment_file` imports this module when it meets a coded tensor.
Any thread; numpy and zstandard release the interpreter's lock.

Errors: CodingError.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

BLOCK_VALUES = 128 << 10
BLOCK_OVERHEAD_BYTES = 4  # its length
VALUE_BYTES = 2
BLOCK_BYTES = BLOCK_VALUES * VALUE_BYTES  # decoded
SECONDS_MIN = 1e-6  # a coarse clock may show 0

# Entropy coding alone: planes hardly repeat, and a search for matches would take most of the time.
_COMPRESSION = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7
)


Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class CodingSample:
    """Measurement on a part of a tensor; rates are of decoded bytes, on one core."""

    stored_share: float  # stored bytes of a decoded one
    encode_bytes_per_s: float
    decode_bytes_per_s: float


class CodingError(Exception):
    """Stored bytes that are no coded tensor of the expected size."""


class _Coders(threading.local):
    """Coders and buffers of one thread."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_COMPRESSION)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _COMPRESSION.window_log)
        self.values = np.empty(BLOCK_VALUES, "<u2")


_coders = _Coders()


def count_blocks(bytes_count: int) -> int:
    """Number of blocks of a tensor of so many decoded bytes."""
    return -(-bytes_count // BLOCK_BYTES)


def is_possible_size(stored_bytes: int, bytes_count: int) -> bool:
    """True where a tensor of `bytes_count` decoded bytes may be stored in `stored_bytes`."""
    least = bytes_count // VALUE_BYTES + count_blocks(bytes_count) * BLOCK_OVERHEAD_BYTES
    return bytes_count % VALUE_BYTES == 0 and least <= stored_bytes <= least + bytes_count // VALUE_BYTES


def encode(parts: Iterable[Bytes]) -> Iterator[Bytes]:
    """Stored bytes of a tensor in order, three parts a block; `parts` are its decoded bytes, cut anywhere.

    A part is valid until the next block begins.
    """
    for block in _iter_blocks(parts):
        yield from _encode_block(np.frombuffer(block, "<u2"))


def _iter_blocks(parts: Iterable[Bytes]) -> Iterator[Bytes]:
    """The bytes of `parts`, cut where blocks end; copied where a block is spread over parts."""
    pending = bytearray()
    for part in parts:
        view = memoryview(part).cast("B")
        if pending:
            missing = BLOCK_BYTES - len(pending)
            pending += view[:missing]
            view = view[missing:]
            if len(pending) < BLOCK_BYTES:
                continue
            yield pending
            pending = bytearray()
        whole = len(view) - len(view) % BLOCK_BYTES
        for start in range(0, whole, BLOCK_BYTES):
            yield view[start : start + BLOCK_BYTES]
        pending += view[whole:]
    if pending:
        yield pending


def _encode_block(values: NDArray[np.uint16]) -> Iterator[Bytes]:
    upper, lower = np.empty(values.size, np.uint8), np.empty(values.size, np.uint8)
    np.right_shift(values, 8, out=upper, casting="unsafe")
    np.copyto(lower, values, casting="unsafe")
    stored: Bytes = _coders.compressor.compress(upper.data)
    if len(stored) >= values.size:
        stored = upper.data
    yield len(stored).to_bytes(BLOCK_OVERHEAD_BYTES, "little")
    yield stored
    yield lower.data


def decode(read: Callable[[int], Bytes], stored_bytes: int, bytes_count: int) -> Iterator[memoryview]:
    """Decoded bytes of a tensor in order, a block at a time, each valid until the next.

    `read` returns exactly as many of the next stored bytes as it is asked for; together these are `stored_bytes`.
    Raises CodingError, and what `read` raises.
    """
    if not is_possible_size(stored_bytes, bytes_count):
        raise CodingError(f"{bytes_count} bytes can't be stored in {stored_bytes}")
    left, values_left = stored_bytes, bytes_count // VALUE_BYTES
    length = bytes(read(BLOCK_OVERHEAD_BYTES)) if values_left else b""
    while values_left:
        count = min(values_left, BLOCK_VALUES)
        values_left -= count
        upper_bytes = int.from_bytes(length, "little")
        block_bytes = upper_bytes + count
        following = BLOCK_OVERHEAD_BYTES if values_left else 0
        left -= BLOCK_OVERHEAD_BYTES + block_bytes
        if upper_bytes > count or left < values_left + count_blocks(values_left * VALUE_BYTES) * BLOCK_OVERHEAD_BYTES:
            raise CodingError(f"a block of {upper_bytes} bytes for {count} values")
        block = memoryview(read(block_bytes + following))  # with the next block's length: one read a block
        yield _decode_block(block[:upper_bytes], block[upper_bytes:block_bytes], count)
        length = bytes(block[block_bytes:])
    if left:
        raise CodingError(f"{left} bytes follow the last block")


def measure(data: memoryview) -> CodingSample:
    """Encode and decode some bytes of a tensor, a block at most; takes less than a millisecond of this thread."""
    part = data[:BLOCK_BYTES]
    began_s = time.thread_time()
    stored = b"".join(encode([part]))
    encoded_s = time.thread_time()
    decoded = sum(len(each) for each in decode(_make_reader(stored), len(stored), len(part)))
    ended_s = time.thread_time()
    encode_s, decode_s = max(encoded_s - began_s, SECONDS_MIN), max(ended_s - encoded_s, SECONDS_MIN)
    return CodingSample(len(stored) / len(part), decoded / encode_s, decoded / decode_s)


def _make_reader(stored: bytes) -> Callable[[int], memoryview]:
    """A `read` of `decode`."""
    rest = memoryview(stored)

    def read(count: int) -> memoryview:
        nonlocal rest
        part, rest = rest[:count], rest[count:]
        return part

    return read


def _decode_block(stored: memoryview, lower: memoryview, count: int) -> memoryview:
    upper = stored if len(stored) == count else _decompress(stored, count)
    values = _coders.values[:count]
    np.copyto(values, np.frombuffer(upper, np.uint8))
    np.left_shift(values, 8, out=values)
    np.bitwise_or(values, np.frombuffer(lower, np.uint8), out=values)
    return values.data.cast("B")


def _decompress(stored: memoryview, count: int) -> bytes:
    """The frame's content, which must be of `count` bytes: a frame can't make this allocate more."""
    try:
        if zstandard.frame_content_size(stored) != count:
            raise CodingError(f"a frame of another size than {count} bytes")
        content = _coders.decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodingError(f"a frame can't be decompressed: {error}") from error
    if len(content) != count:
        raise CodingError(f"a frame of {len(content)} bytes for {count} values")
    return content
