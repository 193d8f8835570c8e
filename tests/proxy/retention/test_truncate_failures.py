"""Truncation with concurrent changes and failures while copies are written."""

import errno
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from support.index.archives import check_content, list_files, save
from support.index.indexes import commit_save, plan_save
from support.index.indexes import save as save_rows
from support.index.truncation import DEEP, LONG, ROOT, SHORT, count_stored, find_files_containing, find_segment
from warmline_common.protocol.tokens import pack_tokens
from warmline_common.storage import disk
from warmline_proxy.index import tree
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.retention import truncate
from warmline_proxy.retention.gc import collect_garbage
from warmline_proxy.retention.purge import prepare_purge, purge
from warmline_proxy.retention.truncate import CHANGED_REASON, ROUNDS_MAX, Truncator
from warmline_proxy.store.rows import GcRequest, PurgeRequest


def run_after_copy(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object], times: int = 1) -> None:
    """Run the action after each written copy, at most `times`."""
    left, write = [None] * times, truncate._write_shortened

    def write_and_act(*arguments: Any) -> Any:
        file = write(*arguments)
        if left:
            left.pop()
            action()
        return file

    monkeypatch.setattr(truncate, "_write_shortened", write_and_act)


def test_child_saved_during_truncation_is_kept(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    run_after_copy(monkeypatch, lambda: save(index, DEEP))
    reply = purge(index, PurgeRequest(session=session))
    assert [(cut.until, cut.why_not) for cut in reply.cuts] == [(130, "")]
    check_content(index, DEEP)
    check_content(index, SHORT)
    assert count_stored(index, LONG) == 130


def test_segment_removed_during_truncation_is_skipped(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    run_after_copy(monkeypatch, lambda: index.quarantine(find_segment(index, LONG).id, "checksum"))
    reply = purge(index, PurgeRequest(session=session))
    assert reply.cuts == [] and index.segments() == []


def test_cut_succeeds_in_last_round(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    branches = iter([[*LONG[:at], *range(at * 100, at * 100 + 20)] for at in range(50, 250, 20)])
    run_after_copy(monkeypatch, lambda: save(index, next(branches)), times=ROUNDS_MAX)
    reply = purge(index, PurgeRequest(session=session))
    assert [(cut.until, cut.why_not) for cut in reply.cuts] == [(90, "")], "the last round cuts what is there"
    assert count_stored(index, LONG) == 90 and find_files_containing(index.home, LONG[90:92]) == []


def test_too_many_changes_are_reported_and_gc_cuts_later(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    branches = iter([[*LONG[:at], *range(at * 100, at * 100 + 20)] for at in range(50, 250, 20)])
    run_after_copy(monkeypatch, lambda: save(index, next(branches)), times=2 * ROUNDS_MAX)
    reply = purge(index, PurgeRequest(session=session))
    assert [cut.why_not for cut in reply.cuts] == [CHANGED_REASON] and index.session(session) is None
    assert reply.bytes_freed == 0
    done = collect_garbage(index, GcRequest(), is_saving=True)
    assert [cut.why_not for cut in done.cuts] == [""] and find_files_containing(index.home, LONG[-2:]) == []


def test_save_on_truncated_segment_is_refused(index: Index) -> None:
    """An import saves during a purge; other saves wait until it is over."""
    session = save_rows(index, LONG).session
    save_rows(index, SHORT)
    plan = plan_save(index, [*LONG, 7, 7], may_replace=False)
    assert [cut.until for cut in purge(index, PurgeRequest(session=session)).cuts] == [30]
    assert commit_save(index, plan).why_not == "its parent is gone"
    assert collect_garbage(index, GcRequest(), is_saving=True).cuts == []


def test_gc_keeps_tail_that_save_builds_on(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    session = save_rows(index, LONG).session
    save_rows(index, SHORT)
    fail_writes(monkeypatch)
    assert [bool(cut.why_not) for cut in purge(index, PurgeRequest(session=session)).cuts] == [True]
    monkeypatch.undo()
    plan = plan_save(index, [*LONG, 7, 7], may_replace=False)
    assert collect_garbage(index, GcRequest(), is_saving=True).cuts == []
    assert commit_save(index, plan).why_not == ""


# ---- failures


def fail_writes(monkeypatch: pytest.MonkeyPatch, times: int = 99) -> None:
    left, write = [None] * times, disk.write

    def fails(*arguments: Any) -> None:
        if left:
            left.pop()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*arguments)

    monkeypatch.setattr(disk, "write", fails)


def test_cut_is_retried_after_purge_freed_space(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    fail_writes(monkeypatch, times=1)
    assert [cut.why_not for cut in purge(index, PurgeRequest(session=session)).cuts] == [""]
    assert find_files_containing(index.home, LONG[30:32]) == []


def test_full_disk_is_reported_and_gc_cuts_later(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    session = save(index, [*LONG, *range(9000, 9010)], [100])
    save(index, [*LONG[:280], 1, 2])
    other_session = save(index, SHORT)
    fail_writes(monkeypatch)
    reply = purge(index, PurgeRequest(session=session))
    (cut,) = reply.cuts
    assert "No space left on device" in cut.why_not and cut.became == "" and cut.bytes_count > 0
    assert reply.sessions == [session] and index.session(session) is None
    assert count_stored(index, LONG) == 300 and list(index.home.root.rglob(".*.tmp")) == []
    assert collect_garbage(index, GcRequest(), is_saving=False).cuts[0].why_not != ""
    monkeypatch.undo()
    done = collect_garbage(index, GcRequest(), is_saving=False)
    assert [(each.until, each.why_not) for each in done.cuts] == [(280, "")]
    assert find_files_containing(index.home, LONG[280:282]) == [] and count_stored(index, LONG) == 280
    assert index.session(other_session) is not None and collect_garbage(index, GcRequest(), is_saving=False).cuts == []


@pytest.mark.parametrize("damage", ["flipped", "gone", "another"])
def test_damaged_segment_is_reported_and_rest_is_purged(index: Index, damage: str) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    path = index.home.segment_file(find_segment(index, LONG).id)
    data = path.read_bytes()
    if damage == "flipped":
        path.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(
            index.home.segment_file(index.match_prefix(ROOT, pack_tokens(SHORT), 99).chain[1].id).read_bytes()
        )
    preview = purge(index, PurgeRequest(session=session, dry_run=True))
    reply = purge(index, PurgeRequest(session=session))
    assert preview.cuts[0].bytes_count > 0 and "its file can't be used" in reply.cuts[0].why_not
    assert reply.sessions == [session] and index.session(session) is None
    path.write_bytes(data)
    path.chmod(0o600)


def test_failed_purge_leaves_no_copy(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    before = list_files(index.home)

    def fails(*_: object) -> None:
        raise IndexStoreError("no")

    monkeypatch.setattr(truncate, "replace_segment", fails)
    with pytest.raises(IndexStoreError):
        purge(index, PurgeRequest(session=session))
    assert list_files(index.home) == before and count_stored(index, LONG) == 300
    monkeypatch.setattr(truncate, "replace_segment", tree.replace_segment)
    assert [cut.until for cut in purge(index, PurgeRequest(session=session)).cuts] == [30]


def test_concurrent_purges_cut_once(index: Index) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    request = PurgeRequest(session=session)
    with closing(Truncator(index)) as first:
        prepare_purge(index, request, first)
        assert [cut.why_not for cut in purge(index, request).cuts] == [""]
    assert purge(index, request).cuts == [] and index.totals().bytes_writing == 0


def test_copy_survives_deletion_of_draft_by_starting_backend(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    session = save(index, LONG)
    save(index, SHORT)
    rename = disk.rename

    def rename_after_deletion(old: Path, new: Path) -> None:
        monkeypatch.setattr(disk, "rename", rename)
        old.unlink()
        rename(old, new)

    monkeypatch.setattr(disk, "rename", rename_after_deletion)
    assert [cut.why_not for cut in purge(index, PurgeRequest(session=session)).cuts] == [""]
    check_content(index, SHORT)
