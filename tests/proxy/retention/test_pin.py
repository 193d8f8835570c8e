"""Pinned conversations outlive eviction, within their share of the budget."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.index.indexes import make_home, matched, save
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.retention.gc import collect_garbage
from warmline_proxy.retention.pin import PinLimitError, UnknownSessionError, count_bytes, pin_limit_bytes, pin_session
from warmline_proxy.retention.purge import purge
from warmline_proxy.store.rows import GcRequest, PinRequest, PurgeRequest

A = list(range(1000, 4000))
BUDGET = 4_000_000


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """A stem of 1,500 tokens; "first" and "second" branch off it, "other" stands alone."""
    with Index(make_home(tmp_path / "home"), BUDGET) as index:
        save(index, [*A[:1500], 1, 1], checkpoints=[1000], turn_end=1501, client="first")
        save(index, [*A[:1500], 2, 2], turn_end=1501, client="second")
        save(index, [3] * 2000, client="other")
        yield index


def called(index: Index, client: str) -> str:
    (found,) = [row.id for row in index.sessions() if row.client == client]
    return found


def pinned(index: Index) -> set[tuple[int, int]]:
    return {(row.start, row.end) for row in index.segments() if row.pinned}


def test_what_is_pinned_is_not_evicted(index: Index) -> None:
    reply = pin_session(index, PinRequest(session=called(index, "second")))
    assert (reply.pinned, len(reply.segments), pinned(index)) == (True, 2, {(0, 1502), (1500, 1502)})
    snapshot = index.snapshot()
    assert reply.bytes_pinned == count_bytes(snapshot, set(reply.segments)) > 0
    assert reply.bytes_pinned_max == pin_limit_bytes(BUDGET)
    index.free_bytes(BUDGET)
    assert matched(index, [*A[:1500], 2, 2]) == 1502 and matched(index, [3] * 9) == 0
    assert len(index.checkpoints()) == 1, "nor is a state on it"
    assert verify_index(index) == []


def test_a_segment_stays_pinned_while_any_pinned_conversation_had_it(index: Index) -> None:
    for name in ("first", "second"):
        pin_session(index, PinRequest(session=called(index, name)))
    off = pin_session(index, PinRequest(session=called(index, "second"), off=True))
    assert len(off.segments) == 1 and pinned(index) == {(0, 1502)}
    off = pin_session(index, PinRequest(session=called(index, "first"), off=True))
    assert len(off.segments) == 1 and off.bytes_pinned == 0 and pinned(index) == set()
    again = pin_session(index, PinRequest(session=called(index, "first"), off=True))
    assert again.segments == []


def test_what_it_gains_is_pinned_when_it_is_pinned_again(index: Index) -> None:
    other = called(index, "other")
    pin_session(index, PinRequest(session=other))
    save(index, [3] * 2100, turn_end=2000, client="other")
    assert called(index, "other") == other and pinned(index) == {(0, 2000)}
    assert pin_session(index, PinRequest(session=other)).segments != [] and pinned(index) == {(0, 2000), (2000, 2100)}
    assert {row.client for row in index.sessions() if row.pinned} == {"other"}


def test_no_more_is_pinned_than_the_budget_has_room_for(index: Index) -> None:
    index.budget_bytes = 60_000
    pin_session(index, PinRequest(session=called(index, "first")))
    with pytest.raises(PinLimitError, match=r"would be pinned \(now [\d,]+\), and no more than 48,000 may be"):
        pin_session(index, PinRequest(session=called(index, "other")))
    assert pinned(index) == {(0, 1502)}
    with pytest.raises(UnknownSessionError, match="feedfeed"):
        pin_session(index, PinRequest(session="feedfeed"))


def test_what_a_purged_conversation_had_pinned_may_be_evicted_again(index: Index) -> None:
    """The stem, which another one stands on, would stay for good: nobody is left to unpin it."""
    pin_session(index, PinRequest(session=called(index, "first")))
    purge(index, PurgeRequest(session=called(index, "first")))
    assert pinned(index) == set() and matched(index, [*A[:1500], 2, 2]) == 1502


def test_what_a_conversation_had_pinned_that_was_lost_is_let_go_of_by_gc(index: Index) -> None:
    second = called(index, "second")
    pin_session(index, PinRequest(session=second))
    index.quarantine(index.segment_path(index.snapshot().sessions[second].leaf)[-1].id, "checksum")
    assert second not in index.snapshot().sessions and pinned(index) == {(0, 1502)}
    collect_garbage(index, GcRequest(), is_saving=True)
    assert pinned(index) == set()
