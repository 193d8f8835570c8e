"""What changes, or fails, while what is left of a file is being written."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.index.archives import check_content, everything, save
from support.index.indexes import commit, planned
from support.index.indexes import save as save_plainly
from support.index.truncation import DEEP, LONG, ROOT, SHORT, holding, segment, stored
from warmline_common.protocol.tokens import pack_tokens
from warmline_common.storage import disk
from warmline_proxy.index import tree as index_tree
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.retention import truncate as index_cut
from warmline_proxy.retention.gc import collect_garbage
from warmline_proxy.retention.purge import prepare_purge, purge
from warmline_proxy.retention.truncate import CHANGED_REASON, ROUNDS_MAX, Truncator
from warmline_proxy.store.rows import GcRequest, PurgeRequest

# ---- what changes while a shorter file is being written


def meanwhile(monkeypatch: pytest.MonkeyPatch, what: Callable[[], object], times: int = 1) -> None:
    """Do it whenever a shorter file was written, at most so often."""
    left, written = [None] * times, index_cut._write_shortened

    def and_then(*arguments: Any) -> Any:
        file = written(*arguments)
        if left:
            left.pop()
            what()
        return file

    monkeypatch.setattr(index_cut, "_write_shortened", and_then)


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
    assert [cut.why_not for cut in reply.cuts] == [CHANGED_REASON] and index.session(session) is None
    assert reply.bytes_freed == 0
    done = collect_garbage(index, GcRequest(), is_saving=True)
    assert [cut.why_not for cut in done.cuts] == [""] and holding(index.home, LONG[-2:]) == []


def test_a_save_that_stands_on_it_begins_anew(index: Index) -> None:
    """As an import does; others wait until a purge is over."""
    session = save_plainly(index, LONG).session
    save_plainly(index, SHORT)
    plan = planned(index, [*LONG, 7, 7], may_replace=False)
    assert [cut.until for cut in purge(index, PurgeRequest(session=session)).cuts] == [30]
    assert commit(index, plan).why_not == "its parent is gone"
    assert collect_garbage(index, GcRequest(), is_saving=True).cuts == []


def test_gc_leaves_what_a_save_stands_on(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    session = save_plainly(index, LONG).session
    save_plainly(index, SHORT)
    full(monkeypatch)
    assert [bool(cut.why_not) for cut in purge(index, PurgeRequest(session=session)).cuts] == [True]
    monkeypatch.undo()
    plan = planned(index, [*LONG, 7, 7], may_replace=False)
    assert collect_garbage(index, GcRequest(), is_saving=True).cuts == []
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
    assert collect_garbage(index, GcRequest(), is_saving=False).cuts[0].why_not != ""
    monkeypatch.undo()
    done = collect_garbage(index, GcRequest(), is_saving=False)
    assert [(each.until, each.why_not) for each in done.cuts] == [(280, "")]
    assert holding(index.home, LONG[280:282]) == [] and stored(index, LONG) == 280
    assert index.session(whole) is not None and collect_garbage(index, GcRequest(), is_saving=False).cuts == []


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
        path.write_bytes(
            index.home.segment_file(index.match_prefix(ROOT, pack_tokens(SHORT), 99).chain[1].id).read_bytes()
        )
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
        raise IndexStoreError("no")

    monkeypatch.setattr(index_cut, "replace_segment", fails)
    with pytest.raises(IndexStoreError):
        purge(index, PurgeRequest(session=session))
    assert everything(index.home) == before and stored(index, LONG) == 300
    monkeypatch.setattr(index_cut, "replace_segment", index_tree.replace_segment)
    assert [cut.until for cut in purge(index, PurgeRequest(session=session)).cuts] == [30]


def test_two_purges_of_one_conversation_do_it_once(index: Index) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    request = PurgeRequest(session=session)
    with Truncator(index) as first:
        prepare_purge(index, request, first)
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
