"""Conversations out of one home and into another, whatever the archive and the other home are like."""

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from index_helpers import BUDGET, make_home, turn
from moving_helpers import FINGERPRINT, KNOWN, ROWS, archived, check_content, everything, imported, save, write_file

from warmline_proxy.index import Index, NoRoom
from warmline_proxy.moving import importing, tar
from warmline_proxy.moving.archive import open_archive, read_archive
from warmline_proxy.moving.exporting import Export
from warmline_proxy.moving.importing import Known, import_archive, known_from_files
from warmline_proxy.moving.manifest import MANIFEST, Manifest, sealed, unsealed
from warmline_proxy.moving.tar import ArchiveError
from warmline_proxy.purge import purge
from warmline_proxy.reconcile import reconcile
from warmline_proxy.rows import PurgeRequest, SavePlan
from warmline_wire.keys import namespace, pack_tokens, unpack_tokens
from warmline_wire.segment_file import FileMeta, read_header, read_tokens

TALK = list(range(1000, 1300))
STATES = [100, 200, 300]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Index]:
    """Another home's index; its invariants are checked after every test."""
    with Index(make_home(tmp_path / "other"), BUDGET) as index:
        yield index
        assert index.verify(deep=True) == []


def talk(index: Index, tenant: str = "") -> str:
    """In three segments, the last one of two branches; and beside it a conversation that leaves it in the middle."""
    save(index, TALK[:120], [100], tenant=tenant, client="mine")
    save(index, TALK[:220], [100, 200], tenant=tenant, client="mine")
    session = save(index, TALK, STATES, tenant=tenant, client="mine")
    save(index, [*TALK[:250], 7, 8, 9], tenant=tenant, client="secret-other")
    return session


# ---- there and back


@pytest.mark.parametrize(("old_tenant", "new_tenant"), [("", ""), ("a", "b")])
def test_a_conversation_arrives_whole(index: Index, other: Index, old_tenant: str, new_tenant: str) -> None:
    session = talk(index, old_tenant)
    data = archived(index, session)
    told = imported(other, data, new_tenant)
    assert (told.tokens, told.tokens_known, told.segments, told.checkpoints) == (300, 0, 3, 3)
    check_content(other, TALK, new_tenant, STATES)
    row = other.session(told.session)
    assert row is not None and (row.client, row.tokens, row.turn_end, row.requests) == ("mine", 300, 299, 3)
    assert other.segments()[0].root == namespace(FINGERPRINT, new_tenant)
    assert reconcile(other).files_without_row == 0


def test_an_archive_is_a_tar_that_holds_this_conversation_alone(index: Index) -> None:
    session = talk(index, "tenant-a")
    data = archived(index, session)
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        names = opened.getnames()
    assert names[0] == MANIFEST and len(names) == 7
    assert pack_tokens([7, 8, 9]) not in data and b"secret-other" not in data
    assert namespace(FINGERPRINT, "tenant-a").hex().encode() not in data, "nothing says whose it was"


def test_others_rows_do_not_come_along(index: Index, other: Index) -> None:
    talk(index)
    left = next(row.id for row in index.sessions() if row.client == "secret-other")
    told = imported(other, archived(index, left))
    assert told.tokens == 253
    check_content(other, [*TALK[:250], 7, 8, 9], checkpoints=[100, 200])
    assert other.match(namespace(FINGERPRINT), pack_tokens(TALK), 300).tokens == 250
    assert max(row.end for row in other.segments()) == 253


def test_what_is_stored_already_is_skipped(index: Index, other: Index) -> None:
    data = archived(index, talk(index))
    save(other, TALK[:170], [100])  # ends within the archive's second segment
    before = {row.id for row in other.segments()}
    told = imported(other, data)
    assert (told.tokens_known, told.segments, told.checkpoints) == (170, 2, 2)
    assert before <= {row.id for row in other.segments()}
    check_content(other, TALK, checkpoints=STATES)
    again = imported(other, data)
    assert (again.tokens_known, again.segments, again.bytes_written) == (300, 0, 0)
    assert again.session == told.session
    row = other.session(told.session)
    assert row is not None and row.requests == 1 + 3, "it is not counted again"
    save(other, [*TALK, *range(50)], client="mine")
    assert imported(other, data).session == told.session and len(other.sessions()) == 1, "nor where it went on"


def test_it_hangs_where_another_conversation_leaves_off(index: Index, other: Index) -> None:
    save(other, [*TALK[:130], 1, 2, 3, 4])
    told = imported(other, archived(index, talk(index)))
    assert told.tokens_known == 130
    check_content(other, TALK, checkpoints=STATES)
    check_content(other, [*TALK[:130], 1, 2, 3, 4], checkpoints=[100])


