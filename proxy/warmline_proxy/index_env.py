"""The LMDB environment: opening, schema, transactions, compaction.  The only module that knows lmdb.

`index/` holds one directory a generation (1, 2, ...).  Compaction writes the next one from scratch and renames it into
place, so a crash leaves either; the highest number is the index.  A generation is never rewritten under a reader: LMDB
keeps the number of the last transaction in a lock file of its own, which must not meet another data file.

    IndexFailure
    ├── DamagedIndex   its file is no LMDB file (any more)
    ├── NoIndex        there is none (yet)
    ├── WrongSchema    another version of Warmline wrote it
    ├── IndexFull      the map is full: nothing more can be written
    └── NoRoom         the disk budget can't hold a save, whatever is evicted
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from warmline_proxy.index_tables import TABLES, Tables
from warmline_wire import disk

log = logging.getLogger(__name__)

SCHEMA = 1
MAP_BYTES = 64 << 30  # virtual and sparse; every process must open the index with the same size
READERS_MAX = 512
SCHEMA_KEY = b"schema"

T = TypeVar("T")


class IndexFailure(Exception):
    """The index can't be opened or written."""


class DamagedIndex(IndexFailure):
    pass


class NoIndex(IndexFailure):
    pass


class WrongSchema(IndexFailure):
    pass


class IndexFull(IndexFailure):
    pass


class NoRoom(IndexFailure):
    pass


@dataclass
class _Generation:
    """An open environment; closed when it is retired and its last transaction has ended."""

    path: Path
    env: Any
    handles: dict[str, Any]
    users: int = 0
    retired: bool = False


