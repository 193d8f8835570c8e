"""Start-up and repair for each kind of damage alone."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

import msgspec
import pytest

from support.index.damage import (
    OTHER,
    A,
    flip_bit,
    list_chain,
    list_texts,
    open_tables,
    repair_and_verify,
    save_conversations,
)
from support.index.indexes import (
    BUDGET,
    FLAGS_AT,
    OVERFLOW,
    PAGE_BYTES,
    ROOT,
    break_page,
    commit_save,
    count_matched,
    plan_save,
    save,
    write_plan,
)
from support.index.segment_files import rewrite_meta
from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_common.storage.segment_file import file_checksum, read_checksums, read_header
from warmline_proxy.index.index import Index, IndexReader, IndexStoreError
from warmline_proxy.index.recovery.repair import repair
from warmline_proxy.index.recovery.startup import is_sound, reconcile
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.retention.purge import purge
from warmline_proxy.store.files import quarantine_path
from warmline_proxy.store.rows import IndexSnapshot, PurgeRequest, RepairReply, SegmentRow, SessionUpdate
from warmline_proxy.store.tables import DIGEST_KEY, Tables


def list_repairs(reply: RepairReply) -> set[str]:
    return {finding.what for finding in reply.did}


def test_repair_leaves_sound_index_unchanged(index: Index) -> None:
    save_conversations(index)
    running = plan_save(index, [3] * 50)
    write_plan(index.home, running)
    before = index.snapshot()
    assert repair(index, deep=True, is_saving=True).did == []
    assert index.snapshot() == before
    assert commit_save(index, running).tokens_saved == 50


def test_repair_keeps_purged_quarantined_files_that_are_leased(index: Index) -> None:
    save_conversations(index)
    leased = list_chain(index, A)
    index.lease(leased)
    assert set(leased) <= set(index.quarantine(leased[0], "checksum"))
    purge(index, PurgeRequest(everything=True))
    paths = [quarantine_path(index.home, file_id) for file_id in leased]
    assert all(path.exists() for path in paths) and verify_index(index) == []
    assert repair(index, deep=False, is_saving=True).did == []
    assert all(path.exists() for path in paths)
    index.release(leased)
    assert index.sweep() == len(leased) and not any(path.exists() for path in paths)


def test_concurrent_repairs_change_nothing(index: Index) -> None:
    """Saves, quarantines and evictions fall between what a repair sees of the disk and what it does."""
    over = threading.Event()

    def use() -> None:
        for number in range(25):
            save(index, [number, *A[:200]], checkpoints=[100])
            if number % 3 == 1:
                index.quarantine(list_chain(index, [number])[0], "checksum")
            if number % 5 == 4:
                purge(index, PurgeRequest(session=index.sessions()[-1].id))
        over.set()

    thread = threading.Thread(target=use)
    thread.start()
    repairs = 0
    while not over.is_set() or not repairs:
        assert repair(index, deep=False, is_saving=True).did == []
        repairs += 1
    thread.join()
    assert count_matched(index, [24, *A[:200]]) == 201 and count_matched(index, [1, *A[:200]]) == 0


def test_index_is_rebuilt_from_files(home: Home) -> None:
    with Index(home, BUDGET) as index:
        save_conversations(index)
        whole, sessions = list_texts(index), {(row.leaf, row.tokens) for row in index.sessions()}
        states = {(row.segment, row.position) for row in index.snapshot().checkpoints.values()}
    (data,) = home.index.glob("*/data.mdb")
    data.write_bytes(b"garbage" * 10_000)
    with Index(home, BUDGET) as index:
        counts = reconcile(index)
        assert counts.mended and counts.files_without_row == 0
        assert list_texts(index) == whole
        assert {(row.segment, row.position) for row in index.snapshot().checkpoints.values()} == states
        assert {row.model for row in index.segments()} == {"model-a"}
        leaves = {row.id for row in index.segments()} - {row.parent for row in index.segments()}
        assert {(row.leaf, row.tokens) for row in index.sessions()} == {
            (leaf, row.end) for leaf in leaves if (row := index.segment(leaf))
        }
        assert {leaf for leaf, _ in sessions} <= leaves
        assert verify_index(index, deep=True) == []
        save(index, [*A[:400], *range(300)], turn_end=690)
        assert reconcile(index).mended == 0


def test_truncated_index_is_rebuilt(home: Home) -> None:
    with Index(home, BUDGET) as index:
        save_conversations(index)
        whole = list_texts(index)
        index.compact()  # so that no page is a free one, which nobody would miss
    (data,) = home.index.glob("*/data.mdb")
    os.truncate(data, 3 * data.stat().st_size // 4)
    with Index(home, BUDGET) as index:
        assert reconcile(index).mended
        assert list_texts(index) == whole and verify_index(index, deep=True) == []


def test_unreadable_page_after_first_flaw_is_handled(home: Home) -> None:
    """Else the repair would meet it, with the index half written anew."""
    with Index(home, BUDGET) as index:
        save_conversations(index)
        whole = list_texts(index)
    with open_tables(home) as table:
        key, _ = table("segments").entries()[0]
        table("segments").put(key, b"garbage")
    (data,) = home.index.glob("*/data.mdb")
    pages = bytearray(data.read_bytes())
    for at in range(2 * PAGE_BYTES, len(pages), PAGE_BYTES):
        if b"reason" in pages[at : at + PAGE_BYTES]:  # a row of quarantine
            pages[at + FLAGS_AT] = OVERFLOW
    data.write_bytes(pages)
    with Index(home, BUDGET) as index:
        assert reconcile(index).mended
        assert list_texts(index) == whole and verify_index(index, deep=True) == []


def test_crashing_pages_are_not_read(home: Home) -> None:
    """LMDB asserts, and ends the process."""
    with Index(home, BUDGET) as index:
        for number in range(40):  # so many that the segments' rows take some pages
            save(index, [number] * 5)
        whole = list_texts(index)
    break_page(home, max(whole))
    with Index(home, BUDGET) as index:
        assert reconcile(index).mended
        assert list_texts(index) == whole and verify_index(index, deep=True) == []
        assert reconcile(index).mended == 0


def make_fifo(path: Path) -> None:
    disk.delete_tree(path)
    os.mkfifo(path)


def make_file(path: Path) -> None:
    disk.delete_tree(path)
    path.write_bytes(b"x")


def make_folder(path: Path) -> None:
    disk.delete_tree(path)
    path.mkdir()


def make_dangling_link(path: Path) -> None:
    disk.delete_tree(path)
    path.symlink_to("/nowhere/at/all")


ODD_PATHS = {
    f"{name or 'index'} is {kind.__name__}": (name, kind)
    for name in ("", "1", "1/data.mdb", "1/lock.mdb")
    for kind in (make_fifo, make_file, make_folder, make_dangling_link)
} | {
    "index has no access": ("", lambda path: path.chmod(0)),
    "generation has no access": ("1", lambda path: path.chmod(0)),
    "data has no access": ("1/data.mdb", lambda path: path.chmod(0)),
    "lock has no access": ("1/lock.mdb", lambda path: path.chmod(0)),
    "data is empty": ("1/data.mdb", lambda path: path.write_bytes(b"")),
    "data is missing": ("1/data.mdb", Path.unlink),
    "lock is damaged": ("1/lock.mdb", lambda path: path.write_bytes(b"garbage" * 5000)),
    "other generation is a file": ("7", lambda path: path.write_bytes(b"x")),
    "name of a number of other digits": ("\u00b2", lambda path: path.mkdir()),
}


@pytest.mark.parametrize(("name", "make"), ODD_PATHS.values(), ids=ODD_PATHS)
def test_anything_in_place_of_index_is_replaced(home: Home, name: str, make: Callable[[Path], object]) -> None:
    with Index(home, BUDGET) as index:
        reconcile(index)
        save_conversations(index)
        whole = list_texts(index)
    make(home.index / name)
    with suppress(IndexStoreError):  # a reader neither waits, nor changes anything
        IndexReader(home).close()
    with Index(home, BUDGET) as index:
        reconcile(index)
        assert list_texts(index) == whole and verify_index(index, deep=True) == []
    with Index(home, BUDGET) as index:
        assert str(reconcile(index)) == "ok"


def test_linked_index_folder_stays_a_link(home: Home, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    home.index.symlink_to(tmp_path / "elsewhere")
    with Index(home, BUDGET) as index:
        reconcile(index)
        save_conversations(index)
        whole = list_texts(index)
    (home.index / "1" / "data.mdb").write_bytes(b"garbage" * 1000)
    with Index(home, BUDGET) as index:
        assert reconcile(index).mended and list_texts(index) == whole
    assert home.index.is_symlink() and (tmp_path / "elsewhere" / "1" / "data.mdb").exists()


@pytest.mark.parametrize("field", ["checksum", "model", "prefill_s"])
def test_changed_field_of_row_is_noticed_at_start(home: Home, field: str) -> None:
    """Nothing contradicts it in the index; where a file tells the true value, that is put right."""
    with Index(home, BUDGET) as index:
        reconcile(index)
        save_conversations(index)
        before = index.snapshot()
    with open_tables(home) as table:
        key, value = next(entry for entry in table("segments").entries() if b"checksum" in entry[1])
        row = msgspec.msgpack.decode(value, type=SegmentRow)
        other = {"checksum": "0" * len(row.checksum), "model": "model-b", "prefill_s": 7.0}[field]
        table("segments").put(key, msgspec.msgpack.encode(msgspec.structs.replace(row, **{field: other})))
    with IndexReader(home) as reader:
        assert {finding.what for finding in verify_index(reader)} == {"file" if field == "checksum" else "digest"}
    with Index(home, BUDGET) as index:
        assert reconcile(index).mended == 1 and verify_index(index, deep=True) == []
        assert field != "checksum" or index.snapshot() == before
        assert reconcile(index).mended == 0


def make_older_index(home: Home) -> IndexSnapshot:
    """Fill an index that has no digest, as an older version leaves it."""
    with Index(home, BUDGET) as index:
        reconcile(index)
        save_conversations(index)
        before = index.snapshot()
    with open_tables(home) as table:
        table("meta").delete(DIGEST_KEY)
    return before


def test_index_of_older_version_gets_digest(home: Home) -> None:
    before = make_older_index(home)
    with Index(home, BUDGET) as index:
        save(index, [8] * 70)  # before a start has looked at it
        assert not index.transact(Tables.has_true_digest)
        assert reconcile(index).mended == 0 and index.snapshot().segments.keys() > before.segments.keys()
        assert index.transact(Tables.has_true_digest) and verify_index(index, deep=True) == []


def test_damaged_older_index_is_repaired(home: Home) -> None:
    before = make_older_index(home)
    with open_tables(home) as table:
        table("blocks").delete(table("blocks").entries()[0][0])
    with Index(home, BUDGET) as index:
        assert reconcile(index).mended and index.snapshot() == before and verify_index(index, deep=True) == []


def test_running_index_is_replaced_and_saves_end(home: Home) -> None:
    """The index loses its saves under way: what they had written is kept, and what they write later is deleted."""
    with Index(home, BUDGET) as index:
        reconcile(index)
        save_conversations(index)
        whole = list_texts(index)
        written, begun = plan_save(index, [3] * 50), plan_save(index, [4] * 50)
        reply = write_plan(home, written)
        draft = home.segment_file(begun.file_ids[0]).with_name(".draft.tmp")
        draft.parent.mkdir(exist_ok=True, mode=0o700)
        draft.write_bytes(b"half")
        (data,) = home.index.glob("*/data.mdb")
        damaged = bytearray(data.read_bytes())
        damaged[-PAGE_BYTES:] = bytes(PAGE_BYTES)
        damaged[1] ^= 1  # of a meta
        data.write_bytes(damaged)
        with pytest.raises(IndexStoreError, match="damaged"):
            index.require_sound_pages()
        assert repair(index, deep=True, is_saving=True).did
        assert list_texts(index) == whole | {written.file_ids[0]: (ROOT, [3] * 50)}
        assert draft.exists()
        result = index.commit_save(written, reply, prefill_s=1.0, session=SessionUpdate(turn_end=0))
        assert result.why_not and count_matched(index, [3] * 50) == 50
        assert commit_save(index, begun).why_not and count_matched(index, [4] * 50) == 0
        draft.unlink()
        assert verify_index(index, deep=True) == []
        assert repair(index, deep=True, is_saving=True).did == []


def test_lost_index_is_rebuilt(home: Home) -> None:
    with Index(home, BUDGET) as index:
        save_conversations(index)
        whole = list_texts(index)
    shutil.rmtree(home.index)
    with Index(home, BUDGET) as index:
        assert reconcile(index).mended
        assert list_texts(index) == whole and verify_index(index, deep=True) == []


def test_interrupted_start_loses_no_files(home: Home) -> None:
    """The next one must know that the index, now whole and empty, lacks what is stored."""
    with Index(home, BUDGET) as index:
        save_conversations(index)
        whole = list_texts(index)
    (data,) = home.index.glob("*/data.mdb")
    data.write_bytes(b"garbage" * 10_000)
    for _ in range(2):
        with Index(home, BUDGET) as index:
            assert list_texts(index) == {}
    with Index(home, BUDGET) as index:
        index.compact()
    with Index(home, BUDGET) as index:
        assert reconcile(index).mended
        assert list_texts(index) == whole
        index.compact()
        assert is_sound(index)


def test_unreadable_files_survive_rebuild(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with Index(home, BUDGET) as index:
        save_conversations(index)
        first, *rest = list_chain(index, A[:400])
    shutil.rmtree(home.index)
    whole = disk.open_to_read

    def unreadable(path: Path) -> FileIO:
        if path.stem == first:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(path)

    monkeypatch.setattr(disk, "open_to_read", unreadable)
    with Index(home, BUDGET) as index:
        reconcile(index)
        assert {first, *rest} <= {row.id for row in index.quarantined() if row.reason.endswith("io")}
        assert verify_index(index, deep=True) == []


def test_unreadable_entry_is_reported_and_repaired(home: Home) -> None:
    with Index(home, BUDGET) as index:
        save_conversations(index)
        whole = list_texts(index)
    with open_tables(home) as table:
        for name in ("segments", "sessions", "checkpoints"):
            key, value = table(name).entries()[0]
            table(name).put(key, value[:-3])
    with IndexReader(home) as reader:
        assert {finding.what for finding in verify_index(reader)} == {"entry"}
    with Index(home, BUDGET) as index:
        assert {"adopted", "entries"} <= list_repairs(repair_and_verify(index))
        assert list_texts(index) == whole


def test_derived_tables_are_rebuilt(home: Home) -> None:
    with Index(home, BUDGET) as index:
        save_conversations(index)
        before = index.snapshot()
    with open_tables(home) as table:
        for name in ("children", "blocks", "hashes", "places", "anchors", "tokens"):
            for key, _ in table(name).entries():
                table(name).delete(key)
    with Index(home, BUDGET) as index:
        assert verify_index(index)
        reply = repair_and_verify(index)
        assert list_repairs(reply) == {"entries"} and index.snapshot() == before
        assert count_matched(index, A[:400]) == 400


def test_orphans_are_adopted_where_they_fit(home: Home) -> None:
    with Index(home, BUDGET) as index:
        save_conversations(index)
        whole = list_texts(index)
    with open_tables(home) as table:
        for key, _ in table("segments").entries():
            table("segments").delete(key)
        key, _ = table("checkpoints").entries()[0]
        table("checkpoints").delete(key)
    stray = home.segment_file("ab" * 16)
    stray.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.copyfile(home.segment_file(next(iter(whole))), stray)
    with Index(home, BUDGET) as index:
        reply = repair_and_verify(index)
        assert [f.id for f in reply.did if f.what == "deleted"] == [stray.stem] and not stray.exists()
        assert len([f for f in reply.did if f.what == "adopted"]) == len(whole) + 1
        assert list_texts(index) == whole


def test_damaged_files_are_quarantined_with_descendants(index: Index) -> None:
    save_conversations(index)
    first, second, *rest = list_chain(index, A[:400])
    flip_bit(index.home.segment_file(second), -9)
    reply = repair_and_verify(index)
    assert list_repairs(reply) == {"quarantined", "session"} | ({"entries"} & list_repairs(reply))
    reasons = {row.id: row.reason for row in index.quarantined()}
    assert reasons[second] == "checksum" and all(reasons[it] == f"builds on {second}: checksum" for it in rest[:1])
    assert list_chain(index, A[:400]) == [first]
    assert count_matched(index, A[:300], OTHER) == 300


def test_segment_on_wrong_parent_is_quarantined(index: Index) -> None:
    """Its own tokens and checksums are right; those before it are others."""
    save(index, [1, *A[1:1500]])
    save(index, [1, *A[1:3000]], may_replace=False)
    save(index, [2, *A[1:1500]])
    save(index, [2, *A[1:3000]], may_replace=False)
    (_, mine), (_, theirs) = list_chain(index, [1, *A[1:]]), list_chain(index, [2, *A[1:]])
    path, other = index.home.segment_file(mine), read_header(index.home.segment_file(theirs)).meta
    rewrite_meta(path, prefix=other.prefix)
    row = index.segment(mine)
    assert row is not None
    row.checksum, size = file_checksum(read_checksums(path)), path.stat().st_size
    assert row.bytes_on_disk == size
    index.transact(lambda tables: tables.update_segment(row))
    assert {(f.what, f.id) for f in verify_index(index)} == {("place", mine)}
    repair_and_verify(index)
    assert {row.id: row.reason for row in index.quarantined()} == {mine: "foreign"}
    assert count_matched(index, [2, *A[1:]]) == 3000 and count_matched(index, [1, *A[1:]]) == 1500


def test_checkpoint_of_another_conversation_is_removed(index: Index) -> None:
    save(index, [1, *A[1:1500]], checkpoints=[700])
    save(index, [2, *A[1:1500]], checkpoints=[700])
    one, two = index.snapshot().checkpoints.values()
    rewrite_meta(index.home.segment_file(one.id), prefix=read_header(index.home.segment_file(two.id)).meta.prefix)
    assert {(f.what, f.id) for f in verify_index(index)} == {("file", one.id)}
    repair_and_verify(index)
    assert [row.id for row in index.snapshot().checkpoints.values()] == [two.id]