def test_an_import_is_the_inverse_of_a_purge(index: Index) -> None:
    session = talk(index)
    data = archived(index, session)
    purge(index, PurgeRequest(everything=True))
    assert index.segments() == [] and everything(index.home) == {}
    imported(index, data)
    check_content(index, TALK, checkpoints=STATES)


def test_sampled_turns_come_along_and_replace_none(index: Index, other: Index) -> None:
    session = talk(index)
    root = namespace(FINGERPRINT)
    for number in (1, 2):
        index.note_turn(turn(number, root=root, session=session))
    index.note_turn(turn(3, root=root, session="another"))
    index.flush()
    mine = turn(2, root=namespace(FINGERPRINT, "t"), tokens=pack_tokens([99]))
    other.note_turn(mine)
    other.flush()
    told = imported(other, archived(index, session), "t")
    assert told.turns == 1
    calls = [f"call_{number:024x}" for number in (1, 2, 3)]
    found = other.turns(namespace(FINGERPRINT, "t"), calls)
    assert [unpack_tokens(row.tokens) for row in found] == [[1], [99]]
    assert found[0].session == told.session


# ---- exports that can't be


def test_nothing_is_exported_of_what_is_not_stored(index: Index) -> None:
    with pytest.raises(ArchiveError, match="nothing is stored of session ffff"):
        Export(index, "ffff")


@pytest.mark.parametrize("damage", ["missing", "tensor", "swapped"])
def test_a_damaged_conversation_is_not_exported(index: Index, damage: str) -> None:
    session = talk(index)
    row = index.path(index.sessions()[0].leaf)[0]
    path = index.home.segment_file(row.id)
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "tensor":
        path.write_bytes(whole[:-60] + bytes([whole[-60] ^ 1]) + whole[-59:])
    else:
        path.write_bytes(index.home.segment_file(index.path(index.sessions()[0].leaf)[1].id).read_bytes())
    with pytest.raises(ArchiveError, match="cachectl verify --deep"):
        archived(index, session)
    path.write_bytes(whole)
    path.chmod(0o600)


def test_what_is_evicted_while_it_is_exported_arrives(index: Index, other: Index) -> None:
    session = talk(index)
    with Export(index, session) as export:
        purge(index, PurgeRequest(everything=True))
        data = b"".join(export.parts())
    imported(other, data)
    check_content(other, TALK, checkpoints=STATES)


# ---- imports that can't be


def test_a_foreign_model_is_refused_unless_it_is_wanted_anyway(index: Index, other: Index) -> None:
    data = archived(index, talk(index))
    elsewhere = Known(fingerprints={"9" * 64}, what="the model served here is tiny, 999999999999")
    with pytest.raises(ArchiveError, match=r"model-a, fingerprint 0123456789ab, and the model served .* --anyway"):
        imported(other, data, known=elsewhere)
    assert everything(other.home) == {}
    assert imported(other, data, known=elsewhere, anyway=True).tokens == 300
    check_content(other, TALK, checkpoints=STATES)


def test_without_a_served_model_what_is_stored_tells(index: Index, other: Index) -> None:
    assert known_from_files(other).fingerprints == {}
    save(other, [1, 2, 3])
    known = known_from_files(other)
    assert list(known.fingerprints) == [FINGERPRINT] and "model-a 0123456789ab" in known.what
    assert imported(other, archived(index, talk(index)), known=known).tokens == 300


def test_the_budget_holds(index: Index, other: Index) -> None:
    data = archived(index, talk(index))
    save(other, [5] * 50)
    other.budget_bytes = other.totals().bytes_used + 1000
    with pytest.raises(NoRoom, match=r"bytes don't fit into \d+"):
        imported(other, data)
    assert other.match(namespace(FINGERPRINT), pack_tokens([5] * 50), 50).tokens == 50, "nothing went in vain"
    other.budget_bytes = BUDGET
    imported(other, data)


