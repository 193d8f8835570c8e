"""Garbage collection: unclaimed files, expired records and turns, orphaned tails, then eviction to the budget."""

import time
from collections.abc import Callable

from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.index.recovery import orphans
from warmline_proxy.index.turns import list_turns, remove_turns
from warmline_proxy.retention.pin import unpin_orphaned_segments
from warmline_proxy.retention.truncate import truncate_orphaned_tails
from warmline_proxy.store.errors import NO_SPACE_CODES
from warmline_proxy.store.rows import GcReply, GcRequest
from warmline_proxy.store.tables import REMOVAL_REASONS_MAX, Tables

RECORD_AGE_MAX_S = 30 * 86400.0
ORPHAN_AGE_MIN_S = 600.0  # a younger unclaimed file may be one that a backend is writing


def collect_garbage(index: Index, request: GcRequest, *, is_saving: bool) -> GcReply:
    """Collect garbage; blocks.  Raises ValueError, IndexStoreError, OSError.

    `is_saving`: a proxy runs, and may be writing files for saves, which are left alone.
    """
    if request.to_bytes is not None and request.to_bytes < 0:
        raise ValueError(f"to_bytes must be 0 or more, not {request.to_bytes}")
    index.flush()
    before, now = index.totals(), time.time()
    reply = GcReply(bytes_before=before.bytes_used, bytes_index_before=before.bytes_index)
    reply.doomed = index.sweep()
    for file_id, size in orphans.delete_orphans(index, now - ORPHAN_AGE_MIN_S if is_saving else now):
        reply.bytes_strays += size
        reply.orphans += bool(file_id)
        reply.drafts += not file_id
    reply.drafts += len(index.delete_superseded())
    is_expired_deleted = _try_on_full_disk(lambda: _delete_expired(index, now, reply))
    is_compact = _try_on_full_disk(index.compact)
    reply.evicted = _evict(index, request)
    if not is_expired_deleted:
        _delete_expired(index, now, reply)
    if (reply.evicted or not is_compact) and not _try_on_full_disk(index.compact):
        index.erase_purged_data()  # which must not be left
    index.renew_reserve()
    after = index.totals()
    reply.bytes_after, reply.bytes_index_after = after.bytes_used, after.bytes_index
    reply.bytes_wanted = index.budget_bytes if request.to_bytes is None else request.to_bytes
    return reply


def _try_on_full_disk(work: Callable[[], object]) -> bool:
    """Do this; False where the disk is full, which an eviction may change."""
    try:
        work()
    except IndexStoreError as error:
        if error.code not in NO_SPACE_CODES:
            raise
        return False
    return True


def _evict(index: Index, request: GcRequest) -> list[str]:
    if request.to_bytes is None:
        return index.make_room(may_delete_first=True)
    used = index.totals().bytes_used
    if used <= request.to_bytes:
        return []
    return index.free_bytes(used - request.to_bytes, why="budget", may_delete_first=True)


def _delete_expired(index: Index, now: float, reply: GcReply) -> None:
    """Delete what is too old, then the tails of deleted sessions."""
    index.transact(lambda tables: _delete_expired_rows(tables, now, reply), frees_space=True)
    reply.responses = index.evict_responses()
    reply.cuts = truncate_orphaned_tails(index)
    index.sweep()


def _delete_expired_rows(tables: Tables, now: float, reply: GcReply) -> None:
    """Delete old records, old turns and pins of deleted sessions, and removal reasons when full."""
    unpin_orphaned_segments(tables)
    old_records = [key for key, record in tables.requests() if record.at < now - RECORD_AGE_MAX_S]
    for key in old_records:
        tables.delete("requests", key)
    stored = {row.id for row in tables.sessions()}
    turns = list_turns(tables)
    old = [(key, row) for key, row in turns if row.at < now - RECORD_AGE_MAX_S and row.session not in stored]
    remove_turns(tables, old)
    reply.records, reply.turns = len(old_records), len(old)
    if (notes := tables.count("gone")) >= REMOVAL_REASONS_MAX:
        for key, _ in list(tables.items("gone")):
            tables.delete("gone", key)
        reply.notes = notes
