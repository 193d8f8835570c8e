"""Whatever happened to an index and its files, repair leaves both whole, and what is found then is true."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_helpers import BUDGET, ROOT, begin, break_page, commit, make_home, matched, planned, save, write_plan
from segment_files import rewrite
from test_machine import short_segments

from warmline_proxy.index import Index, IndexFailure, IndexReader
from warmline_proxy.index_tables import TABLES
from warmline_proxy.purge import purge
from warmline_proxy.reconcile import reconcile
from warmline_proxy.repair import repair
from warmline_proxy.rows import PurgeRequest, RepairReply, RequestRecord
from warmline_wire import disk
from warmline_wire.home import Home
from warmline_wire.keys import namespace, pack_tokens, unpack_tokens
from warmline_wire.segment_file import file_checksum, read_checksums, read_header

A = list(range(1000, 4000))
OTHER = namespace("model-b")


def mend(index: Index) -> RepairReply:
    reply = repair(index, deep=True, saving=False)
    assert index.verify(deep=True) == []
    return reply


def done(reply: RepairReply) -> set[str]:
    return {finding.what for finding in reply.did}


def chain(index: Index, ids: list[int], root: bytes = ROOT) -> list[str]:
    return [ref.id for ref in index.match(root, pack_tokens(ids), len(ids)).chain]


@contextmanager
def tables_of(home: Home) -> Iterator[Callable[[str], "Table"]]:
    """The index's file, laid open as it is."""
    folder = next(path for path in home.index.iterdir() if path.name.isdigit())
    env = lmdb.open(str(folder), max_dbs=len(TABLES), map_size=64 << 30, sync=False)
    try:
        with env.begin(write=True) as txn:
            yield lambda name: Table(txn, env.open_db(name.encode(), txn))
    finally:
        env.close()


class Table:
    def __init__(self, txn, db) -> None:  # type: ignore[no-untyped-def]
        self._txn, self._db = txn, db

    def entries(self) -> list[tuple[bytes, bytes]]:
        return list(self._txn.cursor(self._db))

    def put(self, key: bytes, value: bytes) -> None:
        self._txn.put(key, value, db=self._db)

    def delete(self, key: bytes) -> None:
        self._txn.delete(key, db=self._db)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 0x10
    path.write_bytes(data)


def talk(index: Index) -> None:
    """Conversations that branch, of two models, with states, files set aside, requests and a save under way."""
    with short_segments():
        save(index, A[:400], checkpoints=[50, 200, 400], turn_end=390, client="first")
        save(index, [*A[:400], *range(200)], checkpoints=[450], turn_end=590, client="first", may_replace=False)
        save(index, [*A[:130], *range(90)], turn_end=200, client="second")
        save(index, [*A[:64], 7, 7, 7], turn_end=66)
        save(index, [5, 5, 5, 5], checkpoints=[2])
        plan = begin(index, A[:300], [100], root=OTHER)
        assert plan is not None
        commit(index, plan, 299)
        save(index, [9] * 100)
        index.quarantine(chain(index, [9] * 100)[0], "checksum")
        index.note_use(chain(index, A[:400]))
        index.record(RequestRecord(id="r", at=1.0, endpoint="chat", client_model="m", outcome="ok", source="cold"))
        index.flush()


def texts(index: Index) -> dict[str, tuple[bytes, list[int]]]:
    """Of each stored segment its root and all tokens up to its end."""
    return {row.id: (row.root, unpack_tokens(index.stored_tokens(row.id))) for row in index.segments()}


def test_what_is_whole_is_left_as_it_is(index: Index) -> None:
    talk(index)
    running = planned(index, [3] * 50)
    write_plan(index.home, running)
    before = index.snapshot()
    assert repair(index, deep=True, saving=True).did == []
    assert index.snapshot() == before
    assert commit(index, running).tokens_saved == 50


def test_repairs_beside_all_else_change_nothing(index: Index) -> None:
    """Saves, quarantines and evictions fall between what a repair sees of the disk and what it does."""
    over = threading.Event()

    def use() -> None:
        for number in range(25):
            save(index, [number, *A[:200]], checkpoints=[100])
            if number % 3 == 1:
                index.quarantine(chain(index, [number])[0], "checksum")
            if number % 5 == 4:
                purge(index, PurgeRequest(session=index.sessions()[-1].id))
        over.set()

    thread = threading.Thread(target=use)
    thread.start()
    repairs = 0
    while not over.is_set() or not repairs:
        assert [each for each in repair(index, deep=False, saving=True).did if each.what != "deleted"] == []
        repairs += 1
    thread.join()
    assert matched(index, [24, *A[:200]]) == 201 and matched(index, [1, *A[:200]]) == 0


