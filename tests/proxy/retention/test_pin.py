"""Pins: conversations exempt from eviction, within their share of the budget."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.index.indexes import count_matched, make_home, save
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
    """Index with a prefix of 1,500 tokens, its branches "first" and "second", and "other"."""
    with Index(make_home(tmp_path / "home"), BUDGET) as index:
        save(index, [*A[:1500], 1, 1], checkpoints=[1000], turn_end=1501, client="first")
        save(index, [*A[:1500], 2, 2], turn_end=1501, client="second")
        save(index, [3] * 2000, client="other")
        yield index


def find_session(index: Index, client: str) -> str:
    (found,) = [row.id for row in index.sessions() if row.client == client]
    return found


def list_pinned_spans(index: Index) -> set[tuple[int, int]]:
    return {(row.start, row.end) for row in index.segments() if row.pinned}


def test_pinned_segments_are_not_evicted(index: Index) -> None:
    reply = pin_session(index, PinRequest(session=find_session(index, "second")))
    assert (reply.pinned, len(reply.segments), list_pinned_spans(index)) == (True, 2, {(0, 1502), (1500, 1502)})
    snapshot = index.snapshot()
    assert reply.bytes_pinned == count_bytes(snapshot, set(reply.segments)) > 0
    assert reply.bytes_pinned_max == pin_limit_bytes(BUDGET)
    index.free_bytes(BUDGET)
    assert count_matched(index, [*A[:1500], 2, 2]) == 1502 and count_matched(index, [3] * 9) == 0
    assert len(index.snapshot().checkpoints) == 1, "nor is its checkpoint"
    assert verify_index(index) == []


def test_shared_segment_stays_pinned_until_last_unpin(index: Index) -> None:
    for name in ("first", "second"):
        pin_session(index, PinRequest(session=find_session(index, name)))
    off = pin_session(index, PinRequest(session=find_session(index, "second"), off=True))
    assert len(off.segments) == 1 and list_pinned_spans(index) == {(0, 1502)}
    off = pin_session(index, PinRequest(session=find_session(index, "first"), off=True))
    assert len(off.segments) == 1 and off.bytes_pinned == 0 and list_pinned_spans(index) == set()
    again = pin_session(index, PinRequest(session=find_session(index, "first"), off=True))
    assert again.segments == []


def test_new_segments_are_pinned_by_pinning_again(index: Index) -> None:
    other = find_session(index, "other")
    pin_session(index, PinRequest(session=other))
    save(index, [3] * 2100, turn_end=2000, client="other")
    assert find_session(index, "other") == other and list_pinned_spans(index) == {(0, 2000)}
    assert pin_session(index, PinRequest(session=other)).segments != [] and list_pinned_spans(index) == {
        (0, 2000),
        (2000, 2100),
    }
    assert {row.client for row in index.sessions() if row.pinned} == {"other"}


def test_pin_beyond_share_of_budget_is_refused(index: Index) -> None:
    index.budget_bytes = 60_000
    pin_session(index, PinRequest(session=find_session(index, "first")))
    with pytest.raises(PinLimitError, match=r"would be pinned \(now [\d,]+\), and no more than 48,000 may be"):
        pin_session(index, PinRequest(session=find_session(index, "other")))
    assert list_pinned_spans(index) == {(0, 1502)}
    with pytest.raises(UnknownSessionError, match="feedfeed"):
        pin_session(index, PinRequest(session="feedfeed"))


def test_purge_unpins_segments_that_others_need(index: Index) -> None:
    """The shared segment would stay pinned for good, without a session to unpin."""
    pin_session(index, PinRequest(session=find_session(index, "first")))
    purge(index, PurgeRequest(session=find_session(index, "first")))
    assert list_pinned_spans(index) == set() and count_matched(index, [*A[:1500], 2, 2]) == 1502


def test_gc_unpins_segments_of_lost_session(index: Index) -> None:
    second = find_session(index, "second")
    pin_session(index, PinRequest(session=second))
    index.quarantine(index.snapshot().sessions[second].leaf, "checksum")
    assert second not in index.snapshot().sessions and list_pinned_spans(index) == {(0, 1502)}
    collect_garbage(index, GcRequest(), is_saving=True)
    assert list_pinned_spans(index) == set()
