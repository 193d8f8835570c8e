"""Archives that are made to do harm, or were damaged: refused in one line, and nothing is left."""

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from support.index.archives import ROWS, STATES, TALK, archived, check_content, everything, imported, talk, write_file
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


def repacked(data: bytes, **changed: object) -> bytes:
    """The archive with another manifest, sealed as it should be."""
    manifest, rest = _manifest(data)
    head = encode_manifest(msgspec.structs.replace(manifest, **changed))
    return tar.encode_header(MANIFEST, len(head), 0.0) + head + bytes(tar.padding(len(head))) + rest


def _manifest(data: bytes) -> tuple[Manifest, bytes]:
    first = tar.read_member(io.BytesIO(data), 0, MANIFEST)
    return decode_manifest(data[first.offset : first.offset + first.bytes_count]), data[first.end :]


def entry(kind: bytes, name: str, **fields: object) -> bytes:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT)


def with_second(data: bytes, block: bytes) -> bytes:
    """The archive with another header in the place of its second one."""
    at = tar.read_member(io.BytesIO(data), 0, MANIFEST).end
    return data[:at] + block + data[at + tar.BLOCK_BYTES :]


FIRST = "segments/00000.safetensors"
HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "ends before manifest.json"),
    "no tar": (lambda data: b"x" * 4096, "no tar header"),
    "zeros": (lambda data: bytes(10240), "no tar header"),
    "gzip": (lambda data: b"\x1f\x8b" + data, "no tar header"),
    "traversal": (lambda data: with_second(data, entry(tarfile.REGTYPE, "../../evil")), "'../../evil' .* stands where"),
    "absolute": (lambda data: with_second(data, entry(tarfile.REGTYPE, "/etc/passwd")), "'/etc/passwd'"),
    "link": (lambda data: with_second(data, entry(tarfile.SYMTYPE, FIRST, linkname="/etc/passwd")), "type b'2'"),
    "hard link": (lambda data: with_second(data, entry(tarfile.LNKTYPE, FIRST, linkname="x")), "type b'1'"),
    "folder": (lambda data: with_second(data, entry(tarfile.DIRTYPE, FIRST)), "type b'5'"),
    "device": (lambda data: with_second(data, entry(tarfile.CHRTYPE, FIRST)), "type b'3'"),
    "sparse": (lambda data: with_second(data, entry(tarfile.GNUTYPE_SPARSE, FIRST, size=1 << 60)), "type b'S'"),
    "pax": (lambda data: with_second(data, entry(tarfile.XHDTYPE, "x", size=1 << 60)), "stands where"),
    "long name": (lambda data: with_second(data, entry(tarfile.GNUTYPE_LONGNAME, "x", size=1 << 60)), "stands where"),
    "huge": (lambda data: with_second(data, entry(tarfile.REGTYPE, FIRST, size=1 << 62)), "bytes, the manifest says"),
    "negative": (lambda data: with_second(data, entry(tarfile.REGTYPE, FIRST, size=-1)), "makes no sense"),
    "huge manifest": (lambda data: entry(tarfile.REGTYPE, MANIFEST, size=1 << 40), "are allowed"),
    "cut manifest": (lambda data: data[:900], "not whole"),
    "cut": (lambda data: data[:-4000], "not whole"),
    "without its end": (lambda data: data[: -tar.END_BYTES], "not whole"),
    "more behind it": (lambda data: data[:-1] + b"x", "stands behind its end"),
    "two archives": (lambda data: data + data, "stands behind its end"),
    "endless zeros": (lambda data: data + bytes(2 << 20), "goes on behind its end"),
    "files swapped": (lambda data: swapped(data), "stands where|the manifest says"),
    "other format": (lambda data: repacked(data, format=2), "format 2, this version reads 1"),
    "other model": (lambda data: repacked(data, fingerprint="0123456789ab" + "0" * 52), "made by another model"),
    "other tokens": (lambda data: repacked(data, tokens=pack_tokens([*TALK[:299], 5])), "not those of the manifest"),
    "other first token": (
        lambda data: repacked(data, tokens=pack_tokens([5, *TALK[1:]])),
        "not those of",
    ),
    "half a token": (lambda data: repacked(data, tokens=b"xyz"), "makes no sense"),
    "no segments": (lambda data: repacked(data, segments=[]), "can't be read"),
    "turn beyond": (lambda data: beyond(data), "a turn that ends at 4000"),
    "segments in a circle": (lambda data: bent(data), "makes no sense: a segment of"),
}


def swapped(data: bytes) -> bytes:
    manifest, rest = _manifest(data)
    sizes = [tar.BLOCK_BYTES + size + tar.padding(size) for _, size in manifest.members]
    first, second = rest[: sizes[0]], rest[sizes[0] : sum(sizes[:2])]
    return data[: -len(rest)] + second + first + rest[sum(sizes[:2]) :]


def beyond(data: bytes) -> bytes:
    return repacked(data, session=msgspec.structs.replace(_manifest(data)[0].session, turn_end=4000))


def bent(data: bytes) -> bytes:
    segments = _manifest(data)[0].segments
    return repacked(data, segments=[msgspec.structs.replace(segments[0], end=250), *segments[1:]])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_in_one_line_and_leaves_nothing(index: Index, other: Index, name: str) -> None:
    make, expected = HOSTILE[name]
    data = make(archived(index, talk(index)))
    known = KnownModels(fingerprints=(), description="")
    with pytest.raises(ArchiveError, match=expected) as raised:
        imported(other, data, known=known)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 300
    assert everything(other.home) == {} and other.segments() == [] and other.totals().bytes_writing == 0


@pytest.mark.parametrize("nested", [b"[" * 200_000, b'{"a":' * 200_000])
def test_brackets_without_end_are_refused(other: Index, nested: bytes) -> None:
    head = b'{"xxh3_128":"","manifest":' + nested
    data = tar.encode_header(MANIFEST, len(head), 0.0) + head + bytes(tar.padding(len(head)))
    with pytest.raises(ArchiveError, match="can't be read"):
        imported(other, data)


def test_a_file_with_other_shapes_is_refused(index: Index, other: Index, tmp_path: Path) -> None:
    """Each is sound by itself; but rows of another width can't follow."""
    data = archived(index, talk(index))
    manifest, rest = _manifest(data)
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
        imported(other, lying)
    assert everything(other.home) == {}


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("pipe", "no plain file"), ("", "no plain file"), ("nothing", "can't be read: No such file")):
        with pytest.raises(ArchiveError, match=why), open_archive(tmp_path / name):
            raise AssertionError


def test_no_flipped_byte_gives_a_wrong_answer(index: Index, tmp_path: Path) -> None:
    """At every place, or nearly: it is refused and leaves nothing, or changes nothing that counts."""
    data = archived(index, talk(index))
    home = make_home(tmp_path / "fuzzed")
    harmless = 0
    with Index(home, BUDGET) as victim:
        for at in range(0, len(data), 11):
            flipped = data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]
            try:
                imported(victim, flipped)
            except ArchiveError:
                assert everything(home) == {}
                continue
            harmless += 1
            check_content(victim, TALK, checkpoints=STATES)
            purge(victim, PurgeRequest(everything=True))
        assert verify_index(victim, deep=True) == [] and victim.segments() == []
    assert harmless < 10, "spaces in a file's header"