def test_an_index_is_made_anew_from_the_files(home: Home) -> None:
    with Index(home, BUDGET) as index:
        talk(index)
        whole, sessions = texts(index), {(row.leaf, row.tokens) for row in index.sessions()}
        states = {(row.segment, row.position) for row in index.checkpoints()}
    (data,) = home.index.glob("*/data.mdb")
    data.write_bytes(b"garbage" * 10_000)
    with Index(home, BUDGET) as index:
        counts = reconcile(index)
        assert counts.mended and counts.files_without_row == 0
        assert texts(index) == whole
        assert {(row.segment, row.position) for row in index.checkpoints()} == states
        assert {row.model for row in index.segments()} == {"model-a"}
        leaves = {row.id for row in index.segments()} - {row.parent for row in index.segments()}
        assert {(row.leaf, row.tokens) for row in index.sessions()} == {
            (leaf, row.end) for leaf in leaves if (row := index.segment(leaf))
        }
        assert {leaf for leaf, _ in sessions} <= leaves
        assert index.verify(deep=True) == []
        save(index, [*A[:400], *range(300)], turn_end=690)
        assert reconcile(index).mended == 0


def test_a_cut_index_is_made_anew(home: Home) -> None:
    with Index(home, BUDGET) as index:
        talk(index)
        whole = texts(index)
    (data,) = home.index.glob("*/data.mdb")
    os.truncate(data, 3 * data.stat().st_size // 4)
    with Index(home, BUDGET) as index:
        assert reconcile(index).mended
        assert texts(index) == whole and index.verify(deep=True) == []


def test_pages_that_end_the_process_which_reads_them_are_left_behind(home: Home) -> None:
    """LMDB asserts, so the first start dies of it; the next one has another process look, and makes the index anew."""
    with Index(home, BUDGET) as index:
        for number in range(40):  # so many that the segments' rows take some pages
            save(index, [number] * 5)
        whole = texts(index)
    break_page(home, max(whole))
    code = "from pathlib import Path; from warmline_proxy.index import *; from warmline_proxy.reconcile import *\n"
    code += "from warmline_wire.home import Home\n"
    code += f"with Index(Home(Path({str(home.root)!r})), 1 << 30) as index: reconcile(index)"
    starts = [subprocess.run([sys.executable, "-c", code], check=False, capture_output=True) for _ in range(2)]
    assert [start.returncode for start in starts] == [-signal.SIGABRT, 0], starts
    with Index(home, BUDGET) as index:
        assert texts(index) == whole and index.verify(deep=True) == []
        assert reconcile(index).mended == 0


def test_an_index_that_nobody_could_look_at_is_kept(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with Index(home, BUDGET) as index:
        talk(index)
        before = index.snapshot()
        monkeypatch.setattr(sys, "executable", shutil.which("false"))
        with pytest.raises(IndexFailure, match="exit code 1"):
            index.is_damaged(probed=True)
        monkeypatch.undo()
        repair(index, deep=False, saving=False)
        assert not index.is_damaged(probed=True) and index.snapshot() == before


def test_a_lost_index_is_made_anew(home: Home) -> None:
    with Index(home, BUDGET) as index:
        talk(index)
        whole = texts(index)
    shutil.rmtree(home.index)
    with Index(home, BUDGET) as index:
        assert reconcile(index).mended
        assert texts(index) == whole and index.verify(deep=True) == []


def test_a_start_that_ends_before_it_has_looked_at_the_files_loses_none(home: Home) -> None:
    """The next one must know that the index, now whole and empty, lacks what is stored."""
    with Index(home, BUDGET) as index:
        talk(index)
        whole = texts(index)
    (data,) = home.index.glob("*/data.mdb")
    data.write_bytes(b"garbage" * 10_000)
    for _ in range(2):
        with Index(home, BUDGET) as index:
            assert texts(index) == {}
    with Index(home, BUDGET) as index:
        index.compact()
    with Index(home, BUDGET) as index:
        assert reconcile(index).mended
        assert texts(index) == whole
        index.compact()
        assert not index.is_damaged()


def test_what_cannot_be_read_while_an_index_is_made_anew_is_not_deleted(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Index(home, BUDGET) as index:
        talk(index)
        first, *rest = chain(index, A[:400])
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
        assert index.verify(deep=True) == []


def test_an_entry_that_cannot_be_read_is_told_and_mended(home: Home) -> None:
    with Index(home, BUDGET) as index:
        talk(index)
        whole = texts(index)
    with tables_of(home) as table:
        for name in ("segments", "sessions", "checkpoints"):
            key, value = table(name).entries()[0]
            table(name).put(key, value[:-3])
    with IndexReader(home) as reader:
        assert {finding.what for finding in reader.verify()} == {"entry"}
    with Index(home, BUDGET) as index:
        assert {"adopted", "entries"} <= done(mend(index))
        assert texts(index) == whole


def test_derived_tables_are_made_anew(home: Home) -> None:
    with Index(home, BUDGET) as index:
        talk(index)
        before = index.snapshot()
    with tables_of(home) as table:
        for name in ("children", "blocks", "hashes", "places", "anchors", "tokens"):
            for key, _ in table(name).entries():
                table(name).delete(key)
    with Index(home, BUDGET) as index:
        assert index.verify()
        reply = mend(index)
        assert done(reply) == {"entries"} and index.snapshot() == before
        assert matched(index, A[:400]) == 400


def test_files_without_a_row_are_adopted_where_they_fit(home: Home) -> None:
    with Index(home, BUDGET) as index:
        talk(index)
        whole = texts(index)
    with tables_of(home) as table:
        for key, _ in table("segments").entries():
            table("segments").delete(key)
        key, _ = table("checkpoints").entries()[0]
        table("checkpoints").delete(key)
    stray = home.segment_file("ab" * 16)
    stray.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.copyfile(home.segment_file(next(iter(whole))), stray)
    with Index(home, BUDGET) as index:
        reply = mend(index)
        assert [f.id for f in reply.did if f.what == "deleted"] == [stray.stem] and not stray.exists()
        assert len([f for f in reply.did if f.what == "adopted"]) == len(whole) + 1
        assert texts(index) == whole


def test_damaged_files_are_set_aside_with_what_builds_on_them(index: Index) -> None:
    talk(index)
    first, second, *rest = chain(index, A[:400])
    flip(index.home.segment_file(second), -9)
    reply = mend(index)
    assert done(reply) == {"quarantined", "session"} | ({"entries"} & done(reply))
    reasons = {row.id: row.reason for row in index.quarantined()}
    assert reasons[second] == "checksum" and all(reasons[it] == f"builds on {second}: checksum" for it in rest[:1])
    assert chain(index, A[:400]) == [first]
    assert matched(index, A[:300], OTHER) == 300


def test_a_segment_on_a_wrong_parent_is_found_and_set_aside(index: Index) -> None:
    """Its own tokens and checksums are right; those before it are others."""
    save(index, [1, *A[1:1500]])
    save(index, [1, *A[1:3000]], may_replace=False)
    save(index, [2, *A[1:1500]])
    save(index, [2, *A[1:3000]], may_replace=False)
    (_, mine), (_, theirs) = chain(index, [1, *A[1:]]), chain(index, [2, *A[1:]])
    path, other = index.home.segment_file(mine), read_header(index.home.segment_file(theirs)).meta
    rewrite(path, prefix=other.prefix)
    row = index.segment(mine)
    assert row is not None
    row.checksum, size = file_checksum(read_checksums(path)), path.stat().st_size
    assert row.bytes_on_disk == size
    index.change(lambda tables: tables.update_segment(row))
    assert {(f.what, f.id) for f in index.verify()} == {("place", mine)}
    mend(index)
    assert {row.id: row.reason for row in index.quarantined()} == {mine: "foreign"}
    assert matched(index, [2, *A[1:]]) == 3000 and matched(index, [1, *A[1:]]) == 1500


def test_a_checkpoint_of_another_conversation_is_found_and_gives_way(index: Index) -> None:
    save(index, [1, *A[1:1500]], checkpoints=[700])
    save(index, [2, *A[1:1500]], checkpoints=[700])
    one, two = index.checkpoints()
    rewrite(index.home.segment_file(one.id), prefix=read_header(index.home.segment_file(two.id)).meta.prefix)
    assert {(f.what, f.id) for f in index.verify()} == {("file", one.id)}
    mend(index)
    assert [row.id for row in index.checkpoints()] == [two.id]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = make_home(tmp_path_factory.mktemp("template") / "home")
    with Index(home, BUDGET) as index:
        talk(index)
    return home


class Vandal:
    """One kind of damage a method; all are repeatable, given the numbers."""

    def __init__(self, home: Home, chance: random.Random) -> None:
        self.home, self.chance = home, chance

    def entry_deleted(self) -> None:
        with tables_of(self.home) as table:
            if (entry := self._entry(table)) is not None:
                entry[0].delete(entry[1])

    def entry_flipped(self) -> None:
        with tables_of(self.home) as table:
            if (entry := self._entry(table)) is not None and entry[2]:
                damaged = bytearray(entry[2])
                damaged[self.chance.randrange(len(damaged))] ^= 1 << self.chance.randrange(8)
                entry[0].put(entry[1], bytes(damaged))

    def entry_cut(self) -> None:
        with tables_of(self.home) as table:
            if (entry := self._entry(table)) is not None:
                entry[0].put(entry[1], entry[2][: self.chance.randrange(len(entry[2]) + 1)])

    def entry_of_another_key(self) -> None:
        with tables_of(self.home) as table:
            if (entry := self._entry(table)) is not None:
                other = self.chance.choice(entry[0].entries())
                entry[0].put(entry[1], other[1])

    def key_flipped(self) -> None:
        with tables_of(self.home) as table:
            if (entry := self._entry(table)) is not None:
                damaged = bytearray(entry[1])
                damaged[self.chance.randrange(len(damaged))] ^= 1 << self.chance.randrange(8)
                entry[0].put(bytes(damaged), entry[2])

    def table_emptied(self) -> None:
        with tables_of(self.home) as table:
            emptied = table(self.chance.choice([name for name in TABLES if name != "meta"]))
            for key, _ in emptied.entries():
                emptied.delete(key)

    def index_overwritten(self) -> None:
        (data,) = self.home.index.glob("1/data.mdb")
        data.write_bytes(b"garbage" * 1000)

    def file_flipped(self) -> None:
        if path := self._file():
            flip(path, self.chance.randrange(1 << 30))

    def file_cut(self) -> None:
        if path := self._file():
            os.truncate(path, self.chance.randrange(path.stat().st_size + 1))

    def file_deleted(self) -> None:
        if path := self._file():
            path.unlink()

    def file_renamed(self) -> None:
        if path := self._file():
            path.rename(self._target(path))

    def file_copied(self) -> None:
        if (path := self._file()) and (target := self._target(path)) != path:
            shutil.copyfile(path, target)

    def mode_opened(self) -> None:
        if path := self._file():
            path.chmod(0o644)

    def draft_left(self) -> None:
        (self.home.segments / "ab").mkdir(exist_ok=True)
        (self.home.segments / "ab" / ".x.tmp").write_bytes(b"x")
        (self.home.index / ".7.tmp").mkdir(exist_ok=True)

    def _entry(self, table: Callable[[str], Table]) -> tuple[Table, bytes, bytes] | None:
        chosen = table(self.chance.choice(TABLES))
        entries = [entry for entry in chosen.entries() if entry[0] != b"schema"]
        return (chosen, *self.chance.choice(entries)) if entries else None

    def _file(self) -> Path | None:
        paths = sorted(path for path in self.home.segments.rglob("*") if path.is_file())
        return self.chance.choice(paths) if paths else None

    def _target(self, path: Path) -> Path:
        other = self._file() or path
        new = f"{self.chance.randrange(1 << 128):032x}"
        target = self.chance.choice([other, self.home.segment_file(new), path.with_name("strange")])
        target.parent.mkdir(exist_ok=True)
        return target


DAMAGES = [name for name, value in vars(Vandal).items() if not name.startswith("_")]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(damages=st.lists(st.sampled_from(DAMAGES), min_size=1, max_size=6), seed=st.integers(0, 1 << 32))
def test_after_any_damage_repair_leaves_a_clean_index_that_tells_the_truth(
    template: Home, damages: list[str], seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        shutil.copytree(template.root, home.root)
        vandal = Vandal(home, random.Random(seed))
        for damage in sorted(damages, key=lambda damage: damage == "index_overwritten"):
            getattr(vandal, damage)()
        with IndexReader(template) as truth:
            known, states = texts(truth), {row.id: row.position for row in truth.checkpoints()}
            state_texts = {row.id: truth.stored_tokens(row.segment)[: 4 * row.position] for row in truth.checkpoints()}
        with Index(home, BUDGET) as index:
            if index.is_damaged():
                reconcile(index)
            mend(index)
            assert repair(index, deep=True, saving=False).did == []
            for segment, (root, text) in texts(index).items():
                assert known[segment] == (root, text)
                found = index.match(root, pack_tokens(text), len(text))
                assert found.tokens == len(text) and found.chain[-1].id == segment
            for row in index.checkpoints():
                assert row.position == states[row.id]
                assert index.stored_tokens(row.segment)[: 4 * row.position] == state_texts[row.id]
            save(index, [*A[:390], 1, 2, 3], checkpoints=[391])
            assert matched(index, [*A[:390], 1, 2, 3]) == 393
            assert index.verify(deep=True) == []
