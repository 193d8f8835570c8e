"""What only a purged conversation needs of a segment that others stand on is cut away; all others stay as they are."""

import errno
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_helpers import BUDGET, commit, make_home, planned
from index_helpers import save as save_plainly
from moving_helpers import FINGERPRINT, archived, check_content, everything, imported, save

from warmline_proxy import index_cut, index_save, index_tree
from warmline_proxy.gc import collect
from warmline_proxy.index import Index, IndexFailure
from warmline_proxy.index_cut import CHANGED, ROUNDS_MAX, Cutter
from warmline_proxy.index_tables import TABLES, Tables
from warmline_proxy.pin import pin
from warmline_proxy.purge import prepare, purge
from warmline_proxy.repair import repair
from warmline_proxy.rows import Cut, GcRequest, PinRequest, PurgeReply, PurgeRequest, SegmentRow, SessionRow
from warmline_wire import disk
from warmline_wire.home import Home
from warmline_wire.keys import common_prefix, namespace, pack_tokens, unpack_tokens

ROOT = namespace(FINGERPRINT)
LONG = list(range(1000, 1300))
SHORT = [*LONG[:30], *range(5000, 5040)]
DEEP = [*LONG[:130], *range(6000, 6050)]


def stored(index: Index, ids: Sequence[int]) -> int:
    return index.match(ROOT, pack_tokens(ids), len(ids)).tokens


def segment(index: Index, ids: Sequence[int]) -> SegmentRow:
    """The one in which these tokens begin."""
    row = index.segment(index.match(ROOT, pack_tokens(ids), len(ids)).chain[0].id)
    assert row is not None
    return row


def holding(home: Home, ids: Sequence[int]) -> list[Path]:
    """The files under a home, of whatever generation, with these tokens in a row."""
    wanted = pack_tokens(ids)
    return [path for path in home.root.rglob("*") if path.is_file() and wanted in path.read_bytes()]


def purged(index: Index, session: str) -> PurgeReply:
    """As was told before."""
    told = purge(index, PurgeRequest(session=session, dry_run=True))
    reply = purge(index, PurgeRequest(session=session))
    assert [msgspec.structs.replace(cut, became="") for cut in reply.cuts] == told.cuts
    assert msgspec.structs.replace(told, cuts=reply.cuts, dry_run=False) == reply
    return reply


# ---- what goes, and what stays


