"""What only a purged conversation needs of a segment that others stand on is cut away; all others stay as they are."""

import msgspec
import pytest

from support.index.archives import archived, check_content, imported, save
from support.index.truncation import DEEP, LONG, SHORT, forget_all, holding, purged, segment, stored
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.repair import repair
from warmline_proxy.retention.gc import collect_garbage
from warmline_proxy.retention.pin import pin_session
from warmline_proxy.retention.purge import purge
from warmline_proxy.store.rows import GcRequest, PinRequest, PurgeRequest, Truncation


def test_the_tail_is_gone_from_every_file_and_the_other_one_goes_on(index: Index) -> None:
    session = save(index, LONG, [20, 100, 300])
    save(index, SHORT, [60])
    old, before = segment(index, LONG), index.totals().bytes_used
    reply = purged(index, session)
    new = segment(index, LONG)
    assert reply.cuts == [
        Truncation(segment=old.id, until=30, end=300, bytes_count=old.bytes_on_disk - new.bytes_on_disk, became=new.id)
    ]
    assert (new.start, new.end, new.session, len(reply.checkpoints)) == (0, 30, "", 2)
    assert holding(index.home, LONG[30:32]) == holding(index.home, LONG[-2:]) == []
    assert not index.home.segment_file(old.id).exists()
    assert stored(index, LONG) == 30
    check_content(index, SHORT, checkpoints=[20, 60])
    assert before - index.totals().bytes_used >= reply.bytes_freed > 0
    save(index, LONG, [300])
    check_content(index, LONG, checkpoints=[20, 300])
    check_content(index, SHORT, checkpoints=[20, 60])


def test_the_longest_need_counts(index: Index) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    save(index, DEEP)
    ends_within = save(index, [*LONG[:150]], [150])  # all of it was there; it ends in the midst
    assert [(cut.until, cut.end) for cut in purged(index, session).cuts] == [(150, 300)]
    assert [(cut.until, cut.end) for cut in purged(index, ends_within).cuts] == [(130, 150)]
    assert (stored(index, LONG), stored(index, SHORT), stored(index, DEEP)) == (130, len(SHORT), len(DEEP))


def test_of_a_path_every_segment_is_cut_where_it_has_a_tail(index: Index) -> None:
    """The second one hangs within the first; the conversation wrote both, and has left them."""
    session = save(index, LONG)
    other = [*LONG[:200], *range(7000, 7200)]
    save(index, other)
    last = [*other[:250], *range(8000, 8010)]
    save(index, last)
    for row in index.segments():
        if row.end < len(last) or row.start == 200:
            index.transact(lambda tables, row=row: tables.update_segment(msgspec.structs.replace(row, session=session)))
    (gone,) = [row.id for row in index.sessions() if row.tokens == len(other)]
    index.transact(lambda tables: tables.remove_session(gone))
    reply = purged(index, session)
    assert sorted((cut.until, cut.end) for cut in reply.cuts) == [(200, 300), (250, 400)]
    assert holding(index.home, LONG[200:202]) == holding(index.home, other[250:252]) == []
    check_content(index, last)


def test_what_builds_on_the_tail_goes_with_it(index: Index) -> None:
    """A branch that nobody ends in, of what is purged."""
    session = save(index, LONG)
    save(index, SHORT)
    branch = save(index, DEEP)
    index.transact(lambda tables: tables.remove_session(branch))
    reply = purged(index, session)
    assert len(reply.segments) == 1 and reply.cuts[0].until == 30
    assert stored(index, DEEP) == 30 and holding(index.home, DEEP[-2:]) == []


def test_a_branch_that_another_conversation_has_left_stays_its_own(index: Index) -> None:
    """It may come back there, and nothing of it was said in the one that is purged."""
    save(index, LONG, client="mine")
    save(index, [*LONG[:299], 1, 2, 3], client="mine")
    assert len(index.sessions()) == 1
    other = save(index, SHORT, client="theirs")
    assert purged(index, other).cuts == []
    assert stored(index, LONG) == 300
    assert collect_garbage(index, GcRequest(), is_saving=False).cuts == [] and stored(index, LONG) == 300


def test_old_conversations_leave_no_tails_either(index: Index) -> None:
    old = save(index, LONG)
    save(index, SHORT)
    (row,) = [row for row in index.sessions() if row.id == old]
    index.transact(lambda tables: tables.put_session(msgspec.structs.replace(row, last_used=1.0)))
    reply = purge(index, PurgeRequest(older_than_s=3600.0))
    assert (reply.sessions, [cut.until for cut in reply.cuts]) == ([old], [30])
    assert holding(index.home, LONG[30:32]) == []
    check_content(index, SHORT)


def test_pins_and_use_are_the_shorter_ones(index: Index) -> None:
    session = save(index, LONG)
    other = save(index, SHORT)
    pin_session(index, PinRequest(session=session))
    pin_session(index, PinRequest(session=other))
    old = segment(index, LONG)
    index.record_use([old.id])
    purged(index, session)
    new = segment(index, SHORT)
    assert (new.pinned, index.usage(new.id).hits, index.usage(old.id).hits) == (True, 1, 0)
    assert new.prefill_s == pytest.approx(old.prefill_s / 10)
    pin_session(index, PinRequest(session=other, off=True))
    assert not any(row.pinned for row in index.segments())


def test_a_restore_that_reads_it_goes_on(index: Index) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    old = segment(index, LONG)
    index.lease([old.id])
    purged(index, session)
    assert index.home.segment_file(old.id).exists()
    index.release([old.id])
    index.sweep()
    assert not index.home.segment_file(old.id).exists()


# ---- children whose file names a parent that is another one now


@pytest.mark.parametrize("then", ["nothing", "save", "purge"])
def test_an_index_that_is_lost_finds_the_children_of_what_was_cut(index: Index, then: str) -> None:
    session = save(index, LONG, [20])
    save(index, SHORT, [60])
    purged(index, session)
    if then == "save":
        save(index, LONG, [300])
    if then == "purge":  # cut once more
        save(index, LONG[:20], [10])
        purged(index, next(row.id for row in index.sessions() if row.tokens == len(SHORT)))
    known = {row.id: (row.parent, row.start, row.end) for row in index.segments()}
    index.transact(forget_all)
    assert repair(index, deep=True, is_saving=False).did
    assert {row.id: (row.parent, row.start, row.end) for row in index.segments()} == known
    if then != "purge":
        check_content(index, SHORT, checkpoints=[20, 60])


def test_where_the_shorter_file_is_damaged_what_builds_on_it_is_set_aside_with_it(index: Index) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    purged(index, session)
    path = index.home.segment_file(segment(index, SHORT).id)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    repair(index, deep=True, is_saving=False)
    reasons = sorted(row.reason.partition(" ")[0] for row in index.quarantined())
    assert reasons == ["builds", "checksum"] and index.segments() == []


def test_what_is_left_can_be_moved(index: Index, other: Index) -> None:
    session = save(index, LONG, [20])
    left = save(index, SHORT, [60])
    purged(index, session)
    imported(other, archived(index, left))
    check_content(other, SHORT, checkpoints=[20, 60])
