"""Index of the stored files: `IndexReader` for all processes, `Index` for the proxy, which owns it.

The index deletes the files: first their rows (their ids are then in `doomed`), then the files, and the `doomed` ids
last, so that the next start completes a deletion that was killed in between.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from warmline_common.protocol.messages import SaveReply
from warmline_common.storage.home import Home
from warmline_proxy.index import lookup, responses, save, tree
from warmline_proxy.index.reader import IndexReader
from warmline_proxy.index.responses import DEFAULT_LIMITS, FoundResponse, ResponseEntry, ResponseLimits
from warmline_proxy.index.save import SaveIntent
from warmline_proxy.index.write_behind import WriteBehindBuffer
from warmline_proxy.store import files, reserve
from warmline_proxy.store.environment import MAP_BYTES, LmdbEnvironment
from warmline_proxy.store.errors import (
    NO_SPACE_CODES,
    DiskBudgetError,
    IndexDamagedError,
    IndexReadOnlyError,
    IndexStoreError,
    get_error_code,
    is_read_only_error,
)
from warmline_proxy.store.rows import RequestRecord, ResponseRow, SavePlan, SaveResult, SessionUpdate, TurnRow
from warmline_proxy.store.tables import Tables
from warmline_proxy.store.writer import WriterThread

__all__ = ["DiskBudgetError", "Index", "IndexReader", "IndexStoreError"]

FLUSH_INTERVAL_S = 1.0
UPKEEP_INTERVAL_S = 60.0

T = TypeVar("T")


class _RollbackError(Exception):
    """Ends a preview of a change; `file_ids`: of the files that the change would delete."""

    def __init__(self, file_ids: set[str]) -> None:
        super().__init__("rolled back")
        self.file_ids = file_ids


log = logging.getLogger(__name__)


class Index(IndexReader):
    """The proxy's index, under `home.lock`.  Methods may be called on any thread.

    Methods that write block until it is durable (on an event loop: `asyncio.to_thread`); `record_use`,
    `record_request`, `record_audit`, `record_turn`, `record_response`, `lease` and `release` return at once.  Any write
    may raise IndexFullError: nothing was changed then, and reading goes on.
    """

    def __init__(
        self,
        home: Home,
        budget_bytes: int,
        *,
        map_bytes: int = MAP_BYTES,
        response_limits: ResponseLimits = DEFAULT_LIMITS,
        keeps_texts: bool = True,
    ) -> None:
        self.home = home
        self.budget_bytes = budget_bytes
        self.response_limits, self.keeps_texts = response_limits, keeps_texts  # setting `titles`
        self.read_only = ""  # reason why nothing can be written, while stored data can be read
        self.read_only_code = ""  # as get_error_code
        self.on_flush: Callable[[IndexStoreError | None], object] = _log_flush_error
        # Any thread: why ("budget" or "disk_full"), how many files, their bytes.
        self.on_evicted: Callable[[str, int, int], object] | None = None
        self.change_count = 0  # of writes, without bookkeeping: callers compare it before they use cached reads
        self.flush_count = 0  # of writes of bookkeeping
        try:
            self._environment = LmdbEnvironment(home.index, writable=True, map_bytes=map_bytes)
            self._environment.reader_check()
        except (IndexStoreError, OSError) as error:
            if not is_read_only_error(error):
                raise
            self.set_read_only(error)
            self._environment = LmdbEnvironment(home.index, writable=False, exclusive=True, map_bytes=map_bytes)
        self._is_reserve_used = False  # the reserve was released, and is to be allocated again
        self._lock = threading.Lock()  # guards the leases
        self._leases: Counter[str] = Counter()
        self._write_behind = WriteBehindBuffer(response_limits)
        self._upkeep_due = time.monotonic() + UPKEEP_INTERVAL_S
        self._writer = WriterThread(self._tick, FLUSH_INTERVAL_S)

    def set_read_only(self, error: IndexStoreError | OSError) -> None:
        """Refuse writes until `reopen`, as the home can't be written to, or could not be reconciled."""
        self.read_only, self.read_only_code = str(error), get_error_code(error)

    def reopen(self) -> bool:
        """True where an index that was read-only can be written now; it must be reconciled then.  Blocks."""
        if not os.access(self.home.index, os.W_OK):
            return False
        try:
            self._writer.submit(self._environment.become_writable).result()
        except (IndexStoreError, OSError) as error:
            self.set_read_only(error)
        else:
            self.read_only = self.read_only_code = ""
        return not self.read_only

    # --- saving ---

    def begin_save(self, intent: SaveIntent) -> SavePlan | None:
        """Plan of a save: the part of the tokens to be written; None where all is stored.

        Evicts for the budget, and deletes those files, before it returns; segments that the plan builds on stay.
        Raises DiskBudgetError.
        """
        return self._begin_save(intent, None)[0]

    def begin_turn_save(self, intent: SaveIntent, session: SessionUpdate) -> tuple[SavePlan | None, str]:
        """As `begin_save`, with "", or, where all is stored, (None, id of the session as `record_session`)."""
        return self._begin_save(intent, session)

    def _begin_save(self, intent: SaveIntent, session: SessionUpdate | None) -> tuple[SavePlan | None, str]:
        leased = self._leased_ids()

        def change(tables: Tables) -> tuple[SavePlan | None, str, dict[str, int]]:
            if plan := save.begin_save(tables, intent, leased):
                return plan, "", self._make_room(tables, 0, leased, is_required=True)
            return None, _advance_session(tables, intent.root, intent.tokens, session) if session else "", {}

        plan, session_id, evicted = self._write(change)
        if plan:
            self._finish_eviction("budget", evicted)
        return plan, session_id

    def commit_save(self, plan: SavePlan, reply: SaveReply, *, prefill_s: float, session: SessionUpdate) -> SaveResult:
        """Insert the written files in the tree, in one transaction, and advance (or create) their session.

        `prefill_s`: cost of computing [plan.matched, end).  Files that no longer fit (their parent is gone, another
        save was sooner) are deleted.
        """
        result = self._write(lambda tables: save.commit_save(tables, plan, reply, prefill_s, session, time.time()))
        self.sweep()
        return result

    def abort_save(self, plan: SavePlan) -> None:
        """Remove a plan, and delete the files that it may have written; does nothing where it is over already."""
        self._write(lambda tables: save.abort_save(tables, plan))
        self.sweep()

    def record_session(self, root: bytes, tokens: bytes, session: SessionUpdate) -> str:
        """Advance the session of a conversation without anything to save: its id; "" where nothing of it is stored."""
        return self._write(lambda tables: _advance_session(tables, root, tokens, session))

    # --- bookkeeping, off the hot path ---

    def record_use(self, ids: Iterable[str]) -> None:
        """Count segments and checkpoints that a request reused; written within a second."""
        if self._write_behind.record_use(ids):
            self._writer.submit(self._tick)

    def record_request(self, record: RequestRecord) -> None:
        """Keep a request's record among the last 1,000; written within a second."""
        if self._write_behind.record_request(record):
            self._writer.submit(self._tick)

    def record_audit(self, request_id: str, audit: str, guard: str) -> None:
        """Add an audit's finding to a request's record; written within a second."""
        self._write_behind.record_audit(request_id, audit, guard)

    def record_turn(self, row: TurnRow) -> None:
        """Keep an answer that called tools; written within a second."""
        if self._write_behind.record_turn(row):
            self._writer.submit(self._tick)

    def record_response(self, entry: ResponseEntry) -> "Future[None]":
        """Store a response: clients can read it at once, and it is written as soon as the writer thread is free.

        The future ends once it is written, or could not be: then it is written later.
        """
        self._write_behind.record_response(entry)
        return self._writer.submit(self._tick)

    def record_response_session(self, owner: str, answer_id: str, session: str) -> None:
        """Add the conversation to a stored response; written within a second."""
        self._write_behind.record_response_session((owner, answer_id), session)

    def flush(self) -> None:
        """Write the bookkeeping now."""
        self._writer.submit(self._tick).result()

    # --- stored responses ---

    def find_response(self, owner: str, answer_id: str) -> FoundResponse | None:
        """The owner's stored response of that id."""
        key = owner, answer_id
        unwritten = self._write_behind.find_response(lambda entry: entry.key == key)
        return unwritten.as_found() if unwritten else self._find_valid(responses.find_response, owner, answer_id)

    def find_response_holder(self, owner: str, item_id: str) -> FoundResponse | None:
        """The owner's newest stored response that has an item."""
        item = responses.id_key(owner, item_id)
        unwritten = self._write_behind.find_response(lambda entry: entry.has_item(item))
        return unwritten.as_found() if unwritten else self._find_valid(responses.find_holder, owner, item_id)

    def _find_valid(
        self, find: Callable[[Tables, str, str], ResponseRow | None], owner: str, id_: str
    ) -> FoundResponse | None:
        row = self._read(lambda tables: find(tables, owner, id_))
        if row is None or responses.is_expired(row, self.response_limits, time.time()):
            return None
        return FoundResponse(row, lambda: self._read(lambda tables: responses.get_body(tables, row)))

    def delete_response(self, owner: str, answer_id: str) -> bool:
        """Delete the owner's response of that id; False where none is stored.  Blocks."""
        self.flush()
        dropped = self.drop_unwritten_responses(lambda row: (row.owner, row.id) == (owner, answer_id))
        if not self._read(lambda tables: responses.has_response(tables, owner, answer_id)):
            return dropped > 0
        return self.transact(lambda tables: responses.delete_response(tables, owner, answer_id), frees_space=True)

    def drop_unwritten_responses(self, is_dropped: Callable[[ResponseRow], bool]) -> int:
        """Drop responses that a flush could not write; how many."""
        return self._write_behind.drop_responses(is_dropped)

    def evict_responses(self) -> int:
        """Remove the oldest responses until their limits hold; how many.  Blocks."""
        limits, now = self.response_limits, time.time()
        if not self._read(lambda tables: responses.has_excess(tables, limits, now)):
            return 0
        return self.transact(lambda tables: responses.evict_responses(tables, limits, now), frees_space=True)

    # --- leases, eviction, quarantine ---

    def lease(self, ids: Iterable[str]) -> None:
        """Keep these files while a restore reads them; leases are counted: each needs its `release`."""
        with self._lock:
            self._leases.update(ids)

    def release(self, ids: Iterable[str]) -> None:
        with self._lock:
            self._leases.subtract(ids)
            self._leases = +self._leases

    def make_room(self, bytes_needed: int = 0, *, may_delete_first: bool = False) -> list[str]:
        """Evict (and delete) until the budget holds with that much more; returns the ids.  `begin_save` does so, too.

        Raises DiskBudgetError, except for 0 bytes: then all that may be evicted is.
        """
        leased, is_required = self._leased_ids(), bytes_needed > 0

        def change(tables: Tables) -> dict[str, int]:
            return self._make_room(tables, bytes_needed, leased, is_required)

        return self._evict("budget", change, may_delete_first)

    def free_bytes(self, bytes_wanted: int, why: str = "disk_full", *, may_delete_first: bool = False) -> list[str]:
        """Evict (and delete) though the budget holds; returns the ids.  `why`: for `on_evicted`."""
        leased = self._leased_ids()
        return self._evict(why, lambda tables: save.free_bytes(tables, bytes_wanted, leased), may_delete_first)

    def _make_room(self, tables: Tables, needed: int, leased: set[str], is_required: bool) -> dict[str, int]:
        return save.make_room(tables, self.budget_bytes, needed, self._environment.bytes_used(), leased, is_required)

    def _evict(self, why: str, change: Callable[[Tables], dict[str, int]], may_delete_first: bool) -> list[str]:
        evicted = self.transact(change, frees_space=True, may_delete_first=may_delete_first)
        self._finish_eviction(why, evicted)
        return list(evicted)

    def _finish_eviction(self, why: str, evicted: dict[str, int]) -> None:
        if evicted and self.on_evicted:
            self.on_evicted(why, len(evicted), sum(evicted.values()))
        self.sweep()

    def quarantine(self, file_id: str, reason: str) -> list[str]:
        """Take a damaged, foreign or suspect file out of the tree, a segment with all that builds on it; their ids.

        The files move to segments/quarantine/, count against the budget, and are evicted first.
        """
        ids = self._write(lambda tables: tree.quarantine_subtree(tables, file_id, reason, time.time()))
        try:
            files.move_to_quarantine(self.home, ids)
        except OSError as error:  # out of the tree, and the next start moves it
            log.error("%s is out of use, but could not be moved to quarantine: %s", file_id, error)
        self.update_quarantine_sizes()
        return ids

    def update_quarantine_sizes(self) -> None:
        """Count the present sizes of quarantined files, and remove the rows of files that are gone."""
        size_of = partial(files.read_quarantined_size, self.home)
        self._write(lambda tables: tree.update_quarantine_sizes(tables, size_of))

    def sweep(self) -> int:
        """Delete the files whose rows are gone, but for leased ones; how many.  Methods that remove rows call it.

        Files that the disk refuses to delete are left for the next sweep.
        """
        pending = self._read(Tables.pending_deletions).keys() - self._leased_ids()
        deleted = [file_id for file_id in pending if files.try_delete_file(self.home, file_id)]
        if deleted:
            self._write(lambda tables: tables.remove_pending_deletions(deleted))
        return len(deleted)

    # --- upkeep ---

    def transact(
        self, change: Callable[[Tables], T], *, frees_space: bool = False, may_delete_first: bool = False
    ) -> T:
        """Run a write transaction of `reconcile`, repair, purge or gc; `change` may run more than once.

        One that `frees_space` uses the reserve where the disk is full.  Where the reserve is used up, one that
        `may_delete_first` deletes its files before their rows; after a kill in between, the next start removes the
        rows.  For deletions that the owner asked for: a disk that stays full would cost others their files in vain.
        """
        if not frees_space:
            return self._write(change)
        try:
            return self._retry_with_reserve(lambda: self._write(change))
        except IndexStoreError as error:
            if not may_delete_first or error.code not in NO_SPACE_CODES or not self._delete_files_of(change):
                raise
        return self._write(change)

    def _delete_files_of(self, change: Callable[[Tables], object]) -> int:
        """Delete the files that a change would delete, but for leased ones, without making it; how many."""

        def preview(tables: Tables) -> None:
            change(tables)
            raise _RollbackError(set(tables.pending_deletions()))

        try:
            self._write(preview)
        except _RollbackError as rolled_back:
            file_ids = rolled_back.file_ids - self._leased_ids()
            return sum(files.try_delete_file(self.home, file_id) for file_id in file_ids)
        return 0

    def _retry_with_reserve(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except IndexStoreError as error:
            if error.code not in NO_SPACE_CODES or not reserve.release_reserve(self.home):
                raise
            self._is_reserve_used = True  # `renew_reserve` waits: the work needs the space first
        return work()

    def allocate_reserve(self) -> None:
        """Reserve space for deletions on a full disk, as far as the disk has any."""
        self._is_reserve_used = not reserve.allocate_reserve(self.home)

    def renew_reserve(self) -> None:
        """Allocate the reserve again where it was released."""
        if self._is_reserve_used:
            self.allocate_reserve()

    def compact(self) -> None:
        """Rewrite the index file without deleted rows.  Readers go on meanwhile."""
        self._retry_with_reserve(lambda: self._writer.submit(self._environment.compact).result())

    def erase_purged_data(self) -> bool:
        """Compact the index where an interrupted purge has not; True if it was needed."""
        if has_traces := self._read(Tables.has_purged_data):
            self.compact()
        return has_traces

    def has_purge_notice(self) -> bool:
        """True where a backend may hold purged KV in memory: the purging process ended before it notified it."""
        return self._read(Tables.has_purge_notice)

    def clear_purge_notice(self) -> None:
        """Note that no backend holds purged KV any more."""
        self._write(Tables.clear_purge_notice)

    def delete_superseded(self) -> list[Path]:
        """Delete old generations and drafts of the index; on the writer thread, so that no compaction is under way."""
        return self._writer.submit(self._environment.delete_superseded).result()

    def require_sound_pages(self) -> None:
        """Check all pages of the index's file; writes wait.  Raises IndexDamagedError where LMDB could not use it."""
        self._writer.submit(self._environment.require_sound_pages).result()

    def replace_with_empty(self, error: IndexDamagedError) -> None:
        """Replace an unreadable index with an empty one, which lacks stored data until it is repaired."""

        def replace() -> None:
            self._environment.replace_with_empty(error)
            self.change_count += 1

        self._retry_with_reserve(lambda: self._writer.submit(replace).result())

    def close(self) -> None:
        """Write the bookkeeping, and close."""
        self._writer.close()
        self._environment.close()

    def _leased_ids(self) -> set[str]:
        with self._lock:
            return set(self._leases)

    def _write(self, change: Callable[[Tables], T]) -> T:
        if self.read_only:
            raise IndexReadOnlyError(self.read_only, self.read_only_code)

        def write() -> T:
            result = self._environment.write(change)
            self.change_count += 1
            return result

        return self._writer.submit(write).result()

    def _tick(self) -> None:
        """Write the bookkeeping, every second and at the end, on the writer thread.  A failure is retried."""
        try:
            if self.read_only:
                self._write_behind.clear()
            elif self._write_behind.flush(self._environment.write):
                self.flush_count += 1
                self.on_flush(None)
            if time.monotonic() >= self._upkeep_due:
                self._upkeep_due = time.monotonic() + UPKEEP_INTERVAL_S
                self._environment.reader_check()
                self.renew_reserve()
                self._evict_old_responses()
        except IndexStoreError as error:
            self.on_flush(error)

    def _evict_old_responses(self) -> None:
        """Evict as `evict_responses` does, on the writer thread."""
        limits, now = self.response_limits, time.time()
        if not self.read_only and self._read(lambda tables: responses.has_excess(tables, limits, now)):
            self._environment.write(lambda tables: responses.evict_responses(tables, limits, now))


def _advance_session(tables: Tables, root: bytes, tokens: bytes, session: SessionUpdate) -> str:
    path = lookup.lookup_path(tables, root, tokens, len(tokens))
    return tree.advance_session(tables, path, root, tokens, session, time.time())


def _log_flush_error(error: IndexStoreError | None) -> None:
    if error is not None:
        log.warning("bookkeeping could not be written: %s", error)