class Env:
    """Thread-safe for readers; `write` and `compact` belong to the one writer thread.  All may raise IndexFailure."""

    def __init__(self, folder: Path, *, writable: bool, map_bytes: int = MAP_BYTES) -> None:
        self._folder = folder
        self._writable = writable
        self._map_bytes = map_bytes
        self._lock = threading.Lock()
        if writable:
            _tidy(folder)
        try:
            self._current = self._open_newest()
        except DamagedIndex as error:
            if not writable:
                raise
            # Not set aside: it holds transcripts, which neither a purge nor the budget would ever find again.
            log.error("%s; a new one is begun, and what was stored is computed again", error)
            disk.delete_tree(folder)
            disk.make_folders(folder)
            self._current = self._open_newest()

    def _open_newest(self) -> _Generation:
        for _ in range(3):  # a compaction may take the directory away between the look and the opening
            paths = _generations(self._folder)
            if not paths and not self._writable:
                raise NoIndex(f"no index in {self._folder}")
            path = paths[-1] if paths else self._folder / "1"
            try:
                return self._open(path)
            except NoIndex:
                continue
        raise NoIndex(f"no index in {self._folder}")

    def _open(self, path: Path) -> _Generation:
        if self._writable:
            disk.make_folders(path)
        elif not (path / "data.mdb").exists():
            raise NoIndex(f"no index in {path}")
        try:
            env = self._environment(path)
        except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError) as error:
            raise DamagedIndex(f"the index in {path} is damaged: {error}") from error
        except lmdb.Error as error:
            raise IndexFailure(f"can't open the index in {path}: {error}") from error
        try:
            return _Generation(path, env, self._handles(env, path))
        except (lmdb.Error, IndexFailure) as error:
            env.close()
            if isinstance(error, IndexFailure):
                raise
            raise NoIndex(f"the index in {path} is not complete: {error}") from error

    def _environment(self, path: Path) -> Any:
        def opened() -> Any:
            return lmdb.open(
                str(path),
                map_size=self._map_bytes,
                max_dbs=len(TABLES),
                max_readers=READERS_MAX,
                mode=0o600,
                readonly=not self._writable,
                create=self._writable,
            )

        return disk.in_lmdb("open", opened) if self._writable else opened()

    def _handles(self, env: Any, path: Path) -> dict[str, Any]:
        if self._writable:
            with _committing(env) as txn:
                handles = {name: env.open_db(name.encode(), txn=txn) for name in TABLES}
                if txn.get(SCHEMA_KEY, db=handles["meta"]) is None:
                    txn.put(SCHEMA_KEY, str(SCHEMA).encode(), db=handles["meta"])
        else:  # not within one transaction: LMDB forgets what was opened in a read transaction when that ends
            handles = {name: env.open_db(name.encode(), create=False) for name in TABLES}
        with env.begin() as txn:
            found = txn.get(SCHEMA_KEY, db=handles["meta"])
        if found is not None and int(found) != SCHEMA:
            relation = "newer" if int(found) > SCHEMA else "older"
            raise WrongSchema(
                f"the index in {path} has schema {int(found)}, {relation} than the {SCHEMA} that this version "
                "reads; use the version of Warmline that wrote it, or another home"
            )
        return handles

    @contextmanager
    def reading(self) -> Iterator[Tables]:
        """A consistent snapshot; never waits for the writer."""
        with self._using() as generation:
            try:
                with generation.env.begin() as txn:
                    yield Tables(txn, generation.handles)
            except lmdb.Error as error:
                raise IndexFailure(f"can't read the index: {error}") from error

    def write(self, change: Callable[[Tables], T]) -> T:
        """Run `change` in a transaction of its own; durable when this returns, undone when it raises."""
        with self._using() as generation:
            try:
                with _committing(generation.env) as txn:
                    tables = Tables(txn, generation.handles)
                    result = change(tables)
                    tables.store_sums()
                return result
            except lmdb.MapFullError as error:
                raise IndexFull(f"the index has reached its {self._map_bytes >> 20} MiB") from error
            except lmdb.Error as error:
                raise IndexFailure(f"can't write the index: {error}") from error

    def bytes_used(self) -> int:
        """What the index takes on disk: its used pages, not the sparse map."""
        with self._using() as generation:
            pages = int(generation.env.info()["last_pgno"]) + 1
            return pages * int(generation.env.stat()["psize"])

    def reader_check(self) -> int:
        """Free the slots (and so the pages) of readers that were killed."""
        with self._using() as generation:
            try:
                return int(generation.env.reader_check())
            except lmdb.Error as error:
                raise IndexFailure(f"can't check the readers of the index: {error}") from error

    def compact(self) -> None:
        """Copy every row into a new file and take that.

        LMDB's own compacting copy copies pages as they are, with what was deleted still in their slack.
        """
        number = int(self._current.path.name) + 1
        draft, path = self._folder / f".{number}{disk.DRAFT_SUFFIX}", self._folder / str(number)
        disk.delete_tree(draft)
        fresh = self._open(draft)
        try:
            _copy(self._current, fresh)
        except lmdb.Error as error:
            raise IndexFailure(f"can't compact the index: {error}") from error
        finally:
            fresh.env.close()
        disk.rename(draft, path)
        disk.sync_folder(self._folder)
        try:
            fresh = self._open(path)
        except IndexFailure:
            disk.rename(path, draft)  # else the next start would take it for the index, without what is yet to come
            disk.delete_tree(draft)
            raise
        with self._lock:
            old, self._current = self._current, fresh
        disk.delete_tree(old.path)  # whoever still reads it has it open
        self._retire(old)

    def close(self) -> None:
        self._retire(self._current)

    @contextmanager
    def _using(self) -> Iterator[_Generation]:
        with self._lock:
            generation = self._current
            if generation.retired:
                raise IndexFailure("the index is closed")
            generation.users += 1
        try:
            yield generation
        finally:
            with self._lock:
                generation.users -= 1
                last = generation.retired and generation.users == 0
            if last:
                generation.env.close()

    def _retire(self, generation: _Generation) -> None:
        with self._lock:
            closing = not generation.retired and generation.users == 0
            generation.retired = True
        if closing:
            generation.env.close()


@contextmanager
def _committing(env: Any) -> Iterator[Any]:
    """A write transaction; committed at the end, undone where something is raised."""
    txn = env.begin(write=True)
    try:
        yield txn
        disk.in_lmdb("commit", txn.commit)
    except BaseException:
        txn.abort()
        raise


def _generations(folder: Path) -> list[Path]:
    try:
        return sorted((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    except FileNotFoundError as error:
        raise NoIndex(f"no index in {folder}") from error


def _tidy(folder: Path) -> None:
    """Remove what a compaction left that was killed: its draft, or the generation before."""
    disk.make_folders(folder)
    for path in [*folder.glob(f".*{disk.DRAFT_SUFFIX}"), *_generations(folder)[:-1]]:
        disk.delete_tree(path)


def _copy(old: _Generation, new: _Generation) -> None:
    with old.env.begin() as source, _committing(new.env) as target:
        for name in TABLES:
            for key, value in source.cursor(db=old.handles[name]):
                target.put(key, value, db=new.handles[name])
