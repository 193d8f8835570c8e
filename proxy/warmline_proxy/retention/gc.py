"""Collecting garbage: what nobody needs goes, and the budget is brought down to where it is wanted."""

import time

from warmline_proxy.index.index import Index, IndexFailure
from warmline_proxy.index.recovery import orphans as strays
from warmline_proxy.index.turns import remove_turns, turns
from warmline_proxy.retention.pin import let_go_of_unclaimed
from warmline_proxy.retention.truncate import trim
from warmline_proxy.store.errors import NO_SPACE
from warmline_proxy.store.rows import GcReply, GcRequest
from warmline_proxy.store.tables import GONE_MAX, Tables

RECORD_AGE_MAX_S = 30 * 86400.0
STRAY_AGE_MIN_S = 600.0  # of a file that nobody claims, while a backend may be writing it


def collect(index: Index, request: GcRequest, *, saving: bool) -> GcReply:
    """Blocks.  Raises ValueError, IndexFailure, OSError.

    `saving`: a proxy runs, so that what its saves are writing must be left alone.
    """
    if request.to_bytes is not None and request.to_bytes < 0:
        raise ValueError(f"to_bytes must be 0 or more, not {request.to_bytes}")
    index.flush()
    before, now = index.totals(), time.time()
    reply = GcReply(bytes_before=before.bytes_used, bytes_index_before=before.bytes_index)
    reply.doomed = index.sweep()
    for file_id, size in strays.delete(index, now - STRAY_AGE_MIN_S if saving else now):
        reply.bytes_strays += size
        reply.orphans += bool(file_id)
        reply.drafts += not file_id
    reply.drafts += len(index.tidy())
    index.change(lambda tables: _expire(tables, now, reply), frees=True)
    reply.cuts = trim(index)
    index.sweep()
    is_compact = _compacted(index)
    reply.evicted = _evict(index, request)
    if reply.evicted or not is_compact:
        index.compact()
    index.renew_spare()
    after = index.totals()
    reply.bytes_after, reply.bytes_index_after = after.bytes_used, after.bytes_index
    reply.bytes_wanted = index.budget_bytes if request.to_bytes is None else request.to_bytes
    return reply


def _compacted(index: Index) -> bool:
    """Not where the disk is full: evicting makes room for it."""
    try:
        index.compact()
    except IndexFailure as error:
        if error.code not in NO_SPACE:
            raise
        return False
    return True


def _evict(index: Index, request: GcRequest) -> list[str]:
    if request.to_bytes is None:
        return index.make_room()
    used = index.totals().bytes_used
    return index.free(used - request.to_bytes, why="budget") if used > request.to_bytes else []


def _expire(tables: Tables, now: float, reply: GcReply) -> None:
    """Old records, old sampled turns of what is not stored, notes on what went where no more fit, pins of nobody."""
    let_go_of_unclaimed(tables)
    for key, record in tables.requests():
        if record.at < now - RECORD_AGE_MAX_S:
            tables.delete("requests", key)
            reply.records += 1
    stored = {row.id for row in tables.sessions()}
    old = [pair for pair in turns(tables) if pair[1].at < now - RECORD_AGE_MAX_S and pair[1].session not in stored]
    remove_turns(tables, old)
    reply.turns = len(old)
    if (notes := tables.count("gone")) >= GONE_MAX:
        for key, _ in list(tables.items("gone")):
            tables.delete("gone", key)
        reply.notes = notes
