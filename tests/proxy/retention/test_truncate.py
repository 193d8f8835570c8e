"""Truncation: tails that only a purged conversation needs are removed; all else stays."""

import msgspec
import pytest

from support.index.archives import check_content, export_session, import_session, save
from support.index.truncation import (
    DEEP,
    LONG,
    SHORT,
    clear_tables,
    count_stored,
    find_files_containing,
    find_segment,
    purge_session,
)
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.repair import repair
from warmline_proxy.retention.gc import collect_garbage
from warmline_proxy.retention.pin import pin_session
from warmline_proxy.retention.purge import purge
from warmline_proxy.store.rows import GcRequest, PinRequest, PurgeRequest, Truncation


def test_purge_truncates_shared_segment_to_needed_rows(index: Index) -> None:
    session = save(index, LONG, [20, 100, 300])
    save(index, SHORT, [60])
    old, before = find_segment(index, LONG), index.totals().bytes_used
    reply = purge_session(index, session)
    new = find_segment(index, LONG)
    assert reply.cuts == [
        Truncation(segment=old.id, until=30, end=300, bytes_count=old.bytes_on_disk - new.bytes_on_disk, became=new.id)
    ]
    assert (new.start, new.end, new.session, len(reply.checkpoints)) == (0, 30, "", 2)
    assert find_files_containing(index.home, LONG[30:32]) == find_files_containing(index.home, LONG[-2:]) == []
    assert not index.home.segment_file(old.id).exists()
    assert count_stored(index, LONG) == 30
    check_content(index, SHORT, checkpoints=[20, 60])
    assert before - index.totals().bytes_used >= reply.bytes_freed > 0
    save(index, LONG, [300])
    check_content(index, LONG, checkpoints=[20, 300])
    check_content(index, SHORT, checkpoints=[20, 60])


def test_segment_is_cut_at_longest_need(index: Index) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    save(index, DEEP)
    shorter = save(index, [*LONG[:150]], [150])  # a stored prefix that ends within the segment
    assert [(cut.until, cut.end) for cut in purge_session(index, session).cuts] == [(150, 300)]
    assert [(cut.until, cut.end) for cut in purge_session(index, shorter).cuts] == [(130, 150)]
    assert (count_stored(index, LONG), count_stored(index, SHORT), count_stored(index, DEEP)) == (
        130,
        len(SHORT),
        len(DEEP),
    )


def test_every_segment_of_path_is_cut(index: Index) -> None:
    """The second segment branches off within the first; the session wrote both."""
    session = save(index, LONG)
    other = [*LONG[:200], *range(7000, 7200)]
    save(index, other)
    last = [*other[:250], *range(8000, 8010)]
    save(index, last)
    for row in index.segments():
        if row.end < len(last) or row.start == 200:
            index.transact(lambda tables, row=row: tables.update_segment(msgspec.structs.replace(row, session=session)))
    (gone_session,) = [row.id for row in index.sessions() if row.tokens == len(other)]
    index.transact(lambda tables: tables.remove_session(gone_session))
    reply = purge_session(index, session)
    assert sorted((cut.until, cut.end) for cut in reply.cuts) == [(200, 300), (250, 400)]
    assert find_files_containing(index.home, LONG[200:202]) == find_files_containing(index.home, other[250:252]) == []
    check_content(index, last)


def test_descendants_of_tail_are_removed(index: Index) -> None:
    """A branch of the purged session in which no session ends."""
    session = save(index, LONG)
    save(index, SHORT)
    branch = save(index, DEEP)
    index.transact(lambda tables: tables.remove_session(branch))
    reply = purge_session(index, session)
    assert len(reply.segments) == 1 and reply.cuts[0].until == 30
    assert count_stored(index, DEEP) == 30 and find_files_containing(index.home, DEEP[-2:]) == []


def test_abandoned_branch_of_stored_session_is_kept(index: Index) -> None:
    """Its client may come back, and no purged token is in it."""
    save(index, LONG, client="mine")
    save(index, [*LONG[:299], 1, 2, 3], client="mine")
    assert len(index.sessions()) == 1
    other = save(index, SHORT, client="theirs")
    assert purge_session(index, other).cuts == []
    assert count_stored(index, LONG) == 300
    assert collect_garbage(index, GcRequest(), is_saving=False).cuts == [] and count_stored(index, LONG) == 300


def test_purge_by_age_truncates_tails(index: Index) -> None:
    old = save(index, LONG)
    save(index, SHORT)
    (row,) = [row for row in index.sessions() if row.id == old]
    index.transact(lambda tables: tables.put_session(msgspec.structs.replace(row, last_used=1.0)))
    reply = purge(index, PurgeRequest(older_than_s=3600.0))
    assert (reply.sessions, [cut.until for cut in reply.cuts]) == ([old], [30])
    assert find_files_containing(index.home, LONG[30:32]) == []
    check_content(index, SHORT)


def test_copy_takes_over_pin_usage_and_cost(index: Index) -> None:
    session = save(index, LONG)
    other = save(index, SHORT)
    pin_session(index, PinRequest(session=session))
    pin_session(index, PinRequest(session=other))
    old = find_segment(index, LONG)
    index.record_use([old.id])
    purge_session(index, session)
    new = find_segment(index, SHORT)
    assert new.pinned and index.transact(lambda tables: [tables.usage(row.id).hits for row in (new, old)]) == [1, 0]
    assert new.prefill_s == pytest.approx(old.prefill_s / 10)
    pin_session(index, PinRequest(session=other, off=True))
    assert not any(row.pinned for row in index.segments())


def test_leased_segment_file_stays_until_release(index: Index) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    old = find_segment(index, LONG)
    index.lease([old.id])
    purge_session(index, session)
    assert index.home.segment_file(old.id).exists()
    index.release([old.id])
    index.sweep()
    assert not index.home.segment_file(old.id).exists()


# ---- children whose files name a replaced parent


@pytest.mark.parametrize("later", ["nothing", "save", "purge"])
def test_rebuild_finds_children_of_truncated_segment(index: Index, later: str) -> None:
    session = save(index, LONG, [20])
    save(index, SHORT, [60])
    purge_session(index, session)
    if later == "save":
        save(index, LONG, [300])
    if later == "purge":  # cut once more
        save(index, LONG[:20], [10])
        purge_session(index, next(row.id for row in index.sessions() if row.tokens == len(SHORT)))
    rows_before = {row.id: (row.parent, row.start, row.end) for row in index.segments()}
    index.transact(clear_tables)
    assert repair(index, deep=True, is_saving=False).did
    assert {row.id: (row.parent, row.start, row.end) for row in index.segments()} == rows_before
    if later != "purge":
        check_content(index, SHORT, checkpoints=[20, 60])


def test_damaged_copy_is_quarantined_with_descendants(index: Index) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    purge_session(index, session)
    path = index.home.segment_file(find_segment(index, SHORT).id)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    repair(index, deep=True, is_saving=False)
    reasons = sorted(row.reason.partition(" ")[0] for row in index.quarantined())
    assert reasons == ["builds", "checksum"] and index.segments() == []


def test_truncated_conversation_can_be_exported(index: Index, other: Index) -> None:
    session = save(index, LONG, [20])
    other_session = save(index, SHORT, [60])
    purge_session(index, session)
    import_session(other, export_session(index, other_session))
    check_content(other, SHORT, checkpoints=[20, 60])
