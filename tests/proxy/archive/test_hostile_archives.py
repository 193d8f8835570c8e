"""Malicious and damaged archives: refused in one line, with nothing left behind."""

import io
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from support.index.archives import (
    ROWS,
    STATES,
    TALK,
    check_content,
    export_session,
    import_session,
    list_files,
    save_conversations,
    write_file,
)
from support.index.indexes import BUDGET, make_home
from warmline_common.protocol.tokens import pack_tokens
from warmline_common.storage.segment_file import read_header, read_tokens
from warmline_proxy.archive import tar
from warmline_proxy.archive.importer import KnownModels
from warmline_proxy.archive.manifest import MANIFEST, Manifest, decode_manifest, encode_manifest
from warmline_proxy.archive.reader import open_archive, read_archive
from warmline_proxy.archive.tar import ArchiveError
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.retention.purge import purge
from warmline_proxy.store.rows import PurgeRequest


def replace_manifest(data: bytes, **changed: object) -> bytes:
    """Replace fields of the manifest, with a valid checksum."""
    manifest, rest = read_manifest(data)
    head = encode_manifest(msgspec.structs.replace(manifest, **changed))
    return tar.encode_header(MANIFEST, len(head), 0.0) + head + bytes(tar.padding(len(head))) + rest


def read_manifest(data: bytes) -> tuple[Manifest, bytes]:
    first = tar.read_member(io.BytesIO(data), 0, MANIFEST)
    return decode_manifest(data[first.offset : first.offset + first.bytes_count]), data[first.end :]


def make_header(kind: bytes, name: str, **fields: object) -> bytes:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT)


def replace_second_header(data: bytes, block: bytes) -> bytes:
    """Replace the second member's header."""
    at = tar.read_member(io.BytesIO(data), 0, MANIFEST).end
    return data[:at] + block + data[at + tar.BLOCK_BYTES :]


FIRST = "segments/00000.safetensors"
HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "it is no archive"),
    "no tar": (lambda data: b"x" * 4096, "it is no archive"),
    "zeros": (lambda data: bytes(10240), "it is no archive"),
    "gzip": (lambda data: b"\x1f\x8b" + data, "it is no archive"),
    "traversal": (
        lambda data: replace_second_header(data, make_header(tarfile.REGTYPE, "../../evil")),
        "'../../evil' .* is in the place of",
    ),
    "absolute": (
        lambda data: replace_second_header(data, make_header(tarfile.REGTYPE, "/etc/passwd")),
        "'/etc/passwd'",
    ),
    "link": (
        lambda data: replace_second_header(data, make_header(tarfile.SYMTYPE, FIRST, linkname="/etc/passwd")),
        "type b'2'",
    ),
    "hard link": (
        lambda data: replace_second_header(data, make_header(tarfile.LNKTYPE, FIRST, linkname="x")),
        "type b'1'",
    ),
    "folder": (lambda data: replace_second_header(data, make_header(tarfile.DIRTYPE, FIRST)), "type b'5'"),
    "device": (lambda data: replace_second_header(data, make_header(tarfile.CHRTYPE, FIRST)), "type b'3'"),
    "sparse": (
        lambda data: replace_second_header(data, make_header(tarfile.GNUTYPE_SPARSE, FIRST, size=1 << 60)),
        "type b'S'",
    ),
    "pax": (
        lambda data: replace_second_header(data, make_header(tarfile.XHDTYPE, "x", size=1 << 60)),
        "is in the place of",
    ),
    "long name": (
        lambda data: replace_second_header(data, make_header(tarfile.GNUTYPE_LONGNAME, "x", size=1 << 60)),
        "is in the place of",
    ),
    "huge": (
        lambda data: replace_second_header(data, make_header(tarfile.REGTYPE, FIRST, size=1 << 62)),
        "bytes, the manifest says",
    ),
    "negative": (
        lambda data: replace_second_header(data, make_header(tarfile.REGTYPE, FIRST, size=-1)),
        "makes no sense",
    ),
    "huge manifest": (lambda data: make_header(tarfile.REGTYPE, MANIFEST, size=1 << 40), "are allowed"),
    "cut manifest": (lambda data: data[:900], "not whole"),
    "cut": (lambda data: data[:-4000], "not whole"),
    "without its end": (lambda data: data[: -tar.END_BYTES], "not whole"),
    "more behind it": (lambda data: data[:-1] + b"x", "after its end"),
    "two archives": (lambda data: data + data, "after its end"),
    "endless zeros": (lambda data: data + bytes(2 << 20), "continues after its end"),
    "files swapped": (lambda data: swap_segments(data), "is in the place of|the manifest says"),
    "other format": (lambda data: replace_manifest(data, format=2), "format 2, this version reads 1"),
    "other model": (
        lambda data: replace_manifest(data, fingerprint="0123456789ab" + "0" * 52),
        "made by another model",
    ),
    "other tokens": (
        lambda data: replace_manifest(data, tokens=pack_tokens([*TALK[:299], 5])),
        "not those of the manifest",
    ),
    "other first token": (
        lambda data: replace_manifest(data, tokens=pack_tokens([5, *TALK[1:]])),
        "not those of",
    ),
    "half a token": (lambda data: replace_manifest(data, tokens=b"xyz"), "makes no sense"),
    "no segments": (lambda data: replace_manifest(data, segments=[]), "can't be read"),
    "turn beyond": (lambda data: move_turn_end(data), "a turn that ends at 4000"),
    "segments in a circle": (lambda data: overlap_segments(data), "makes no sense: a segment of"),
}


