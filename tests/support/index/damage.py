"""Stored conversations, and every kind of damage to an index and its files."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from support.index.indexes import ROOT, begin_save, commit_save, make_response, make_turn, save, short_segments
from warmline_common.protocol.tokens import namespace, pack_tokens, unpack_tokens
from warmline_common.storage.home import Home
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.repair import repair
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.store.rows import RepairReply, RequestRecord
from warmline_proxy.store.tables import TABLES

A = list(range(1000, 4000))
OTHER = namespace("model-b")


def repair_and_verify(index: Index) -> RepairReply:
    """Repair the index; nothing may be left to repair."""
    reply = repair(index, deep=True, is_saving=False)
    assert verify_index(index, deep=True) == []
    return reply


def list_chain(index: Index, ids: list[int], root: bytes = ROOT) -> list[str]:
    return [ref.id for ref in index.match_prefix(root, pack_tokens(ids), len(ids)).chain]


def save_conversations(index: Index) -> None:
    """Save branching conversations of two models, with states, quarantined files, requests and an unfinished save."""
    with short_segments():
        save(index, A[:400], checkpoints=[50, 200, 400], turn_end=390, client="first")
        save(index, [*A[:400], *range(200)], checkpoints=[450], turn_end=590, client="first", may_replace=False)
        save(index, [*A[:130], *range(90)], turn_end=200, client="second")
        save(index, [*A[:64], 7, 7, 7], turn_end=66)
        save(index, [5, 5, 5, 5], checkpoints=[2])
        plan = begin_save(index, A[:300], [100], root=OTHER)
        assert plan is not None
        commit_save(index, plan, 299)
        save(index, [9] * 100)
        index.quarantine(list_chain(index, [9] * 100)[0], "checksum")
        index.record_use(list_chain(index, A[:400]))
        index.record_request(
            RequestRecord(id="r", at=1.0, endpoint="chat", client_model="m", outcome="ok", source="cold")
        )
        for first in range(3):
            index.record_turn(make_turn(2 * first, 2 * first + 1))
        index.record_response(make_response("r1"))
        index.record_response(make_response("r2", "r1"))
        index.flush()


def list_texts(index: Index) -> dict[str, tuple[bytes, list[int]]]:
    """List the root of each stored segment, and all tokens up to its end."""
    return {row.id: (row.root, unpack_tokens(index.path_tokens(row.id))) for row in index.segments()}


@contextmanager
def open_tables(home: Home) -> Iterator[Callable[[str], "RawTable"]]:
    """Open the LMDB tables of the index without its checks."""
    folder = next(path for path in home.index.iterdir() if path.name.isdigit())
    env = lmdb.open(str(folder), max_dbs=len(TABLES), map_size=64 << 30, sync=False)
    try:
        with env.begin(write=True) as txn:
            yield lambda name: RawTable(txn, env.open_db(name.encode(), txn))
    finally:
        env.close()


class RawTable:
    def __init__(self, txn, db) -> None:  # type: ignore[no-untyped-def]
        self._txn, self._db = txn, db

    def entries(self) -> list[tuple[bytes, bytes]]:
        return list(self._txn.cursor(self._db))

    def put(self, key: bytes, value: bytes) -> None:
        self._txn.put(key, value, db=self._db)

    def delete(self, key: bytes) -> None:
        self._txn.delete(key, db=self._db)


def flip_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 0x10
    path.write_bytes(data)


class IndexCorruptor:
    """Kinds of damage, one a method, repeatable with a seeded `rng`."""

    def __init__(self, home: Home, rng: random.Random) -> None:
        self.home, self.rng = home, rng

    def delete_entry(self) -> None:
        with open_tables(self.home) as table:
            if (entry := self._choose_entry(table)) is not None:
                entry[0].delete(entry[1])

    def flip_entry(self) -> None:
        with open_tables(self.home) as table:
            if (entry := self._choose_entry(table)) is not None and entry[2]:
                damaged = bytearray(entry[2])
                damaged[self.rng.randrange(len(damaged))] ^= 1 << self.rng.randrange(8)
                entry[0].put(entry[1], bytes(damaged))

    def cut_entry(self) -> None:
        with open_tables(self.home) as table:
            if (entry := self._choose_entry(table)) is not None:
                entry[0].put(entry[1], entry[2][: self.rng.randrange(len(entry[2]) + 1)])

    def swap_entry(self) -> None:
        with open_tables(self.home) as table:
            if (entry := self._choose_entry(table)) is not None:
                other = self.rng.choice(entry[0].entries())
                entry[0].put(entry[1], other[1])

    def flip_key(self) -> None:
        with open_tables(self.home) as table:
            if (entry := self._choose_entry(table)) is not None:
                damaged = bytearray(entry[1])
                damaged[self.rng.randrange(len(damaged))] ^= 1 << self.rng.randrange(8)
                entry[0].put(bytes(damaged), entry[2])

    def empty_table(self) -> None:
        with open_tables(self.home) as table:
            emptied = table(self.rng.choice([name for name in TABLES if name != "meta"]))
            for key, _ in emptied.entries():
                emptied.delete(key)

    def overwrite_index(self) -> None:
        (data,) = self.home.index.glob("1/data.mdb")
        data.write_bytes(b"garbage" * 1000)

    def flip_file(self) -> None:
        if path := self._choose_file():
            flip_bit(path, self.rng.randrange(1 << 30))

    def truncate_file(self) -> None:
        if path := self._choose_file():
            os.truncate(path, self.rng.randrange(path.stat().st_size + 1))

    def delete_file(self) -> None:
        if path := self._choose_file():
            path.unlink()

    def rename_file(self) -> None:
        if path := self._choose_file():
            path.rename(self._choose_target(path))

    def copy_file(self) -> None:
        if (path := self._choose_file()) and (target := self._choose_target(path)) != path:
            shutil.copyfile(path, target)

    def open_mode(self) -> None:
        if path := self._choose_file():
            path.chmod(0o644)

    def leave_draft(self) -> None:
        (self.home.segments / "ab").mkdir(exist_ok=True)
        (self.home.segments / "ab" / ".x.tmp").write_bytes(b"x")
        (self.home.index / ".7.tmp").mkdir(exist_ok=True)

    def _choose_entry(self, table: Callable[[str], RawTable]) -> tuple[RawTable, bytes, bytes] | None:
        chosen = table(self.rng.choice(TABLES))
        entries = [entry for entry in chosen.entries() if entry[0] != b"schema"]
        return (chosen, *self.rng.choice(entries)) if entries else None

    def _choose_file(self) -> Path | None:
        paths = sorted(path for path in self.home.segments.rglob("*") if path.is_file())
        return self.rng.choice(paths) if paths else None

    def _choose_target(self, path: Path) -> Path:
        other = self._choose_file() or path
        new = f"{self.rng.randrange(1 << 128):032x}"
        target = self.rng.choice([other, self.home.segment_file(new), path.with_name("strange")])
        target.parent.mkdir(exist_ok=True)
        return target


DAMAGES = [name for name, value in vars(IndexCorruptor).items() if not name.startswith("_")]