def test_the_tail_is_gone_from_every_file_and_the_other_one_goes_on(index: Index) -> None:
    session = save(index, LONG, [20, 100, 300])
    save(index, SHORT, [60])
    old, before = segment(index, LONG), index.totals().bytes_used
    reply = purged(index, session)
    new = segment(index, LONG)
    assert reply.cuts == [
        Cut(segment=old.id, until=30, end=300, bytes_count=old.bytes_on_disk - new.bytes_on_disk, became=new.id)
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
            index.change(lambda tables, row=row: tables.update_segment(msgspec.structs.replace(row, session=session)))
    (gone,) = [row.id for row in index.sessions() if row.tokens == len(other)]
    index.change(lambda tables: tables.remove_session(gone))
    reply = purged(index, session)
    assert sorted((cut.until, cut.end) for cut in reply.cuts) == [(200, 300), (250, 400)]
    assert holding(index.home, LONG[200:202]) == holding(index.home, other[250:252]) == []
    check_content(index, last)


def test_what_builds_on_the_tail_goes_with_it(index: Index) -> None:
    """A branch that nobody ends in, of what is purged."""
    session = save(index, LONG)
    save(index, SHORT)
    branch = save(index, DEEP)
    index.change(lambda tables: tables.remove_session(branch))
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
    assert collect(index, GcRequest(), saving=False).cuts == [] and stored(index, LONG) == 300


def test_old_conversations_leave_no_tails_either(index: Index) -> None:
    old = save(index, LONG)
    save(index, SHORT)
    (row,) = [row for row in index.sessions() if row.id == old]
    index.change(lambda tables: tables.put_session(msgspec.structs.replace(row, last_used=1.0)))
    reply = purge(index, PurgeRequest(older_than_s=3600.0))
    assert (reply.sessions, [cut.until for cut in reply.cuts]) == ([old], [30])
    assert holding(index.home, LONG[30:32]) == []
    check_content(index, SHORT)


def test_pins_and_use_are_the_shorter_ones(index: Index) -> None:
    session = save(index, LONG)
    other = save(index, SHORT)
    pin(index, PinRequest(session=session))
    pin(index, PinRequest(session=other))
    old = segment(index, LONG)
    index.note_use([old.id])
    purged(index, session)
    new = segment(index, SHORT)
    assert (new.pinned, index.usage(new.id).hits, index.usage(old.id).hits) == (True, 1, 0)
    assert new.prefill_s == pytest.approx(old.prefill_s / 10)
    pin(index, PinRequest(session=other, off=True))
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


# ---- any tree


@dataclass(frozen=True)
class Talk:
    """Goes on from a share of an earlier one; `base`: 0 the last."""

    base: int
    keep: float
    tail: int
    states: list[float]


TALKS = st.builds(
    Talk, st.integers(0, 9), st.sampled_from([0.1, 0.5, 0.9, 1.0]), st.integers(2, 200), st.lists(st.floats(0.1, 1))
)


@settings(max_examples=25)
@given(talks=st.lists(TALKS, min_size=2, max_size=6), order=st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_of_any_tree_any_conversation_goes_to_the_token(talks: list[Talk], order: list[int]) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        Index(make_home(Path(folder)), BUDGET) as index,
        mock.patch.multiple(index_save, SEGMENT_TOKENS_MAX=150, SMALL_TOKENS=70),
    ):
        grow(index, talks)
        for which in order:
            if sessions := sorted(index.sessions(), key=lambda row: row.client):
                check_purge(index, sessions, which % len(sessions))
        check_regrown(index)


def grow(index: Index, talks: Sequence[Talk]) -> None:
    texts: list[list[int]] = [[]]
    for number, talk in enumerate(talks, 1):
        old = texts[-1 - talk.base % len(texts)]
        texts.append([*old[: round(len(old) * talk.keep)], *range(number << 16, (number << 16) + talk.tail)])
        states = [max(1, round(share * len(texts[-1]))) for share in talk.states]
        save(index, texts[-1], states, client=f"{number}", may_replace=True)


def check_purge(index: Index, sessions: Sequence[SessionRow], which: int) -> None:
    texts = {row.id: unpack_tokens(index.stored_tokens(row.leaf))[: row.tokens] for row in sessions}
    gone = texts[sessions[which].id]
    before = {row.id: states_of(index, texts[row.id]) for row in sessions}
    purged(index, sessions[which].id)
    left = [row.id for row in index.sessions()]
    assert {*left, sessions[which].id} == texts.keys()
    said = max((common_prefix(pack_tokens(gone), pack_tokens(texts[each])) for each in left), default=0)
    assert stored(index, gone) == said
    assert len(gone) < said + 2 or holding(index.home, gone[said : said + 2]) == holding(index.home, gone[-2:]) == []
    for each in left:
        check_content(index, texts[each], checkpoints=before[each])
    assert index.verify(deep=True) == []


def check_regrown(index: Index) -> None:
    """All of it is found again from the files alone, whose parents are others than they name."""
    rows = index.sessions()
    texts = [unpack_tokens(index.stored_tokens(row.leaf))[: row.tokens] for row in rows]
    before = [states_of(index, text) for text in texts]
    index.change(forget_all)
    repair(index, deep=False, saving=False)
    for text, states in zip(texts, before, strict=True):
        check_content(index, text, checkpoints=states)
    assert index.verify() == []


def states_of(index: Index, ids: Sequence[int]) -> list[int]:
    return [ref.position for ref in index.match(ROOT, pack_tokens(ids), len(ids)).checkpoints]


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
    index.change(forget_all)
    assert repair(index, deep=True, saving=False).did
    assert {row.id: (row.parent, row.start, row.end) for row in index.segments()} == known
    if then != "purge":
        check_content(index, SHORT, checkpoints=[20, 60])


def forget_all(tables: Tables) -> None:
    for name in TABLES:
        for key, _ in list(tables.items(name)) if name != "meta" else []:
            tables.delete(name, key)


def test_where_the_shorter_file_is_damaged_what_builds_on_it_is_set_aside_with_it(index: Index) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    purged(index, session)
    path = index.home.segment_file(segment(index, SHORT).id)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    repair(index, deep=True, saving=False)
    reasons = sorted(row.reason.partition(" ")[0] for row in index.quarantined())
    assert reasons == ["builds", "checksum"] and index.segments() == []


def test_what_is_left_can_be_moved(index: Index, other: Index) -> None:
    session = save(index, LONG, [20])
    left = save(index, SHORT, [60])
    purged(index, session)
    imported(other, archived(index, left))
    check_content(other, SHORT, checkpoints=[20, 60])


# ---- what changes while a shorter file is being written


def meanwhile(monkeypatch: pytest.MonkeyPatch, what: Callable[[], object], times: int = 1) -> None:
    """Do it whenever a shorter file was written, at most so often."""
    left, written = [None] * times, index_cut._written

    def and_then(*arguments: Any) -> Any:
        file = written(*arguments)
        if left:
            left.pop()
            what()
        return file

    monkeypatch.setattr(index_cut, "_written", and_then)


def test_a_child_that_is_saved_meanwhile_is_kept(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    meanwhile(monkeypatch, lambda: save(index, DEEP))
    reply = purge(index, PurgeRequest(session=session))
    assert [(cut.until, cut.why_not) for cut in reply.cuts] == [(130, "")]
    check_content(index, DEEP)
    check_content(index, SHORT)
    assert stored(index, LONG) == 130


def test_a_segment_that_goes_meanwhile_is_not_missed(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    meanwhile(monkeypatch, lambda: index.quarantine(segment(index, LONG).id, "checksum"))
    reply = purge(index, PurgeRequest(session=session))
    assert reply.cuts == [] and index.segments() == []


def test_what_changes_again_and_again_is_cut_at_last(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    branches = iter([[*LONG[:at], *range(at * 100, at * 100 + 20)] for at in range(50, 250, 20)])
    meanwhile(monkeypatch, lambda: save(index, next(branches)), times=ROUNDS_MAX)
    reply = purge(index, PurgeRequest(session=session))
    assert [(cut.until, cut.why_not) for cut in reply.cuts] == [(90, "")], "the last round comes after what it removed"
    assert stored(index, LONG) == 90 and holding(index.home, LONG[90:92]) == []


def test_it_is_said_where_it_changes_too_often(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    branches = iter([[*LONG[:at], *range(at * 100, at * 100 + 20)] for at in range(50, 250, 20)])
    meanwhile(monkeypatch, lambda: save(index, next(branches)), times=2 * ROUNDS_MAX)
    reply = purge(index, PurgeRequest(session=session))
    assert [cut.why_not for cut in reply.cuts] == [CHANGED] and index.session(session) is None
    assert reply.bytes_freed == 0
    done = collect(index, GcRequest(), saving=True)
    assert [cut.why_not for cut in done.cuts] == [""] and holding(index.home, LONG[-2:]) == []


def test_a_save_that_stands_on_it_begins_anew(index: Index) -> None:
    """As an import does; others wait until a purge is over."""
    session = save_plainly(index, LONG).session
    save_plainly(index, SHORT)
    plan = planned(index, [*LONG, 7, 7], may_replace=False)
    assert [cut.until for cut in purge(index, PurgeRequest(session=session)).cuts] == [30]
    assert commit(index, plan).why_not == "its parent is gone"
    assert collect(index, GcRequest(), saving=True).cuts == []


def test_gc_leaves_what_a_save_stands_on(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    session = save_plainly(index, LONG).session
    save_plainly(index, SHORT)
    full(monkeypatch)
    assert [bool(cut.why_not) for cut in purge(index, PurgeRequest(session=session)).cuts] == [True]
    monkeypatch.undo()
    plan = planned(index, [*LONG, 7, 7], may_replace=False)
    assert collect(index, GcRequest(), saving=True).cuts == []
    assert commit(index, plan).why_not == ""


# ---- what fails


def full(monkeypatch: pytest.MonkeyPatch, times: int = 99) -> None:
    left, write = [None] * times, disk.write

    def fails(*arguments: Any) -> None:
        if left:
            left.pop()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*arguments)

    monkeypatch.setattr(disk, "write", fails)


def test_where_the_disk_is_full_it_is_cut_when_the_rest_has_made_room(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    full(monkeypatch, times=1)
    assert [cut.why_not for cut in purge(index, PurgeRequest(session=session)).cuts] == [""]
    assert holding(index.home, LONG[30:32]) == []


def test_where_it_stays_full_that_is_said_and_gc_does_it_later(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    session = save(index, [*LONG, *range(9000, 9010)], [100])
    save(index, [*LONG[:280], 1, 2])
    whole = save(index, SHORT)
    full(monkeypatch)
    reply = purge(index, PurgeRequest(session=session))
    (cut,) = reply.cuts
    assert "No space left on device" in cut.why_not and cut.became == "" and cut.bytes_count > 0
    assert reply.sessions == [session] and index.session(session) is None
    assert stored(index, LONG) == 300 and list(index.home.root.rglob(".*.tmp")) == []
    assert collect(index, GcRequest(), saving=False).cuts[0].why_not != ""
    monkeypatch.undo()
    done = collect(index, GcRequest(), saving=False)
    assert [(each.until, each.why_not) for each in done.cuts] == [(280, "")]
    assert holding(index.home, LONG[280:282]) == [] and stored(index, LONG) == 280
    assert index.session(whole) is not None and collect(index, GcRequest(), saving=False).cuts == []


@pytest.mark.parametrize("damage", ["flipped", "gone", "another"])
def test_a_file_that_is_damaged_is_named_and_all_else_goes(index: Index, damage: str) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    path = index.home.segment_file(segment(index, LONG).id)
    data = path.read_bytes()
    if damage == "flipped":
        path.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(index.home.segment_file(index.match(ROOT, pack_tokens(SHORT), 99).chain[1].id).read_bytes())
    told = purge(index, PurgeRequest(session=session, dry_run=True))
    reply = purge(index, PurgeRequest(session=session))
    assert told.cuts[0].bytes_count > 0 and "its file can't be used" in reply.cuts[0].why_not
    assert reply.sessions == [session] and index.session(session) is None
    path.write_bytes(data)
    path.chmod(0o600)


def test_a_purge_that_fails_leaves_no_file_behind(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    before = everything(index.home)

    def fails(*_: object) -> None:
        raise IndexFailure("no")

    monkeypatch.setattr(index_cut, "replace", fails)
    with pytest.raises(IndexFailure):
        purge(index, PurgeRequest(session=session))
    assert everything(index.home) == before and stored(index, LONG) == 300
    monkeypatch.setattr(index_cut, "replace", index_tree.replace)
    assert [cut.until for cut in purge(index, PurgeRequest(session=session)).cuts] == [30]


def test_two_purges_of_one_conversation_do_it_once(index: Index) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    request = PurgeRequest(session=session)
    with Cutter(index) as first:
        prepare(index, request, first)
        assert [cut.why_not for cut in purge(index, request).cuts] == [""]
    assert purge(index, request).cuts == [] and index.totals().bytes_writing == 0


def test_a_backend_that_starts_meanwhile_sweeps_the_draft_once(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    rename = disk.rename

    def swept(old: Path, new: Path) -> None:
        monkeypatch.setattr(disk, "rename", rename)
        old.unlink()
        rename(old, new)

    monkeypatch.setattr(disk, "rename", swept)
    assert [cut.why_not for cut in purge(index, PurgeRequest(session=session)).cuts] == [""]
    check_content(index, SHORT)