def swap_segments(data: bytes) -> bytes:
    manifest, rest = read_manifest(data)
    sizes = [tar.BLOCK_BYTES + size + tar.padding(size) for _, size in manifest.members]
    first, second = rest[: sizes[0]], rest[sizes[0] : sum(sizes[:2])]
    return data[: -len(rest)] + second + first + rest[sum(sizes[:2]) :]


def move_turn_end(data: bytes) -> bytes:
    return replace_manifest(data, session=msgspec.structs.replace(read_manifest(data)[0].session, turn_end=4000))


def overlap_segments(data: bytes) -> bytes:
    segments = read_manifest(data)[0].segments
    return replace_manifest(data, segments=[msgspec.structs.replace(segments[0], end=250), *segments[1:]])


def test_hostile_archives_are_refused_in_one_line(index: Index, other: Index) -> None:
    data, known = export_session(index, save_conversations(index)), KnownModels(fingerprints=(), description="")
    for name, (make, expected) in HOSTILE.items():
        with pytest.raises(ArchiveError) as raised:
            import_session(other, make(data), known=known)
            pytest.fail(f"{name} was imported")
        message = str(raised.value)
        assert re.search(expected, message) and "\n" not in message and len(message) < 300, (name, message)
        assert list_files(other.home) == {} and other.segments() == [] and other.totals().bytes_writing == 0, name


@pytest.mark.parametrize("nested", [b"[" * 200_000, b'{"a":' * 200_000])
def test_deeply_nested_manifest_is_refused(other: Index, nested: bytes) -> None:
    head = b'{"xxh3_128":"","manifest":' + nested
    data = tar.encode_header(MANIFEST, len(head), 0.0) + head + bytes(tar.padding(len(head)))
    with pytest.raises(ArchiveError, match="can't be read"):
        import_session(other, data)


def test_segment_with_other_tensor_shapes_is_refused(index: Index, other: Index, tmp_path: Path) -> None:
    """Each file is valid by itself, but the tensors' widths differ."""
    data = export_session(index, save_conversations(index))
    manifest, rest = read_manifest(data)
    archive = read_archive(io.BytesIO(data))
    window = archive.open_member(1).read()
    path = tmp_path / "file"
    path.write_bytes(window)
    meta, tokens = read_header(path).meta, read_tokens(path)
    count = meta.end - meta.start
    write_file(path, meta, {ROWS: ("U8", (1, 1, count, 6), bytes(6 * count)), "tokens": ("U32", (count,), tokens)})
    file = path.read_bytes()
    sizes = [size for _, size in manifest.members]
    entries = [*manifest.segments]
    entries[1] = msgspec.structs.replace(entries[1], bytes_count=len(file))
    before = tar.BLOCK_BYTES + sizes[0] + tar.padding(sizes[0])
    after = before + tar.BLOCK_BYTES + sizes[1] + tar.padding(sizes[1])
    block = tar.encode_header("segments/00001.safetensors", len(file), 0.0)
    rest = rest[:before] + block + file + bytes(tar.padding(len(file))) + rest[after:]
    head = encode_manifest(msgspec.structs.replace(manifest, segments=entries))
    lying = tar.encode_header(MANIFEST, len(head), 0.0) + head + bytes(tar.padding(len(head))) + rest
    with pytest.raises(ArchiveError, match="tensors are not those of the first segment"):
        import_session(other, lying)
    assert list_files(other.home) == {}


def test_irregular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("pipe", "no plain file"), ("", "no plain file"), ("nothing", "can't be read: No such file")):
        with pytest.raises(ArchiveError, match=why), open_archive(tmp_path / name):
            raise AssertionError


def test_flipped_bytes_are_refused_or_harmless(index: Index, tmp_path: Path) -> None:
    """Flip a bit of every eleventh byte: the import is refused and leaves no file, or its content is unchanged."""
    data = export_session(index, save_conversations(index))
    home = make_home(tmp_path / "fuzzed")
    harmless = 0
    with Index(home, BUDGET) as victim:
        for at in range(0, len(data), 11):
            flipped = data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]
            try:
                import_session(victim, flipped)
            except ArchiveError:
                assert list_files(home) == {}
                continue
            harmless += 1
            check_content(victim, TALK, checkpoints=STATES)
            purge(victim, PurgeRequest(everything=True))
        assert verify_index(victim, deep=True) == [] and victim.segments() == []
    assert harmless < 10, "only padding in file headers"
