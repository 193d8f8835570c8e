"""Garbage collection: unclaimed files, expired records and turns, orphaned tails, then eviction to the budget."""

import time

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
    index.transact(lambda tables: _delete_expired(tables, now, reply), frees_space=True)
    reply.responses = index.evict_responses()
    reply.cuts = truncate_orphaned_tails(index)
    index.sweep()
    is_compact = _try_compact(index)
    reply.evicted = _evict(index, request)
    if reply.evicted or not is_compact:
        index.compact()
    index.renew_reserve()
    after = index.totals()
    reply.bytes_after, reply.bytes_index_after = after.bytes_used, after.bytes_index
    reply.bytes_wanted = index.budget_bytes if request.to_bytes is None else request.to_bytes
    return reply


def _try_compact(index: Index) -> bool:
    """Compact the index; False where the disk is full, which eviction may change."""
    try:
        index.compact()
    except IndexStoreError as error:
        if error.code not in NO_SPACE_CODES:
            raise
        return False
    return True


def _evict(index: Index, request: GcRequest) -> list[str]:
    if request.to_bytes is None:
        return index.make_room()
    used = index.totals().bytes_used
    return index.free_bytes(used - request.to_bytes, why="budget") if used > request.to_bytes else []


def _delete_expired(tables: Tables, now: float, reply: GcReply) -> None:
    """Delete old records, old turns and pins of deleted sessions, and removal reasons when full."""
    unpin_orphaned_segments(tables)
    for key, record in tables.requests():
        if record.at < now - RECORD_AGE_MAX_S:
            tables.delete("requests", key)
            reply.records += 1
    stored = {row.id for row in tables.sessions()}
    turns = list_turns(tables)
    old = [(key, row) for key, row in turns if row.at < now - RECORD_AGE_MAX_S and row.session not in stored]
    remove_turns(tables, old)
    reply.turns = len(old)
    if (notes := tables.count("gone")) >= REMOVAL_REASONS_MAX:
        for key, _ in list(tables.items("gone")):
            tables.delete("gone", key)
        reply.notes = notes
