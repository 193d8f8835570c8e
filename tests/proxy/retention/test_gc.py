"""Garbage collection: orphans, expired records and turns, eviction to the budget."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.index.indexes import commit_save, count_matched, make_home, make_turn, plan_save, save, write_plan
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery import orphans
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.retention.gc import ORPHAN_AGE_MIN_S, RECORD_AGE_MAX_S, collect_garbage
from warmline_proxy.retention.pin import pin_session
from warmline_proxy.store.rows import GcRequest, PinRequest, RequestRecord
from warmline_proxy.store.tables import REMOVAL_REASONS_MAX, Tables

A = list(range(1000, 4000))


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with Index(make_home(tmp_path / "home"), 1 << 30) as index:
        save(index, A[:1500], client="kept")
        save(index, [3] * 2000, client="other")
        yield index


def make_record(at: float) -> RequestRecord:
    return RequestRecord(id=f"{at}", at=at, endpoint="chat", client_model="m", outcome="ok", source="cold")


def write_orphan(index: Index, name: str, age_s: float) -> Path:
    path = index.home.segments / name[:2] / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"abc")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_gc_changes_nothing_in_clean_home(index: Index) -> None:
    reply = collect_garbage(index, GcRequest(), is_saving=False)
    assert (reply.evicted, reply.orphans, reply.drafts, reply.doomed, reply.records) == ([], 0, 0, 0, 0)
    assert 0 < reply.bytes_after <= reply.bytes_before and reply.bytes_wanted == 1 << 30
    assert count_matched(index, A[:1500]) == 1500 and verify_index(index, deep=True) == []


@pytest.mark.parametrize("is_saving", [False, True])
def test_gc_deletes_orphans_and_keeps_files_being_saved(index: Index, is_saving: bool) -> None:
    old, new = ORPHAN_AGE_MIN_S + 60, 1.0
    paths = {age: [write_orphan(index, "ab" * 16 + ".safetensors", age)] for age in (old,)}
    paths[old].append(write_orphan(index, ".ab.tmp", old))
    paths[new] = [write_orphan(index, "cd" * 16 + ".safetensors", new)]
    plan = plan_save(index, [7] * 100)
    write_plan(index.home, plan)
    os.utime(index.home.segment_file(plan.segments[0].id), (0, 0))
    reply = collect_garbage(index, GcRequest(), is_saving=is_saving)
    assert not any(path.exists() for path in paths[old])
    assert paths[new][0].exists() is is_saving, "a running backend may be writing it"
    assert (reply.orphans, reply.drafts, reply.bytes_strays) == (1 if is_saving else 2, 1, 6 if is_saving else 9)
    assert commit_save(index, plan).tokens_saved == 100, "files being saved are kept"


def test_gc_ignores_file_deleted_during_scan(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves and sweeps delete listed files."""
    orphan, list_owned_ids = write_orphan(index, ".ab.tmp", ORPHAN_AGE_MIN_S + 60), orphans._list_owned_ids

    def list_after_deletion(tables: Tables) -> set[str]:
        orphan.unlink()
        return list_owned_ids(tables)

    monkeypatch.setattr(orphans, "_list_owned_ids", list_after_deletion)
    assert collect_garbage(index, GcRequest(), is_saving=True).drafts == 0


def test_gc_evicts_to_requested_bytes_except_pinned(index: Index) -> None:
    (kept_session,) = [row.id for row in index.sessions() if row.client == "kept"]
    evictions = list[str]()
    index.on_evicted = lambda why, files, size: evictions.append(f"{why}: {files}")
    pin_session(index, PinRequest(session=kept_session))
    reply = collect_garbage(index, GcRequest(to_bytes=0), is_saving=True)
    assert evictions == ["budget: 1"], "the disk was not full"
    assert len(reply.evicted) == 1 and reply.bytes_after < reply.bytes_before
    assert (count_matched(index, A[:1500]), count_matched(index, [3] * 2000)) == (1500, 0)
    assert reply.bytes_wanted == 0 < reply.bytes_after
    with pytest.raises(ValueError, match="0 or more"):
        collect_garbage(index, GcRequest(to_bytes=-1), is_saving=True)


def test_gc_evicts_to_budget(index: Index) -> None:
    index.budget_bytes = index.totals().bytes_used - 1000
    reply = collect_garbage(index, GcRequest(), is_saving=True)
    assert reply.bytes_after <= reply.bytes_wanted == index.budget_bytes


def test_gc_deletes_expired_records_and_turns(index: Index) -> None:
    old, new = time.time() - RECORD_AGE_MAX_S - 60, time.time()
    kept_session = index.sessions()[0].id
    for at in (old, new):
        index.record_request(make_record(at))
    for number, (at, session) in enumerate([(old, ""), (old, kept_session), (new, "")]):
        index.record_turn(make_turn(number, at=at, session=session))
    reply = collect_garbage(index, GcRequest(), is_saving=True)
    assert (reply.records, reply.turns) == (1, 1)
    assert [row.at for row in index.requests()] == [new] and index.totals().turns == 2


def test_gc_clears_removal_reasons_at_limit(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.free_bytes(1 << 30)
    assert collect_garbage(index, GcRequest(), is_saving=True).notes == 0
    monkeypatch.setattr("warmline_proxy.retention.gc.REMOVAL_REASONS_MAX", 2)
    assert REMOVAL_REASONS_MAX > 2 and collect_garbage(index, GcRequest(), is_saving=True).notes == 2
