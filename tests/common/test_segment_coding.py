"""Coding of bfloat16 tensors: every bit comes back, and no stored bytes make decoding read or allocate beyond."""

from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from warmline_common.storage.segment_coding import (
    BLOCK_BYTES,
    BLOCK_OVERHEAD_BYTES,
    BLOCK_VALUES,
    CodingError,
    count_blocks,
    decode,
    encode,
    is_possible_size,
)

Values = NDArray[np.uint16]
RANDOM = np.random.default_rng(1)


def make_kv_like(count: int) -> Values:
    """Upper halves of normally distributed float32 numbers."""
    numbers = RANDOM.normal(size=count).astype("<f4")
    return (numbers.view("<u4") >> 16).astype("<u2")


def make_any(count: int) -> Values:
    return RANDOM.integers(0, 1 << 16, count, "<u2")


def encode_all(values: Values) -> bytes:
    return b"".join(encode([values.tobytes()]))


def decode_all(stored: bytes, bytes_count: int) -> bytes:
    """Decode with a reader that fails where more than the stored bytes is asked for."""
    at = 0

    def read(count: int) -> bytes:
        nonlocal at
        at += count
        assert at <= len(stored), "read beyond the tensor"
        return stored[at - count : at]

    return b"".join(bytes(part) for part in decode(read, len(stored), bytes_count))


SPECIAL = {
    "zeros of both signs": np.array([0x0000, 0x8000] * 50, "<u2"),
    "infinities and NaNs with payloads": np.array([0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF, 0x7FFF] * 9, "<u2"),
    "denormals": np.array([1, 0x7F, 0x8001, 0x807F], "<u2"),
    "every value": np.arange(1 << 16, dtype="<u2"),
    "one value": np.full(BLOCK_VALUES + 1, 0x3F80, "<u2"),
    "no redundancy": make_any(BLOCK_VALUES + 5),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_every_bit_comes_back(name: str) -> None:
    values = SPECIAL[name]
    stored = encode_all(values)
    assert decode_all(stored, values.nbytes) == values.tobytes()
    assert is_possible_size(len(stored), values.nbytes)


@pytest.mark.parametrize("make", [make_kv_like, make_any])
@pytest.mark.parametrize(
    "count", [0, 1, 2, 255, BLOCK_VALUES - 1, BLOCK_VALUES, BLOCK_VALUES + 1, 2 * BLOCK_VALUES + 7]
)
def test_every_length_comes_back(count: int, make: Callable[[int], Values]) -> None:
    values = make(count)
    stored = encode_all(values)
    assert decode_all(stored, values.nbytes) == values.tobytes()
    assert is_possible_size(len(stored), values.nbytes)
    assert count // BLOCK_VALUES <= count_blocks(values.nbytes) <= count // BLOCK_VALUES + 1


@pytest.mark.parametrize("part_bytes", [1, 999, BLOCK_BYTES // 2, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_cuts_of_the_parts_do_not_matter(part_bytes: int) -> None:
    data = make_kv_like(2 * BLOCK_VALUES + 7).tobytes()
    if part_bytes == 1:  # many calls
        data = data[:2000]
    parts = (data[start : start + part_bytes] for start in range(0, len(data), part_bytes))
    assert b"".join(encode(parts)) == b"".join(encode([data]))


def test_kv_takes_less_than_seven_tenths() -> None:
    values = make_kv_like(3 * BLOCK_VALUES)
    assert len(encode_all(values)) < 0.7 * values.nbytes


def test_bytes_without_redundancy_grow_by_block_lengths_alone() -> None:
    values = make_any(2 * BLOCK_VALUES)
    assert len(encode_all(values)) == values.nbytes + 2 * BLOCK_OVERHEAD_BYTES


def test_changed_bytes_give_an_error_or_as_many_bytes() -> None:
    """The checksum finds those that are wrong."""
    values = make_kv_like(500)
    stored = encode_all(values)
    outcomes = set()
    for at in range(len(stored)):
        for bit in (1, 0x80):
            changed = stored[:at] + bytes([stored[at] ^ bit]) + stored[at + 1 :]
            try:
                outcomes.add(len(decode_all(changed, values.nbytes)))
            except CodingError:
                outcomes.add(-1)
    assert outcomes == {-1, values.nbytes}


def test_wrong_sizes_are_errors() -> None:
    values = make_kv_like(BLOCK_VALUES + 9)
    stored = encode_all(values)
    for wrong in (0, 1, values.nbytes - 1, values.nbytes + 2, 1 << 60):
        with pytest.raises(CodingError):
            decode_all(stored, wrong)
    for cut in (stored[:-1], stored[: len(stored) // 2], stored + b"x", b""):
        with pytest.raises(CodingError):
            decode_all(cut, values.nbytes)


def test_sizes_between_the_least_and_the_largest_are_possible() -> None:
    assert is_possible_size(0, 0) and not is_possible_size(1, 0) and not is_possible_size(0, 2)
    assert not is_possible_size(BLOCK_OVERHEAD_BYTES + 9, 20) and is_possible_size(BLOCK_OVERHEAD_BYTES + 10, 20)
    assert is_possible_size(BLOCK_OVERHEAD_BYTES + 20, 20) and not is_possible_size(BLOCK_OVERHEAD_BYTES + 21, 20)
    assert not is_possible_size(BLOCK_OVERHEAD_BYTES + 10, 21)


def frame(content: bytes, **options: object) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)  # type: ignore[arg-type]


COUNT = 4096
FRAMES = {
    "larger content": frame(bytes(COUNT + 1)),
    "smaller content": frame(bytes(COUNT - 1)),
    "content of an unknown size": frame(bytes(COUNT), write_content_size=False),
    "another frame behind it": frame(bytes(COUNT)) + frame(b"more"),
    "bytes behind it": frame(bytes(COUNT)) + b"more",
    "a part of it": frame(bytes(COUNT))[:-1],
    "a frame to skip": b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd",
    "no frame": b"abcdefgh",
    "none": b"",
    # single segment, content size in 8 bytes: a terabyte
    "a size that no memory has": b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + bytes(16),
    # a window of 2 GB, content size in 4 bytes as expected
    "a window that no memory has": b"\x28\xb5\x2f\xfd\x80\xa8" + COUNT.to_bytes(4, "little") + b"\x01\x00\x00",
}


@pytest.mark.parametrize("name", FRAMES)
def test_hostile_frames_are_errors(name: str) -> None:
    stored = len(FRAMES[name]).to_bytes(BLOCK_OVERHEAD_BYTES, "little") + FRAMES[name] + bytes(COUNT)
    with pytest.raises(CodingError):
        decode_all(stored, 2 * COUNT)


@pytest.mark.parametrize("upper_bytes", [COUNT + 1, 1 << 31, (1 << 32) - 1])
def test_lengths_beyond_the_block_are_errors(upper_bytes: int) -> None:
    stored = upper_bytes.to_bytes(BLOCK_OVERHEAD_BYTES, "little") + bytes(2 * COUNT)
    with pytest.raises(CodingError):
        decode_all(stored, 2 * COUNT)
