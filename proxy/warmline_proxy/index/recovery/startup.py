"""Start-up: makes index and files agree again after any kill.  Needs `home.lock`, no save running."""

import logging
import time
from contextlib import suppress

import msgspec

from warmline_common.settings.hints import format_command
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.index.recovery.orphans import delete_orphans
from warmline_proxy.index.recovery.repair import repair
from warmline_proxy.index.recovery.verify import find_table_damage
from warmline_proxy.index.save import abort_save
from warmline_proxy.index.texts import remove_texts
from warmline_proxy.index.tree import delete_subtree, quarantine_subtree
from warmline_proxy.store import files as stored_files
from warmline_proxy.store.errors import IndexDamagedError
from warmline_proxy.store.rows import IndexFinding
from warmline_proxy.store.tables import Tables

log = logging.getLogger(__name__)


class ReconcileReport(msgspec.Struct, kw_only=True):
    """Counts of repaired entries and deleted files; all 0 after a clean end."""

    mended: int = 0  # findings of a repair, where the index was damaged
    saves_rolled_back: int = 0
    rows_without_file: int = 0  # dropped, segments and checkpoints, with what built on them
    rows_of_other_size: int = 0  # quarantined, with what built on them
    files_without_row: int = 0
    files_temporary: int = 0
    files_doomed: int = 0  # rows were gone already
    modes_set: int = 0  # of files and folders that others than their owner could use
    evicted: int = 0  # the budget became smaller meanwhile
    responses_evicted: int = 0  # too old, or the limits became smaller
    texts_removed: int = 0  # titles and texts of divergences, which are no longer kept
    purges_ended: int = 0  # 1 where the index still had traces of purged data

    def __str__(self) -> str:
        done = [f"{name} {count}" for name, count in msgspec.structs.asdict(self).items() if count]
        return ", ".join(done).replace("_", " ") or "ok"


def reconcile(index: Index) -> ReconcileReport:
    home, counts = index.home, ReconcileReport()
    counts.mended = len(repair_damage(index))
    saves = index.transact(lambda tables: [abort_save(tables, plan) for plan in tables.save_plans()], frees_space=True)
    counts.saves_rolled_back = len(saves)
    sizes = {file_id: path.stat().st_size for file_id, path in stored_files.list_stored(home) if file_id}
    index.transact(lambda tables: _delete_stale_rows(tables, sizes, counts), frees_space=True)
    stored_files.move_to_quarantine(home, [row.id for row in index.quarantined()])
    index.update_quarantine_sizes()
    counts.files_doomed = index.sweep()
    orphans = delete_orphans(index)
    counts.files_temporary = sum(not file_id for file_id, _ in orphans)
    counts.files_without_row = len(orphans) - counts.files_temporary
    counts.modes_set = len(stored_files.make_private(home))
    counts.evicted = len(index.make_room())
    counts.responses_evicted = index.evict_responses()
    if not index.keeps_texts:
        counts.texts_removed = index.transact(remove_texts, frees_space=True)
    counts.purges_ended = _finish_purge(index)
    return counts


def repair_damage(index: Index) -> list[IndexFinding]:
    """Repair the index where it is damaged, or lacks stored data; what was repaired.

    For every process that takes over a home.  Blocks; raises IndexStoreError, OSError.
    """
    if is_sound(index):
        return []
    if did := repair(index, deep=False, is_saving=False).did:
        stored = index.totals()
        log.warning("the index was mended: it has %d segments now, %d tokens", stored.segments, stored.tokens)
    return did


def is_sound(index: Index) -> bool:
    """True where the index has all stored data, and each entry is the one that was written."""
    try:
        with index.read_transaction() as tables:
            if tables.is_incomplete():
                return False
            if (is_true := tables.has_true_digest()) is not None:
                return is_true
            damage = find_table_damage(tables)
    except IndexDamagedError:
        return False
    if not damage:
        with suppress(IndexStoreError):  # a full disk is no reason not to start
            index.transact(Tables.reset_digest)
    return not damage


def _finish_purge(index: Index) -> int:
    """Finish an interrupted purge; where the disk has no room, the next start, purge or gc does."""
    try:
        return int(index.erase_purged_data())
    except IndexStoreError as error:
        command = format_command("cachectl gc", index.home.root)
        log.warning("the index still has traces of what was purged: %s; free space, then run %s", error, command)
        return 0


def _delete_stale_rows(tables: Tables, sizes: dict[str, int], counts: ReconcileReport) -> None:
    for row in tables.files():
        if not tables.has_file(row.id):
            continue  # removed with a segment that it built on
        size = sizes.get(row.id)
        if size is None:
            counts.rows_without_file += len(delete_subtree(tables, row.id, "missing"))
        elif size != row.bytes_on_disk:
            reason = "truncated" if size < row.bytes_on_disk else "foreign"
            counts.rows_of_other_size += len(quarantine_subtree(tables, row.id, reason, time.time()))
