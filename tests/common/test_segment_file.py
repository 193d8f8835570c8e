"""Format of segment files: damage has a reason, and files of mx.save_safetensors can be read."""

from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from support.index.segment_files import write_segment_file
from warmline_common.protocol.tokens import pack_tokens
from warmline_common.storage.segment_file import (
    FileMeta,
    SegmentFileError,
    file_checksum,
    header_checksum,
    read_header,
    read_tokens,
    tensor_checksum,
    verify_file,
)

META = FileMeta(
    kind="segment", id="ab" * 16, fingerprint="f", root="", prefix="ef" * 16, start=3, end=8, parent="cd" * 16
)
TOKENS = pack_tokens(range(5))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "s.safetensors"
    write_segment_file(path, META, TOKENS, {"0.kv.keys": b"k" * 40, "0.kv.values": b"v" * 40})
    return path


def find_reason(path: Path) -> str:
    with pytest.raises(SegmentFileError) as caught:
        verify_file(path)
    return caught.value.reason


def test_read_tokens_and_tensors_of_written_file(path: Path) -> None:
    verify_file(path)
    assert read_header(path).meta == META
    assert read_tokens(path) == TOKENS


def test_read_file_written_by_mlx(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    arrays = {"0.kv.keys": mx.arange(20, dtype=mx.float32).reshape(4, 5), "tokens": mx.arange(5, dtype=mx.uint32)}
    sums = [tensor_checksum(name, 3, 8, [memoryview(arrays[name]).cast("B")]) for name in sorted(arrays)]
    sums.append(header_checksum(META, {"0.kv.keys": ("F32", [4, 5]), "tokens": ("U32", [5])}))
    arrays["checksums"] = mx.array(np.array(sums, dtype=np.uint64))
    mx.save_safetensors(str(path), arrays, {"warmline": META.to_json()})
    verify_file(path)
    assert read_tokens(path) == TOKENS
    assert len(file_checksum(sums)) == 16


def test_flipped_bytes_and_truncation_are_detected(path: Path) -> None:
    whole = path.read_bytes()
    header = read_header(path)
    first = min(place.offset for place in header.tensors.values())
    for at in range(first, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert find_reason(path) == "checksum"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert find_reason(path) == "truncated"


def test_damaged_header_is_never_another_place(path: Path) -> None:
    """Nor for another model's, conversation's or parent's: what it says of itself has a checksum, too."""
    whole = path.read_bytes()
    for at in range(min(place.offset for place in read_header(path).tensors.values())):
        for bit in (1, 4):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            try:
                verify_file(path)
            except SegmentFileError:
                continue
            assert read_header(path).meta == META
            assert read_tokens(path) == TOKENS


def test_error_names_reason(path: Path, tmp_path: Path) -> None:
    assert find_reason(tmp_path / "none") == "missing"
    path.write_bytes(path.read_bytes() + b"x")
    assert find_reason(path) == "truncated"
    mx.save_safetensors(str(path), {"a": mx.zeros(3)})
    assert find_reason(path) == "foreign"
    write_segment_file(path, msgspec.structs.replace(META, format=99), TOKENS, {})
    assert find_reason(path) == "foreign"
    write_segment_file(path, META, pack_tokens(range(4)), {})
    assert find_reason(path) == "tokens"


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    """Each is sound by itself; but a few bytes would stand for as many as anybody likes in a copy."""
    names = [f"{number}.kv.keys" for number in range(20)]
    data, shapes = b"k" * 40, {name: ("U8", [1, 1, 5, 8]) for name in names} | {"tokens": ("U32", [5])}
    sums = [tensor_checksum(name, 3, 8, [data]) for name in sorted(names)]
    sums += [tensor_checksum("tokens", 3, 8, [TOKENS]), header_checksum(META, shapes)]
    place = {"dtype": "U8", "shape": [1, 1, 5, 8], "data_offsets": (0, 40)}
    fields: dict[str, object] = dict.fromkeys(names, place)
    fields["tokens"] = {"dtype": "U32", "shape": [5], "data_offsets": (40, 60)}
    fields["checksums"] = {"dtype": "U64", "shape": [len(sums)], "data_offsets": (60, 60 + 8 * len(sums))}
    text = msgspec.json.encode({"__metadata__": {"warmline": META.to_json()}} | fields)
    packed = b"".join(value.to_bytes(8, "little") for value in sums)
    path = tmp_path / "bomb"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data + TOKENS + packed)
    assert find_reason(path) == "checksum"


def test_checkpoint_is_bound_to_position(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    meta = FileMeta(kind="checkpoint", id="a", fingerprint="f", root="", prefix="", start=7, end=7, position=7)
    write_segment_file(path, meta, None, {"0.arrays.0": b"s" * 16})
    verify_file(path)
    path.write_bytes(path.read_bytes().replace(b'\\"position\\":7', b'\\"position\\":8'))
    assert find_reason(path) == "checksum"
