"""LMDB environment: opening, schema, transactions, compaction.  The only importer of lmdb.

`index/` holds one directory a generation (1, 2, ...).  Compaction writes the next one from scratch and renames it into
place, so a crash leaves either; the highest number is the index.  A generation is never rewritten under a reader: LMDB
keeps the number of the last transaction in a lock file of its own, which must not meet another data file.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lmdb
import msgspec

from warmline_common.storage import disk
from warmline_proxy.store.environment_pool import DATA_FILE, EmptyEnvironment, EnvironmentGeneration, EnvironmentPool
from warmline_proxy.store.errors import (
    REBUILD_HINT,
    IndexDamagedError,
    IndexFullError,
    IndexMissingError,
    IndexSchemaError,
    IndexStoreError,
    make_damage_error,
    wrap_error,
)
from warmline_proxy.store.files import find_superseded, is_generation, restore_access
from warmline_proxy.store.page_checks import find_page_flaw
from warmline_proxy.store.tables import INCOMPLETE_KEY, PURGED_DATA_KEY, TABLES, TABLES_ADDED, Tables

log = logging.getLogger(__name__)

SCHEMA = 1
MAP_BYTES = 4 << 30  # virtual and sparse; doubled where it is full
READERS_MAX = 512
LOCK_BYTES = 36 << 10  # of LMDB's file of so many readers, which it makes without blocks, and writes to as memory
WRITE_BYTES_MAX = 1 << 20  # of one of LMDB's writes
SCHEMA_KEY = b"schema"
LOCK_FILE = "lock.mdb"
DAMAGE_ERRORS = (
    lmdb.BadValsizeError,
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)
DECODE_ERRORS = (msgspec.DecodeError, ValueError, OverflowError)  # raised for damaged entries

T = TypeVar("T")


class LmdbEnvironment:
    """Thread-safe for readers; `write` and `compact` belong to the one writer thread.  All may raise IndexStoreError.

    `exclusive`, not writable: no other process can write here either, and a missing index reads as an empty one.
    """

    def __init__(self, folder: Path, *, writable: bool, exclusive: bool = False, map_bytes: int = MAP_BYTES) -> None:
        self._folder = folder
        self._writable = writable
        self._uses_lock = not exclusive
        self._map_bytes = map_bytes
        self._follow_lock = threading.Lock()  # of a reader: one thread at a time follows the writer
        if writable:
            self._pool = EnvironmentPool(self._open_writable())
        else:
            self._pool = EnvironmentPool(self._open_or_empty() if exclusive else self._open_newest())

    def _open_writable(self) -> EnvironmentGeneration:
        self._prepare_folder()
        try:
            self.delete_superseded()
            return self._open_checked()
        except IndexDamagedError as error:
            return self._create_empty(error)

    def _prepare_folder(self) -> None:
        """Create the folder; anything else in its place is deleted, and access to what is in it restored."""
        if os.path.lexists(self._folder) and not self._folder.is_dir():
            log.error("%s is no folder; the index is made anew from the stored files", self._folder)
            disk.delete(self._folder)
        disk.make_folders(self._folder)
        restore_access(self._folder)

    def _open_or_empty(self) -> EnvironmentGeneration:
        try:
            return self._open_checked()
        except (IndexMissingError, IndexDamagedError) as error:
            log.error("%s: no stored data can be used", error)
            return EnvironmentGeneration(self._folder, EmptyEnvironment(), dict.fromkeys(TABLES))

    def _open_checked(self) -> EnvironmentGeneration:
        """Open the newest generation once all its pages are checked: LMDB would end this process at a damaged one."""
        for path in _list_generations(self._folder)[-1:]:
            with suppress(IndexMissingError):
                _require_sound_pages(path, tables_only=False)
        return self._open_newest()

    def require_sound_pages(self) -> None:
        """Check all pages of the open index.  Raises IndexDamagedError."""
        if not self._writable:
            self._follow_compaction()
        with self._pool.acquire() as generation:
            if generation.path != self._folder:  # else there is none
                _require_sound_pages(generation.path, tables_only=False)

    def become_writable(self) -> None:
        """Reopen an index that was opened `exclusive`; readers wait.  IndexStoreError, OSError: it stays read-only."""
        with self._pool.acquire_exclusive() as generation:
            generation.env.close()
            self._writable = self._uses_lock = True
            try:
                self._pool.current = self._open_writable()
            except BaseException:
                self._writable = self._uses_lock = False
                self._pool.current = self._open_or_empty()
                raise

    def delete_superseded(self) -> list[Path]:
        """Delete the draft or the old generation that a killed compaction left, and all that is no generation."""
        paths = find_superseded(self._folder.iterdir())
        for path in paths:
            disk.delete_tree(path)
        return paths

    def replace_with_empty(self, error: IndexDamagedError) -> None:
        """Replace an index that turned out to be unreadable with an empty one; transactions under way go on in it."""
        log.error("%s; a new one is made from the stored files", error)
        self._replace_generations(lambda _: None)

    def _create_empty(self, error: IndexDamagedError) -> EnvironmentGeneration:
        # Not kept: it holds transcripts, which neither a purge nor the budget would ever find again.
        log.error("%s; a new one is made from the stored files", error)
        for path in list(self._folder.iterdir()):  # the folder itself may be a link
            disk.delete_tree(path)
        return self._open_newest()

    def _open_newest(self) -> EnvironmentGeneration:
        for _ in range(3):  # a compaction may take the directory away between the look and the opening
            paths = _list_generations(self._folder)
            if not paths and not self._writable:
                raise IndexMissingError(f"no index in {self._folder}")
            path = paths[-1] if paths else self._folder / "1"
            try:
                return self._open(path)
            except IndexMissingError:
                continue
        raise IndexMissingError(f"no index in {self._folder}")

    def _open(self, path: Path) -> EnvironmentGeneration:
        if not self._writable:
            _require_sound_pages(path, tables_only=True)
        try:
            if self._writable:
                disk.make_folders(path)
                _allocate_lock_file(path / LOCK_FILE)
            env = self._open_lmdb(path)
        except DAMAGE_ERRORS as error:
            raise make_damage_error(path, error) from error
        except (lmdb.Error, OSError) as error:
            raise wrap_error(f"can't open the index in {path}", error) from error
        try:
            return EnvironmentGeneration(path, env, self._open_tables(env, path))
        except (lmdb.Error, OSError, IndexStoreError) as error:
            env.close()
            if isinstance(error, IndexStoreError):
                raise
            if isinstance(error, DAMAGE_ERRORS):
                raise make_damage_error(path, error) from error
            if self._writable:
                raise wrap_error(f"can't open the index in {path}", error) from error
            raise IndexMissingError(f"the index in {path} is not complete: {error}") from error

    def _open_lmdb(self, path: Path) -> Any:
        open_environment = partial(
            lmdb.open,
            str(path),
            map_size=self._map_bytes if self._writable else 0,  # 0: as large as the file's
            max_dbs=len(TABLES),
            max_readers=READERS_MAX,
            mode=0o600,
            readonly=not self._writable,
            create=self._writable,
            lock=self._uses_lock,
        )
        return disk.run_lmdb("open", open_environment) if self._writable else open_environment()

    def _open_tables(self, env: Any, path: Path) -> dict[str, Any]:
        if self._writable:
            with _write_transaction(env) as txn:
                handles = {name: env.open_db(name.encode(), txn=txn) for name in TABLES}
                if txn.get(SCHEMA_KEY, db=handles["meta"]) is None:
                    tables = Tables(txn, handles)
                    tables.put("meta", SCHEMA_KEY, str(SCHEMA).encode())
                    tables.put("meta", INCOMPLETE_KEY, b"")
                    tables.reset_digest()
        else:  # not within one transaction: LMDB forgets handles that were opened in a read transaction when that ends
            handles = {name: _open_table(env, name) for name in TABLES}
        with env.begin() as txn:
            found = txn.get(SCHEMA_KEY, db=handles["meta"])
        if found is not None and not found.isdigit():
            raise IndexDamagedError(f"the index in {path} is damaged: it has no schema")
        if found is not None and int(found) != SCHEMA:
            relation = "newer" if int(found) > SCHEMA else "older"
            raise IndexSchemaError(
                f"the index in {path} has schema {int(found)}, {relation} than the {SCHEMA} that this version "
                "reads; use the version of Warmline that wrote it, or another home"
            )
        return handles

    @contextmanager
    def read_transaction(self) -> Iterator[Tables]:
        """Tables of a consistent snapshot; never waits for a transaction of the writer."""
        if not self._writable:
            self._follow_compaction()
            self._follow_growth()
        with self._pool.acquire() as generation, _translate_errors():
            try:
                with generation.env.begin() as txn:
                    yield Tables(txn, generation.handles)
            except (*DAMAGE_ERRORS, *DECODE_ERRORS) as error:
                raise IndexDamagedError(f"the index is damaged: {error}; {REBUILD_HINT}", "damaged") from error

    def write(self, change: Callable[[Tables], T]) -> T:
        """Run `change` in a transaction of its own; durable when this returns, undone when it raises.

        Where the map is full it grows, and `change` is run again.
        """
        if self._pool.current.lost:
            self._reopen()
        while True:
            try:
                return self._write(change)
            except lmdb.MapFullError:
                self._grow_map()
            except lmdb.PanicError as error:  # LMDB could not finish a write; what was committed is whole
                self._reopen()
                raise self._wrap_write_error("can't write the index", error) from error

    def _write(self, change: Callable[[Tables], T]) -> T:
        """Raises MapFullError, PanicError, IndexStoreError."""
        with self._pool.acquire() as generation:
            try:
                with _write_transaction(generation.env) as txn:
                    tables = Tables(txn, generation.handles)
                    result = change(tables)
                    tables.write_sums()
                    tables.write_digest()
                generation.require_whole_file()
                return result
            except (lmdb.MapFullError, lmdb.PanicError):
                raise
            except (*DAMAGE_ERRORS, msgspec.DecodeError, UnicodeDecodeError) as error:
                raise IndexDamagedError(f"the index is damaged: {error}; {REBUILD_HINT}", "damaged") from error
            except (lmdb.Error, OSError) as error:
                raise self._wrap_write_error("can't write the index", error) from error

    def _wrap_write_error(self, what: str, error: Exception) -> IndexStoreError:
        """As `wrap_error`; LMDB calls a write that a full disk cut short an input/output error."""
        wrapped = wrap_error(what, error)
        if wrapped.code == "EIO" and disk.count_free_bytes(self._folder) < WRITE_BYTES_MAX:
            return IndexStoreError(f"{what}: the disk is full ({error})", "ENOSPC")
        return wrapped

    def _grow_map(self) -> None:
        """Double the map.  Raises IndexFullError where there is no address space or memory for it."""
        with self._pool.acquire_exclusive() as generation:
            old = generation.map_bytes()
            try:
                disk.run_lmdb("grow", lambda: generation.env.set_mapsize(2 * old))
            except (lmdb.Error, OSError, MemoryError) as error:
                self._replace_generation(generation)  # LMDB has taken the old map down first
                raise IndexFullError(f"the index has reached its {old >> 10} KiB and can't grow: {error}") from error
            self._map_bytes = generation.map_bytes()
        log.info("the map of the index grew to %d KiB", self._map_bytes >> 10)

    def _reopen(self) -> None:
        """Open the environment again; a failure makes it unusable until a later write succeeds."""
        self._pool.current.lost = True
        with self._pool.acquire_exclusive() as generation:
            self._replace_generation(generation)

    def _replace_generation(self, generation: EnvironmentGeneration) -> None:
        """Close an environment and open the newest.  The caller has exclusive access."""
        generation.lost = True
        generation.env.close()
        self._pool.current = self._open_newest()

    def _follow_compaction(self) -> None:
        """Open the writing process's generation where it has compacted: the old one is written no more."""
        if not self._uses_lock:  # no process writes
            return
        with self._follow_lock, suppress(IndexMissingError):
            if _list_generations(self._folder)[-1:] != [self._pool.current.path]:
                self._pool.swap(self._open_newest())

    def _follow_growth(self) -> None:
        """Map as much as the writing process does."""
        with self._pool.acquire() as generation, _translate_errors():
            try:
                generation.env.begin().abort()
                return
            except lmdb.MapResizedError:
                pass
        with self._follow_lock, self._pool.acquire_exclusive() as generation, _translate_errors():
            generation.env.set_mapsize(0)

    def bytes_used(self) -> int:
        """Bytes of the index on disk: its used pages, not the sparse map."""
        with self._pool.acquire() as generation, _translate_errors():
            return (int(generation.env.info()["last_pgno"]) + 1) * int(generation.env.stat()["psize"])

    def reader_check(self) -> int:
        """Free the slots (and so the pages) of readers that were killed."""
        with self._pool.acquire() as generation:
            try:
                return int(generation.env.reader_check())
            except lmdb.Error as error:
                raise IndexStoreError(f"can't check the readers of the index: {error}") from error

    def compact(self) -> None:
        """Copy every row into a new file, and use that.

        LMDB's own compacting copy copies pages as they are, with deleted rows still in their slack.
        """
        self._pool.current.require_whole_file()
        self._replace_generations(lambda draft: _copy_tables(self._pool.current, draft))

    def _replace_generations(self, fill: Callable[[EnvironmentGeneration], None]) -> None:
        """Use a new generation, which `fill` gets empty, from now on.  Raises IndexStoreError."""
        try:
            old = self._pool.swap(self._write_generation(fill))
            disk.delete_tree(old.path)  # its readers have it open
        except DAMAGE_ERRORS as error:
            raise make_damage_error(self._pool.current.path, error) from error
        except (lmdb.Error, OSError) as error:
            raise self._wrap_write_error("can't write the index anew", error) from error

    def _write_generation(self, fill: Callable[[EnvironmentGeneration], None]) -> EnvironmentGeneration:
        number = int(self._pool.current.path.name) + 1
        draft, path = self._folder / f".{number}{disk.DRAFT_SUFFIX}", self._folder / str(number)
        disk.delete_tree(draft)
        try:
            fresh = self._open(draft)
            try:
                fill(fresh)
            finally:
                fresh.env.close()
            disk.rename(draft, path)
        except BaseException:
            with suppress(OSError):  # the first failure is what counts; the next start tries again
                disk.delete_tree(draft)
            raise
        try:
            disk.sync_folder(self._folder)
            return self._open(path)
        except (IndexStoreError, OSError):
            self._undo_compaction(path, draft)
            raise

    def _undo_compaction(self, path: Path, draft: Path) -> None:
        """Else the next start would take it for the index, without the rows of later writes."""
        try:
            disk.rename(path, draft)
            disk.delete_tree(draft)
        except OSError:
            if path.exists():  # then this process must use it, too
                self._reopen()

    def close(self) -> None:
        """Close; waits for transactions to end."""
        self._pool.close()


