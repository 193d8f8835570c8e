"""Files with coded tensors: read, verified, copied and cut as others are; damage in each part has a reason."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import msgspec
import numpy as np
import pytest

from support.index.segment_files import write_segment_file as write_plain_file
from warmline_common.protocol.tokens import pack_tokens
from warmline_common.storage import disk
from warmline_common.storage.segment_copy import SegmentCopy, write_copy
from warmline_common.storage.segment_file import (
    CODED_SEGMENT_FORMAT,
    FileMeta,
    SegmentFileError,
    file_checksum,
    iter_tensor_bytes,
    read_checksums,
    read_header,
    read_header_from,
    read_tokens,
    verify_file,
    verify_open_file,
)
from warmline_common.storage.segment_writer import SegmentWriter

START, END, HEADS, WIDTH = 3, 43, 2, 64
ROWS = END - START
META = FileMeta(kind="segment", id="ab" * 16, fingerprint="f", root="", prefix="ef" * 16, start=START, end=END)
TOKENS = pack_tokens(range(ROWS))
RANDOM = np.random.default_rng(2)
NUMBERS = RANDOM.normal(size=(1, HEADS, ROWS, WIDTH)).astype("<f4")
KEYS = (NUMBERS.view("<u4") >> 16).astype("<u2")
TENSORS = {
    "0.0.keys": ("BF16", KEYS.shape, KEYS.tobytes()),
    "0.0.scales": ("F16", (1, HEADS, ROWS, 8), bytes(2 * HEADS * ROWS * 8)),
    "tokens": ("U32", (ROWS,), TOKENS),
}
SHAPES = {name: (dtype, shape) for name, (dtype, shape, _) in TENSORS.items()}


def write_file(path: Path, *, is_coded: bool = True) -> SegmentWriter:
    writer = SegmentWriter(META, SHAPES, is_coded)
    disk.write_durable(path, writer.iter_chunks(lambda name: [TENSORS[name][2]]), lambda: writer.header)
    return writer


def read_tensor(path: Path, name: str) -> bytes:
    with path.open("rb") as file:
        return b"".join(iter_tensor_bytes(file, read_header_from(file).tensors[name]))


def find_reason(data: bytes) -> str:
    """Reason why a file of these bytes is refused; "" where it is not."""
    file = BytesIO(data)
    try:
        verify_open_file(file, read_header_from(file))
    except SegmentFileError as error:
        return error.reason
    return ""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "coded"
    write_file(path)
    return path


def test_coded_file_is_smaller_and_holds_the_same(path: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    assert write_file(plain, is_coded=False).bytes_count == plain.stat().st_size
    verify_file(path)
    header = read_header(path)
    assert header.meta == msgspec.structs.replace(META, format=CODED_SEGMENT_FORMAT)
    assert header.is_coded and not read_header(plain).is_coded
    assert abs(header.decoded_bytes - plain.stat().st_size) < 200 and header.file_bytes < plain.stat().st_size
    assert header.tensors["0.0.keys"].stored_bytes < 0.75 * len(TENSORS["0.0.keys"][2])
    for name, (dtype, shape, data) in TENSORS.items():
        assert read_tensor(path, name) == read_tensor(plain, name) == data
        assert (header.tensors[name].dtype, header.tensors[name].shape) == (dtype, tuple(shape))
    assert read_tokens(path) == TOKENS
    assert read_checksums(path)[:-1] == read_checksums(plain)[:-1]  # of the decoded bytes


def test_plain_files_are_written_as_before(tmp_path: Path) -> None:
    """Byte for byte: whatever the version before reads."""
    tensors = {"0.0.keys": b"k" * 40 * ROWS}
    write_plain_file(tmp_path / "before", META, TOKENS, tensors)
    header = read_header(tmp_path / "before")
    assert header.meta.format == 2
    shapes = {name: (place.dtype, place.shape) for name, place in header.tensors.items() if name != "checksums"}
    writer = SegmentWriter(META, shapes, is_coded=False)
    written = b"".join(writer.iter_chunks(lambda name: [(tensors | {"tokens": TOKENS})[name]]))
    assert written[-24:] == (tmp_path / "before").read_bytes()[-24:]  # checksums
    assert b"decoded" not in written
    assert writer.checksum == file_checksum(read_checksums(tmp_path / "before"))


def test_files_without_large_bfloat16_tensors_are_plain() -> None:
    shapes = {
        "0.0.keys": ("F32", (1, 2, ROWS, 64)),
        "0.0.values": ("BF16", (1, 1, ROWS, 1)),
        "tokens": ("U32", (ROWS,)),
    }
    writer = SegmentWriter(META, shapes, is_coded=True)
    assert not writer.is_coded and writer.meta == META


def test_changed_and_missing_bytes_are_found(path: Path) -> None:
    whole = path.read_bytes()
    header = read_header(path)
    for name, place in header.tensors.items():
        end = place.offset + place.stored_bytes
        for at in {*range(place.offset, end, 97), *range(place.offset, place.offset + 32), *range(end - 8, end)}:
            assert find_reason(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]) == "checksum", (name, at)
    for length in range(0, len(whole), 97):
        assert find_reason(whole[:length]) == "truncated"


def test_damaged_header_is_never_another_tensor(path: Path) -> None:
    whole = path.read_bytes()
    for at in range(min(place.offset for place in read_header(path).tensors.values())):
        changed = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        if not find_reason(changed):
            path.write_bytes(changed)
            assert all(read_tensor(path, name) == TENSORS[name][2] for name in TENSORS), at


HEADERS: dict[str, tuple[str, Callable[[dict[str, object]], object]]] = {
    "a coding of another version": ("foreign", lambda keys: keys["decoded"].update(coding="other")),  # type: ignore[attr-defined]
    "another dtype": ("checksum", lambda keys: keys["decoded"].update(dtype="F32")),  # type: ignore[attr-defined]
    "a shape that no memory has": ("checksum", lambda keys: keys["decoded"].update(shape=[1, 1 << 40, ROWS, 64])),  # type: ignore[attr-defined]
    "a larger shape": ("checksum", lambda keys: keys["decoded"].update(shape=[1, HEADS, ROWS, WIDTH + 1])),  # type: ignore[attr-defined]
    "a smaller shape": ("checksum", lambda keys: keys["decoded"].update(shape=[1, HEADS, ROWS, 1])),  # type: ignore[attr-defined]
    "a shape below zero": ("checksum", lambda keys: keys["decoded"].update(shape=[-1, -HEADS, ROWS, WIDTH])),  # type: ignore[attr-defined]
    "no coding": ("checksum", lambda keys: keys.pop("decoded")),
    "no sense": ("checksum", lambda keys: keys.update(decoded=7)),
}


@pytest.mark.parametrize("name", HEADERS)
def test_wrong_header_has_a_reason(name: str, path: Path) -> None:
    reason, change = HEADERS[name]
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    fields = msgspec.json.decode(whole[8 : 8 + length])
    change(fields["0.0.keys"])
    text = msgspec.json.encode(fields)
    assert find_reason(len(text).to_bytes(8, "little") + text + whole[8 + length :]) == reason


def test_coded_tokens_and_unmarked_files_are_refused(path: Path) -> None:
    whole = path.read_bytes()
    assert find_reason(whole.replace(b'\\"format\\":3', b'\\"format\\":2')) == "checksum"
    swapped = whole.replace(b'"tokens":', b'"tokena":').replace(b'"0.0.keys":', b'"tokens"  :')
    assert find_reason(swapped) == "checksum"


@pytest.mark.parametrize("until", [START + 1, START + 17, END])
def test_copy_keeps_rows_coded_or_decodes_them(until: int, path: Path, tmp_path: Path) -> None:
    meta = msgspec.structs.replace(META, id="cd" * 16, end=until)
    for keeps_coding in (True, False):
        target = tmp_path / f"copy {keeps_coding}"
        with path.open("rb") as file:
            header = read_header_from(file)
            saved = write_copy(target, lambda: SegmentCopy(file, header, meta, keeps_coding))  # noqa: B023  called here
            copy = SegmentCopy(file, header, meta, keeps_coding)
        verify_file(target)
        assert saved.bytes_written == target.stat().st_size == read_header(target).file_bytes
        assert saved.checksum == file_checksum(read_checksums(target))
        assert copy.is_coded == read_header(target).is_coded == (keeps_coding and until > START + 16)
        assert copy.is_coded or copy.bytes_count == saved.bytes_written
        assert read_tensor(target, "0.0.keys") == KEYS[:, :, : until - START].tobytes()
        assert read_tokens(target) == TOKENS[: 4 * (until - START)]
        assert not copy.is_coded or saved.bytes_written < 0.85 * read_header(target).decoded_bytes


def test_damage_ends_a_copy(path: Path, tmp_path: Path) -> None:
    keys = read_header(path).tensors["0.0.keys"]
    whole, last = path.read_bytes(), keys.offset + keys.stored_bytes - 1
    path.write_bytes(whole[:last] + bytes([whole[last] ^ 1]) + whole[last + 1 :])
    with path.open("rb") as file:
        copy = SegmentCopy(file, read_header_from(file), META, keeps_coding=True)
        with pytest.raises(SegmentFileError):
            write_copy(tmp_path / "copy", lambda: copy)
    assert not (tmp_path / "copy").exists()
