"""Garbage goes, what is being written stays, and the budget is brought down to where it is wanted."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.index.indexes import commit, make_home, matched, planned, save, turn, write_plan
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery import orphans as strays
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


def record(at: float) -> RequestRecord:
    return RequestRecord(id=f"{at}", at=at, endpoint="chat", client_model="m", outcome="ok", source="cold")


def stray(index: Index, name: str, age_s: float) -> Path:
    path = index.home.segments / name[:2] / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"abc")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_a_tidy_home_stays_as_it_is(index: Index) -> None:
    reply = collect_garbage(index, GcRequest(), is_saving=False)
    assert (reply.evicted, reply.orphans, reply.drafts, reply.doomed, reply.records) == ([], 0, 0, 0, 0)
    assert 0 < reply.bytes_after <= reply.bytes_before and reply.bytes_wanted == 1 << 30
    assert matched(index, A[:1500]) == 1500 and verify_index(index, deep=True) == []


@pytest.mark.parametrize("saving", [False, True])
def test_files_that_nobody_claims_go(index: Index, saving: bool) -> None:
    old, new = ORPHAN_AGE_MIN_S + 60, 1.0
    paths = {age: [stray(index, "ab" * 16 + ".safetensors", age)] for age in (old,)}
    paths[old].append(stray(index, ".ab.tmp", old))
    paths[new] = [stray(index, "cd" * 16 + ".safetensors", new)]
    plan = planned(index, [7] * 100)
    write_plan(index.home, plan)
    os.utime(index.home.segment_file(plan.segments[0].id), (0, 0))
    reply = collect_garbage(index, GcRequest(), is_saving=saving)
    assert not any(path.exists() for path in paths[old])
    assert paths[new][0].exists() is saving, "a backend that runs may be writing it"
    assert (reply.orphans, reply.drafts, reply.bytes_strays) == (1 if saving else 2, 1, 6 if saving else 9)
    assert commit(index, plan).tokens_saved == 100, "what is being saved is left alone"


def test_a_file_that_goes_while_files_are_looked_at_is_no_failure(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a save is done with, or a sweep, is listed and then gone."""
    gone, claimed = stray(index, ".ab.tmp", ORPHAN_AGE_MIN_S + 60), strays._list_claimed

    def slowly(tables: Tables) -> set[str]:
        gone.unlink()
        return claimed(tables)

    monkeypatch.setattr(strays, "_list_claimed", slowly)
    assert collect_garbage(index, GcRequest(), is_saving=True).drafts == 0


def test_it_evicts_down_to_what_is_asked_for_but_for_what_is_pinned(index: Index) -> None:
    (kept,) = [row.id for row in index.sessions() if row.client == "kept"]
    told = list[str]()
    index.on_evicted = lambda why, files, size: told.append(f"{why}: {files}")
    pin_session(index, PinRequest(session=kept))
    reply = collect_garbage(index, GcRequest(to_bytes=0), is_saving=True)
    assert told == ["budget: 1"], "the disk was not full"
    assert len(reply.evicted) == 1 and reply.bytes_after < reply.bytes_before
    assert (matched(index, A[:1500]), matched(index, [3] * 2000)) == (1500, 0)
    assert reply.bytes_wanted == 0 < reply.bytes_after
    with pytest.raises(ValueError, match="0 or more"):
        collect_garbage(index, GcRequest(to_bytes=-1), is_saving=True)


def test_it_evicts_to_the_budget(index: Index) -> None:
    index.budget_bytes = index.totals().bytes_used - 1000
    reply = collect_garbage(index, GcRequest(), is_saving=True)
    assert reply.bytes_after <= reply.bytes_wanted == index.budget_bytes


def test_old_records_and_turns_go(index: Index) -> None:
    old, new = time.time() - RECORD_AGE_MAX_S - 60, time.time()
    kept = index.sessions()[0].id
    for at in (old, new):
        index.record_request(record(at))
    for number, (at, session) in enumerate([(old, ""), (old, kept), (new, "")]):
        index.record_turn(turn(number, at=at, session=session))
    reply = collect_garbage(index, GcRequest(), is_saving=True)
    assert (reply.records, reply.turns) == (1, 1)
    assert [row.at for row in index.requests()] == [new] and index.totals().turns == 2


def test_notes_on_what_is_gone_go_where_no_more_fit(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.free_bytes(1 << 30)
    assert collect_garbage(index, GcRequest(), is_saving=True).notes == 0
    monkeypatch.setattr("warmline_proxy.retention.gc.REMOVAL_REASONS_MAX", 2)
    assert REMOVAL_REASONS_MAX > 2 and collect_garbage(index, GcRequest(), is_saving=True).notes == 2