@contextmanager
def _write_transaction(env: Any) -> Iterator[Any]:
    """A write transaction; committed at the end, undone by an exception."""
    txn = env.begin(write=True)
    try:
        yield txn
        disk.run_lmdb("commit", txn.commit)
    except BaseException:
        txn.abort()
        raise


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise IndexStoreError(f"can't read the index: {error}") from error


def _require_sound_pages(path: Path, *, tables_only: bool) -> None:
    """Raise IndexMissingError, or IndexDamagedError where LMDB could not use a generation's data file."""
    if not (flaw := find_page_flaw(path / DATA_FILE, tables_only=tables_only)):
        return
    if os.path.lexists(path / DATA_FILE) or (os.path.lexists(path) and not path.is_dir()):
        raise make_damage_error(path, flaw)
    raise IndexMissingError(f"no index in {path}")


def _allocate_lock_file(path: Path) -> None:
    if os.path.lexists(path) and not path.is_file():
        disk.delete_tree(path)
    disk.allocate(path, LOCK_BYTES)


def _open_table(env: Any, name: str) -> Any:
    """Handle of a table to read; None where an older version, without that table, wrote the index."""
    try:
        return env.open_db(name.encode(), create=False)
    except lmdb.NotFoundError:
        if name in TABLES_ADDED:
            return None
        raise


def _list_generations(folder: Path) -> list[Path]:
    try:
        return sorted((path for path in folder.iterdir() if is_generation(path)), key=lambda path: int(path.name))
    except FileNotFoundError as error:
        raise IndexMissingError(f"no index in {folder}") from error
    except NotADirectoryError as error:
        raise make_damage_error(folder, "it is no folder") from error


def _copy_tables(old: EnvironmentGeneration, new: EnvironmentGeneration) -> None:
    with old.env.begin() as source, _write_transaction(new.env) as target:
        for name in TABLES:
            for key, value in source.cursor(db=old.handles[name]):
                target.put(key, value, db=new.handles[name])
        tables = Tables(target, new.handles)
        if source.get(INCOMPLETE_KEY, db=old.handles["meta"]) is None:
            target.delete(INCOMPLETE_KEY, db=new.handles["meta"])  # the new one's own, which the copied digest lacks
        tables.delete("meta", PURGED_DATA_KEY)
        tables.write_digest()