def test_a_full_disk_is_told_with_figures(index: Index, other: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    data = archived(index, talk(index))
    monkeypatch.setattr(importing, "FREE_BYTES_MIN", 1 << 60)
    with pytest.raises(NoRoom, match=r"takes \d+ bytes, and the disk of .* has \d+ left"):
        imported(other, data)


def test_a_failed_write_leaves_nothing(index: Index, other: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    data = archived(index, talk(index))
    written = []

    def failing(*arguments: Any) -> Any:
        written.append(arguments)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    real = importing.disk.write_whole
    monkeypatch.setattr(importing.disk, "write_whole", failing)
    with pytest.raises(OSError, match="No space"):
        imported(other, data)
    assert everything(other.home) == {} and other.totals().bytes_writing == 0 and other.segments() == []


def test_a_kill_in_the_midst_leaves_nothing_after_the_next_start(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are written and the plan stands, when the process ends; what a kill does at each step of the disk itself,
    tests/crash shows of saves, which this is one of."""
    data, home = archived(index, talk(index)), make_home(tmp_path / "killed")

    class Killed(BaseException):
        pass

    def killed(*_: Any, **__: Any) -> Any:
        raise Killed

    with Index(home, BUDGET) as fresh:
        reconcile(fresh)
    with Index(home, BUDGET) as victim, monkeypatch.context() as patched:
        patched.setattr(Index, "commit_save", killed)
        patched.setattr(Index, "abort_save", lambda *_: None)
        with pytest.raises(Killed):
            imported(victim, data)
        assert victim.segments() == [] and len(everything(home)) == 6
    with Index(home, BUDGET) as survivor:
        assert reconcile(survivor).saves_rolled_back == 1
        assert everything(home) == {} and survivor.verify(deep=True) == []


def test_another_save_in_its_place_wins_and_the_rest_is_tried_again(
    index: Index, other: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, begin = archived(index, talk(index)), Index.begin_save

    def overtaken(self: Index, *arguments: Any, **options: Any) -> SavePlan | None:
        plan = begin(self, *arguments, **options)
        monkeypatch.setattr(Index, "begin_save", begin)
        save(self, TALK[:60])
        return plan

    monkeypatch.setattr(Index, "begin_save", overtaken)
    assert imported(other, data).tokens_known == 60
    check_content(other, TALK, checkpoints=STATES)


def test_who_calls_can_end_it(index: Index, other: Index) -> None:
    data = archived(index, talk(index))
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        if done > total * 2 / 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        import_archive(other, read_archive(io.BytesIO(data)), "", KNOWN, progress=progress)
    assert seen[-1][0] <= seen[-1][1] and everything(other.home) == {} and other.segments() == []


# ---- hostile archives


def repacked(data: bytes, **changed: object) -> bytes:
    """The archive with another manifest, sealed as it should be."""
    manifest, rest = _manifest(data)
    head = sealed(msgspec.structs.replace(manifest, **changed))
    return tar.header(MANIFEST, len(head), 0.0) + head + bytes(tar.padding(len(head))) + rest


def _manifest(data: bytes) -> tuple[Manifest, bytes]:
    first = tar.read_member(io.BytesIO(data), 0, MANIFEST)
    return unsealed(data[first.offset : first.offset + first.bytes_count]), data[first.end :]


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
    known = Known(fingerprints=(), what="")
    with pytest.raises(ArchiveError, match=expected) as raised:
        imported(other, data, known=known)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 300
    assert everything(other.home) == {} and other.segments() == [] and other.totals().bytes_writing == 0


@pytest.mark.parametrize("nested", [b"[" * 200_000, b'{"a":' * 200_000])
def test_brackets_without_end_are_refused(other: Index, nested: bytes) -> None:
    head = b'{"xxh3_128":"","manifest":' + nested
    data = tar.header(MANIFEST, len(head), 0.0) + head + bytes(tar.padding(len(head)))
    with pytest.raises(ArchiveError, match="can't be read"):
        imported(other, data)


def test_a_file_with_other_shapes_is_refused(index: Index, other: Index, tmp_path: Path) -> None:
    """Each is sound by itself; but rows of another width can't follow."""
    data = archived(index, talk(index))
    manifest, rest = _manifest(data)
    archive = read_archive(io.BytesIO(data))
    window = archive.window(1).read()
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
    block = tar.header("segments/00001.safetensors", len(file), 0.0)
    rest = rest[:before] + block + file + bytes(tar.padding(len(file))) + rest[after:]
    head = sealed(msgspec.structs.replace(manifest, segments=entries))
    lying = tar.header(MANIFEST, len(head), 0.0) + head + bytes(tar.padding(len(head))) + rest
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
        assert victim.verify(deep=True) == [] and victim.segments() == []
    assert harmless < 10, "spaces in a file's header"


def test_file_meta_names_its_place(index: Index) -> None:
    archive = read_archive(io.BytesIO(archived(index, talk(index))))
    assert {FileMeta} == {type(header.meta) for header in importing.verify(archive)}
