"""Pinning: what eviction leaves alone.  What is pinned is a conversation, as far as it is stored at that moment.

What it gains later is pinned when it is pinned again.  A segment stays pinned while any pinned conversation had it.
"""

from collections.abc import Set

import msgspec

from warmline_common.process.redaction import quoted
from warmline_proxy.index.index import Index
from warmline_proxy.store.rows import PinReply, PinRequest, Snapshot
from warmline_proxy.store.tables import Tables

PINNED_SHARE_MAX = 0.8  # of the budget: the rest is what other conversations live on


class NotStored(LookupError):
    """No such conversation."""


class TooMuchPinned(ValueError):
    """The budget has no room for it."""


def bytes_pinned_max(budget_bytes: int) -> int:
    return int(budget_bytes * PINNED_SHARE_MAX)


def pinned_after(snapshot: Snapshot, session_id: str, off: bool) -> set[str]:
    """The segments that are to be pinned once this conversation is, or with `off` no longer is."""
    wanted: set[str] = set()
    for row in snapshot.sessions.values():
        if row.id == session_id:
            wanted |= set() if off else {link.id for link in snapshot.path(row.leaf)}
        elif row.pinned:
            wanted |= {link.id for link in snapshot.path(row.leaf) if link.pinned}
    return wanted


def let_go_of_unclaimed(tables: Tables) -> None:
    """What is pinned for conversations alone that are gone may be evicted again."""
    snapshot = tables.snapshot()
    _set_pinned(tables, snapshot, pinned_after(snapshot, "", off=True))


def weigh(snapshot: Snapshot, segments: Set[str]) -> int:
    """Bytes on disk, with their checkpoints."""
    states = (row.bytes_on_disk for row in snapshot.checkpoints.values() if row.segment in segments)
    return sum(snapshot.segments[segment].bytes_on_disk for segment in segments) + sum(states)


def pin(index: Index, request: PinRequest) -> PinReply:
    """In one transaction; blocks.  Raises NotStored, TooMuchPinned (nothing is changed then), IndexFailure."""
    return index.change(lambda tables: _pin(tables, request, bytes_pinned_max(index.budget_bytes)))


def _pin(tables: Tables, request: PinRequest, most: int) -> PinReply:
    snapshot = tables.snapshot()
    if (row := snapshot.sessions.get(request.session)) is None:
        raise NotStored(f"no conversation is called {quoted(request.session)}")
    wanted = pinned_after(snapshot, row.id, request.off)
    weight = weigh(snapshot, wanted)
    if not request.off and weight > most:
        now = weigh(snapshot, {segment.id for segment in snapshot.segments.values() if segment.pinned})
        raise TooMuchPinned(
            f"with it {weight:,} bytes would be pinned (now {now:,}), and no more than {most:,} may be, "
            f"{PINNED_SHARE_MAX:.0%} of the disk budget: unpin another one, or raise disk_budget_gb"
        )
    changed = _set_pinned(tables, snapshot, wanted)
    tables.put_session(msgspec.structs.replace(row, pinned=not request.off))
    return PinReply(
        session=row.id,
        pinned=not request.off,
        segments=sorted(changed),
        bytes_pinned=weight,
        bytes_pinned_max=most,
    )


def _set_pinned(tables: Tables, snapshot: Snapshot, wanted: Set[str]) -> list[str]:
    """Have these pinned and no others; those that were not so."""
    changed = [row for row in snapshot.segments.values() if row.pinned != (row.id in wanted)]
    for row in changed:
        tables.update_segment(msgspec.structs.replace(row, pinned=row.id in wanted))
    return [row.id for row in changed]
