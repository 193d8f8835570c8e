"""The index of what is stored: `IndexReader` for who looks, `Index` for the proxy, which owns it.

The files are the index's to delete: a row goes first (its id is then "doomed"), the file after, and the doomed id last,
so that whatever is killed in between, the next start finishes it.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from warmline_common.protocol.messages import KvLayout, SaveReply
from warmline_common.storage.home import Home
from warmline_proxy.index import lookup as index_walk
from warmline_proxy.index import save as index_save
from warmline_proxy.index import tree as index_tree
from warmline_proxy.index.reader import IndexReader
from warmline_proxy.index.write_behind import WriteBehindBuffer
from warmline_proxy.store import crash_probe as index_probe
from warmline_proxy.store import files as index_files
from warmline_proxy.store import reserve as spare
from warmline_proxy.store import row_checks as index_flaws
from warmline_proxy.store.environment import MAP_BYTES, LmdbEnvironment
from warmline_proxy.store.errors import (
    NO_SPACE_CODES,
    DiskBudgetError,
    IndexDamagedError,
    IndexFullError,
    IndexMissingError,
    IndexReadOnlyError,
    IndexSchemaError,
    IndexStoreError,
    get_error_code,
    is_read_only_error,
)
from warmline_proxy.store.rows import RequestRecord, SavePlan, SaveResult, SessionUpdate, TurnRow
from warmline_proxy.store.tables import Tables
from warmline_proxy.store.writer import WriterThread

__all__ = [
    "DiskBudgetError",
    "Index",
    "IndexFullError",
    "IndexMissingError",
    "IndexReadOnlyError",
    "IndexReader",
    "IndexSchemaError",
    "IndexStoreError",
]

FLUSH_INTERVAL_S = 1.0
READER_CHECK_INTERVAL_S = 60.0
DISK_FULL_CODES = (*NO_SPACE_CODES, "EIO")  # LMDB calls a write that was cut short an input/output error

T = TypeVar("T")
log = logging.getLogger(__name__)


class Index(IndexReader):
    """The proxy's, under `home.lock`.  Methods may be called on any thread.

    Those that write block until it is durable (on an event loop: `asyncio.to_thread`); `note_use`, `note_turn`,
    `record`, `lease` and `release` return at once.  Any write may raise IndexFull: nothing was changed then, and
    reading goes on.
    """

    def __init__(self, home: Home, budget_bytes: int, *, map_bytes: int = MAP_BYTES) -> None:
        self.home = home
        self.budget_bytes = budget_bytes
        self.read_only = ""  # why nothing can be written, while what is stored can be read
        self.read_only_code = ""  # as code_of
        self.on_flush: Callable[[IndexStoreError | None], object] = _log_flush_error
        # Any thread: why ("budget" or "disk_full"), how many files, their bytes.
        self.on_evicted: Callable[[str, int, int], object] = _ignore_evicted
        self.change_count = 0  # how often something was written, but for bookkeeping: who keeps what it read compares
        self.flush_count = 0  # how often bookkeeping was
        try:
            self._environment = LmdbEnvironment(home.index, writable=True, map_bytes=map_bytes)
            self._environment.reader_check()
        except (IndexStoreError, OSError) as error:
            if not is_read_only_error(error):
                raise
            self.set_read_only(error)
            self._environment = LmdbEnvironment(home.index, writable=False, exclusive=True, map_bytes=map_bytes)
        self._is_reserve_used = False  # what was set aside for a full disk, and should be again
        self._lock = threading.Lock()  # guards the leases
        self._leases: Counter[str] = Counter()
        self._write_behind = WriteBehindBuffer()
        self._reader_check_due = time.monotonic() + READER_CHECK_INTERVAL_S
        self._writer = WriterThread(self._tick, FLUSH_INTERVAL_S)

    def set_read_only(self, error: IndexStoreError | OSError) -> None:
        """Write nothing any more, as the home can't be written to, or could not be reconciled; until `reopen`."""
        self.read_only, self.read_only_code = str(error), get_error_code(error)

    def reopen(self) -> bool:
        """True where the index, read-only since the start, can be written now; it must be reconciled then.  Blocks."""
        if not os.access(self.home.index, os.W_OK):
            return False
        try:
            self._submit(self._environment.become_writable).result()
        except (IndexStoreError, OSError) as error:
            self.set_read_only(error)
        else:
            self.read_only = self.read_only_code = ""
        return not self.read_only

    # --- saving ---

    def begin_save(
        self,
        root: bytes,
        model: str,
        tokens: bytes,
        *,
        checkpoints: Sequence[int],
        layout: KvLayout,
        may_replace: bool = True,
        segment_ends: Sequence[int] = (),
    ) -> SavePlan | None:
        """Plan of a save: the part of `tokens` (all with rows in memory) to be written; None where all is stored.

        `checkpoints`: positions whose state is in memory.  `may_replace`: the backend still has the rows of a small
        parent, so that the first segment may include it.  `segment_ends`: wanted ends of segments.  Evicts for the
        budget, and deletes those files, before it returns; segments that the plan builds on stay.  Raises
        DiskBudgetError.
        """
        intent = index_save.SaveIntent(
            root=root,
            model=model,
            tokens=tokens,
            checkpoints=checkpoints,
            layout=layout,
            may_replace=may_replace,
            segment_ends=segment_ends,
        )
        leased = self._leased_ids()

        def change(tables: Tables) -> tuple[SavePlan | None, dict[str, int]]:
            plan = index_save.begin_save(tables, intent, leased)
            if plan is None:
                return None, {}
            room = index_save.make_room(
                tables, self.budget_bytes, 0, self._environment.bytes_used(), leased, is_required=True
            )
            return plan, _read_pending_sizes(tables, room)

        plan, evicted = self._write(change)
        self._notify_evicted("budget", evicted)
        self.sweep()
        return plan

    def commit_save(self, plan: SavePlan, reply: SaveReply, *, prefill_s: float, session: SessionUpdate) -> SaveResult:
        """Make what the backend has written part of the tree, in one transaction, and advance (or open) its session.

        `prefill_s`: what computing [plan.matched, end) cost.  What no longer fits (its parent is gone, another save was
        sooner) is dropped and its file deleted.
        """
        committed = self._write(
            lambda tables: index_save.commit_save(tables, plan, reply, prefill_s, session, time.time()),
        )
        self.sweep()
        return committed

    def abort_save(self, plan: SavePlan) -> None:
        """Forget it, and delete what it may have written.  Nothing happens where it is over already."""
        self._write(lambda tables: index_save.abort_save(tables, plan))
        self.sweep()

    def record_session(self, root: bytes, tokens: bytes, session: SessionUpdate) -> str:
        """A conversation went on without anything to save: its session's id; "" where nothing of it is stored."""

        def change(tables: Tables) -> str:
            path = index_walk.lookup_path(tables, root, tokens, len(tokens))
            return index_tree.advance_session(tables, path, root, tokens, session, time.time())

        return self._write(change)

    # --- bookkeeping, off the hot path ---

    def record_use(self, ids: Iterable[str]) -> None:
        """Segments and checkpoints that a request reused; written within a second."""
        if self._write_behind.record_use(ids):
            self._submit(self._tick)

    def record_request(self, record: RequestRecord) -> None:
        """Keep it among the last 1,000; written within a second."""
        if self._write_behind.record_request(record):
            self._submit(self._tick)

    def record_audit(self, request_id: str, audit: str, guard: str) -> None:
        """Add to a request's record what an audit has found; written within a second."""
        self._write_behind.record_audit(request_id, audit, guard)

    def record_turn(self, row: TurnRow) -> None:
        """Keep an answer that called tools; written within a second."""
        if self._write_behind.record_turn(row):
            self._submit(self._tick)

    def flush(self) -> None:
        """Write the bookkeeping now."""
        self._submit(self._tick).result()

    # --- leases, room, quarantine ---

    def lease(self, ids: Iterable[str]) -> None:
        """Keep these files while a restore reads them; counted, so each lease wants its release."""
        with self._lock:
            self._leases.update(ids)

    def release(self, ids: Iterable[str]) -> None:
        with self._lock:
            self._leases.subtract(ids)
            self._leases = +self._leases

    def make_room(self, bytes_needed: int = 0) -> list[str]:
        """Evict (and delete) until the budget holds with that much more; `begin_save` does it by itself.

        The ids that went.  Raises NoRoom, except for 0 bytes: then what may go goes.
        """
        leased = self._leased_ids()

        def change(tables: Tables) -> dict[str, int]:
            used, must = self._environment.bytes_used(), bytes_needed > 0
            return _read_pending_sizes(
                tables, index_save.make_room(tables, self.budget_bytes, bytes_needed, used, leased, is_required=must)
            )

        evicted = self.transact(change, frees_space=True)
        self._notify_evicted("budget", evicted)
        self.sweep()
        return list(evicted)

    def free_bytes(self, bytes_wanted: int, why: str = "disk_full") -> list[str]:
        """Evict (and delete) though the budget holds; the ids that went.  `why`: as `on_evicted` is told."""
        leased = self._leased_ids()
        evicted = self.transact(
            lambda tables: _read_pending_sizes(tables, index_save.free_bytes(tables, bytes_wanted, leased)),
            frees_space=True,
        )
        self._notify_evicted(why, evicted)
        self.sweep()
        return list(evicted)

    def _notify_evicted(self, why: str, evicted: dict[str, int]) -> None:
        if evicted:
            self.on_evicted(why, len(evicted), sum(evicted.values()))

    def quarantine(self, file_id: str, reason: str) -> list[str]:
        """Take a damaged, foreign or suspect file out of the tree, a segment with all that builds on it; their ids.

        The files move to segments/quarantine/, count against the budget, and are the first to go.
        """
        ids = self._write(lambda tables: index_tree.quarantine_subtree(tables, file_id, reason, time.time()))
        try:
            index_files.move_to_quarantine(self.home, ids)
        except OSError as error:  # nobody uses it any more, and the next start deletes it
            log.error("%s is out of use, but stays where it is: %s", file_id, error)
        self.update_quarantine_sizes()
        return ids

    def update_quarantine_sizes(self) -> None:
        """Count what was set aside as what it weighs now, and forget what is not there."""

        def size_of(file_id: str) -> int | None:
            return index_files.read_quarantined_size(self.home, file_id)

        self._write(lambda tables: index_tree.update_quarantine_sizes(tables, size_of))

    def sweep(self) -> int:
        """Delete the files whose rows are gone, but for leased ones; how many.  What removes rows calls it itself.

        Those that the disk does not give away stay doomed, until the next sweep.
        """
        with self._environment.read_transaction() as tables:
            doomed = tables.pending_deletions().keys() - self._leased_ids()
        deleted = [file_id for file_id in doomed if index_files.try_delete_file(self.home, file_id)]
        if not deleted:
            return 0

        def change(tables: Tables) -> None:
            for file_id in deleted:
                tables.remove_pending_deletion(file_id)

        self._write(change)
        return len(deleted)

    # --- upkeep ---

    def transact(self, change: Callable[[Tables], T], *, frees_space: bool = False) -> T:
        """A transaction of reconcile's or purge's own; nobody else needs it.

        One that `frees` room takes what is set aside for it where the disk is full.
        """
        return self._retry_with_reserve(lambda: self._write(change)) if frees_space else self._write(change)

    def _retry_with_reserve(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except IndexStoreError as error:
            if error.code not in DISK_FULL_CODES or not spare.release_reserve(self.home):
                raise
            self._is_reserve_used = True  # first what was freed is for who wanted it
        return work()

    def allocate_reserve(self) -> None:
        """Set room aside for deletions where the disk is full; without, they have to do with what is free."""
        spare.allocate_reserve(self.home)
        self._is_reserve_used = not spare.is_reserve_complete(self.home)

    def renew_reserve(self) -> None:
        """Allocate the reserve again where it was released."""
        if self._is_reserve_used:
            self.allocate_reserve()

    def compact(self) -> None:
        """Rewrite the index file, so that nothing deleted is left in it.  Readers go on meanwhile."""
        self._retry_with_reserve(lambda: self._submit(self._environment.compact).result())

    def erase_purged_data(self) -> bool:
        """Compact where a purge has not come to that: whether it had not."""
        with self._environment.read_transaction() as tables:
            has_traces = tables.has_purged_data()
        if has_traces:
            self.compact()
        return has_traces

    def has_purge_notice(self) -> bool:
        """True where a backend may hold purged KV in memory: the process that purged ended before the backend was
        notified.
        """
        with self._environment.read_transaction() as tables:
            return tables.has_purge_notice()

    def clear_purge_notice(self) -> None:
        """No backend holds it any more."""
        self._write(Tables.clear_purge_notice)

    def delete_superseded(self) -> list[Path]:
        """Delete what lies beside the index's newest generation and is none of a compaction under way."""
        return self._submit(self._environment.delete_superseded).result()

    def is_damaged(self, *, force_probe: bool = False) -> bool:
        """True where the index lacks stored data, or has entries that can't be read.

        An unreadable file is replaced by an empty one.  Where reading it has ended a process, or with `force_probe`,
        another process reads it first.
        """
        with index_probe.mark_reading(self.home) as died:
            try:
                if (died or force_probe) and not index_probe.is_readable(self.home.index):
                    raise IndexDamagedError("the index is damaged: no process gets through it")
                with self._environment.read_transaction() as tables:
                    flaws = list(
                        index_flaws.find_flaws(tables)
                    )  # all: beyond the first may be pages that can't be read
                    return bool(flaws) or tables.is_incomplete()
            except IndexDamagedError as error:
                damage = error
            self._submit(lambda: self._environment.replace_with_empty(damage)).result()
            return True

    def close(self) -> None:
        """Writes the bookkeeping first."""
        self._writer.close()
        self._environment.close()

    def _leased_ids(self) -> set[str]:
        with self._lock:
            return set(self._leases)

    def _submit(self, work: Callable[[], T]) -> "Future[T]":
        try:
            return self._writer.submit(work)
        except RuntimeError as error:
            raise IndexStoreError(str(error)) from error

    def _write(self, change: Callable[[Tables], T]) -> T:
        if self.read_only:
            error = IndexReadOnlyError(self.read_only)
            error.code = self.read_only_code
            raise error
        return self._submit(lambda: self._write_now(change)).result()

    def _write_now(self, change: Callable[[Tables], T]) -> T:
        """On the writer thread."""
        result = self._environment.write(change)
        self.change_count += 1
        return result

    def _tick(self) -> None:
        """On the writer thread, every second and at the end.  What can't be written is tried again at the next."""
        try:
            if self.read_only:
                self._write_behind.clear()
            elif self._write_behind.flush(self._environment.write):
                self.flush_count += 1
                self.on_flush(None)
            if time.monotonic() >= self._reader_check_due:
                self._reader_check_due = time.monotonic() + READER_CHECK_INTERVAL_S
                self._environment.reader_check()
                self.renew_reserve()
        except IndexStoreError as error:
            self.on_flush(error)


def _read_pending_sizes(tables: Tables, evicted: list[str]) -> dict[str, int]:
    """The bytes of each file that was just doomed."""
    doomed = tables.pending_deletions() if evicted else {}
    return {file_id: doomed.get(file_id, 0) for file_id in evicted}


def _ignore_evicted(why: str, files: int, bytes_count: int) -> None:
    """Nobody counts."""


def _log_flush_error(error: IndexStoreError | None) -> None:
    if error is not None:
        log.warning("bookkeeping could not be written: %s", error)
