"""Conversations to damage, and every kind of damage that an index and its files may take."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from support.index.indexes import ROOT, begin, commit, save, short_segments, turn
from warmline_common.protocol.tokens import namespace, pack_tokens, unpack_tokens
from warmline_common.storage.home import Home
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.repair import repair
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.store.rows import RepairReply, RequestRecord
from warmline_proxy.store.tables import TABLES

A = list(range(1000, 4000))
OTHER = namespace("model-b")


def mend(index: Index) -> RepairReply:
    """It is whole then."""
    reply = repair(index, deep=True, is_saving=False)
    assert verify_index(index, deep=True) == []
    return reply


def chain(index: Index, ids: list[int], root: bytes = ROOT) -> list[str]:
    return [ref.id for ref in index.match_prefix(root, pack_tokens(ids), len(ids)).chain]


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
        index.record_use(chain(index, A[:400]))
        index.record_request(
            RequestRecord(id="r", at=1.0, endpoint="chat", client_model="m", outcome="ok", source="cold")
        )
        for first in range(3):
            index.record_turn(turn(2 * first, 2 * first + 1))
        index.flush()


def texts(index: Index) -> dict[str, tuple[bytes, list[int]]]:
    """Of each stored segment its root and all tokens up to its end."""
    return {row.id: (row.root, unpack_tokens(index.path_tokens(row.id))) for row in index.segments()}


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
