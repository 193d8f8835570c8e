"""Codings of blocks of bfloat16 that are compared; the first one is the product's."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import zstandard
from kv_samples import Bits
from numpy.typing import NDArray

from warmline_common.storage import segment_coding

Bytes = bytes | memoryview
LEVELS = (1, -1)  # of zstd
ESCAPE = 15  # a code of four bits for all exponents but the 15 commonest


@dataclass(frozen=True)
class Candidate:
    """`decode` gets what `encode` returned, and the number of values; its result is checked once, then thrown away."""

    name: str
    encode: Callable[[Bits], Any]
    decode: Callable[[Any, int], Any]
    count_bytes: Callable[[Any], int] = len


def _encode_product(values: Bits) -> bytes:
    return b"".join(segment_coding.encode([values.data.cast("B")]))


def _decode_product(stored: bytes, count: int) -> memoryview:
    rest = memoryview(stored)

    def read(size: int) -> memoryview:
        nonlocal rest
        part, rest = rest[:size], rest[size:]
        return part

    (part,) = segment_coding.decode(read, len(stored), 2 * count)
    return part


def _split(values: Bits) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    return (values >> 8).astype(np.uint8), values.astype(np.uint8)


class _Coders(threading.local):
    """zstandard's coders of one thread, by level: they can't be shared."""

    def __init__(self) -> None:
        self.compressors = {level: zstandard.ZstdCompressor(level=level) for level in LEVELS}
        self.decompressor = zstandard.ZstdDecompressor()


_coders = _Coders()


def _make_zstd(level: int) -> Candidate:
    def encode(values: Bits) -> tuple[bytes, NDArray[np.uint8]]:
        upper, lower = _split(values)
        return _coders.compressors[level].compress(upper.data), lower

    def decode(stored: tuple[bytes, NDArray[np.uint8]], count: int) -> Bits:
        values = np.frombuffer(_coders.decompressor.decompress(stored[0]), np.uint8).astype(np.uint16)
        values <<= 8
        values |= stored[1]
        return values

    return Candidate(f"upper bytes, zstd level {level}", encode, decode, lambda stored: sum(map(len, stored)))


def _encode_shuffled(values: Bits) -> bytes:
    return _coders.compressors[1].compress(b"".join(_split(values)))


def _decode_shuffled(stored: bytes, count: int) -> Bits:
    planes = np.frombuffer(_coders.decompressor.decompress(stored), np.uint8).reshape(2, count)
    return (planes[0].astype(np.uint16) << 8) | planes[1]


@dataclass(frozen=True)
class _Codes:
    """Exponents as codes of four bits; values with another exponent are kept whole."""

    exponents: NDArray[np.uint16]  # by code, in place
    packed: NDArray[np.uint8]  # two codes a byte
    rest: NDArray[np.uint8]  # sign and mantissa
    escapes: NDArray[np.uint32]  # indexes
    escaped: Bits

    @property
    def bytes_count(self) -> int:
        arrays: Iterable[NDArray[Any]] = (self.exponents, self.packed, self.rest, self.escapes, self.escaped)
        return sum(array.nbytes for array in arrays)


def _encode_codes(values: Bits) -> _Codes:
    exponents = ((values >> 7) & 0xFF).astype(np.uint8)
    common = np.argsort(-np.bincount(exponents, minlength=256))[:ESCAPE]
    table = np.full(256, ESCAPE, np.uint8)
    table[common] = np.arange(ESCAPE)
    codes = table[exponents]
    escapes = np.flatnonzero(codes == ESCAPE).astype(np.uint32)
    padded = np.concatenate([codes, np.zeros(len(codes) % 2, np.uint8)])
    rest = ((values >> 8) & 0x80).astype(np.uint8) | (values & 0x7F).astype(np.uint8)
    in_place = np.zeros(16, np.uint16)
    in_place[:ESCAPE] = common.astype(np.uint16) << 7
    return _Codes(in_place, padded[::2] | (padded[1::2] << 4), rest, escapes, values[escapes])


def _decode_codes_numpy(stored: _Codes, count: int) -> Bits:
    pairs = np.arange(256)
    both = np.stack([stored.exponents[pairs & 15], stored.exponents[pairs >> 4]], axis=1).view(np.uint32)[:, 0]
    values = np.take(both, stored.packed).view(np.uint16)[:count]
    values |= stored.rest & 0x7F
    values |= (stored.rest & np.uint8(0x80)).astype(np.uint16) << 8
    values[stored.escapes] = stored.escaped
    return values


def _decode_codes_mlx(stored: _Codes, count: int) -> mx.array:
    """With mlx's operations, on its device."""
    packed, rest = mx.array(stored.packed), mx.array(stored.rest).astype(mx.uint16)
    codes = mx.stack([packed & 15, packed >> 4], axis=1).reshape(-1)[:count]
    values = mx.array(stored.exponents)[codes] | (rest & 0x7F) | ((rest & 0x80) << 8)
    if len(stored.escapes):
        values[mx.array(stored.escapes)] = mx.array(stored.escaped)
    mx.eval(values)
    return values


CANDIDATES = [
    Candidate("upper bytes, zstd's entropy coder", _encode_product, _decode_product),
    *map(_make_zstd, LEVELS),
    Candidate("shuffle, zstd level 1", _encode_shuffled, _decode_shuffled),
    Candidate("4-bit exponents, numpy", _encode_codes, _decode_codes_numpy, lambda stored: stored.bytes_count),
    Candidate("4-bit exponents, mlx", _encode_codes, _decode_codes_mlx, lambda stored: stored.bytes_count),
]
