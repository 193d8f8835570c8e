"""Pins, which exempt a conversation's segments, as stored at that moment, from eviction.

Later segments are pinned by pinning again.  A segment stays pinned while any pinned conversation had it.
"""

from collections.abc import Set

import msgspec

from warmline_common.process.redaction import quote_text
from warmline_proxy.index.index import Index
from warmline_proxy.store.rows import IndexSnapshot, PinReply, PinRequest
from warmline_proxy.store.tables import Tables

PINNED_SHARE_MAX = 0.8  # of the budget; the rest is for other conversations


class UnknownSessionError(LookupError):
    """Session id that is not stored."""


class PinLimitError(ValueError):
    """Pin that exceeds the share of the budget."""


def pin_limit_bytes(budget_bytes: int) -> int:
    return int(budget_bytes * PINNED_SHARE_MAX)


def find_pinned_segments(snapshot: IndexSnapshot, session_id: str, unpin: bool) -> set[str]:
    """Find the segments to be pinned once this session is pinned, or with `unpin` no longer is."""
    pinned: set[str] = set()
    for row in snapshot.sessions.values():
        if row.id == session_id:
            pinned |= set() if unpin else {link.id for link in snapshot.segment_path(row.leaf)}
        elif row.pinned:
            pinned |= {link.id for link in snapshot.segment_path(row.leaf) if link.pinned}
    return pinned


def unpin_orphaned_segments(tables: Tables) -> None:
    """Unpin segments whose pinned sessions are all deleted."""
    snapshot = tables.snapshot()
    _set_pinned(tables, snapshot, find_pinned_segments(snapshot, "", unpin=True))


def count_bytes(snapshot: IndexSnapshot, segments: Set[str]) -> int:
    """Sum the bytes on disk of segments and their checkpoints."""
    states = (row.bytes_on_disk for row in snapshot.checkpoints.values() if row.segment in segments)
    return sum(snapshot.segments[segment].bytes_on_disk for segment in segments) + sum(states)


def pin_session(index: Index, request: PinRequest) -> PinReply:
    """Pin or unpin in one transaction; blocks.  Raises UnknownSessionError, PinLimitError, IndexStoreError."""
    return index.transact(lambda tables: _pin_session(tables, request, pin_limit_bytes(index.budget_bytes)))


def _pin_session(tables: Tables, request: PinRequest, bytes_max: int) -> PinReply:
    snapshot = tables.snapshot()
    if (row := snapshot.sessions.get(request.session)) is None:
        raise UnknownSessionError(f"no conversation is called {quote_text(request.session)}")
    segments = find_pinned_segments(snapshot, row.id, request.off)
    size = count_bytes(snapshot, segments)
    if not request.off and size > bytes_max:
        pinned = count_bytes(snapshot, {segment.id for segment in snapshot.segments.values() if segment.pinned})
        raise PinLimitError(
            f"with it {size:,} bytes would be pinned (now {pinned:,}), and no more than {bytes_max:,} may be, "
            f"{PINNED_SHARE_MAX:.0%} of the disk budget: unpin another one, or raise disk_budget_gb"
        )
    changed = _set_pinned(tables, snapshot, segments)
    tables.put_session(msgspec.structs.replace(row, pinned=not request.off))
    return PinReply(
        session=row.id, pinned=not request.off, segments=sorted(changed), bytes_pinned=size, bytes_pinned_max=bytes_max
    )


def _set_pinned(tables: Tables, snapshot: IndexSnapshot, segments: Set[str]) -> list[str]:
    """Pin these segments and unpin all others; ids of the changed ones."""
    changed = [row for row in snapshot.segments.values() if row.pinned != (row.id in segments)]
    for row in changed:
        tables.update_segment(msgspec.structs.replace(row, pinned=row.id in segments))
    return [row.id for row in changed]
