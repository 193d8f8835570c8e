"""Eviction as a pure decision, and the budget on a real index."""

import time

import pytest

from support.index.indexes import ROOT, begin_save, commit_save, count_file_bytes, count_matched, plan_save, save
from warmline_common.protocol.tokens import pack_tokens
from warmline_common.storage.home import Home
from warmline_proxy.index.eviction import LOW_WATERMARK, EvictionCandidate, bytes_to_free, choose_evictions
from warmline_proxy.index.index import DiskBudgetError, Index
from warmline_proxy.index.recovery.verify import verify_index

NOW = 1_000_000.0


def make_segment(
    name: str, parent: str = "", size: int = 100, saves_s: float = 1.0, age_s: float = 0.0, kept: bool = False
) -> EvictionCandidate:
    return EvictionCandidate(name, parent, False, size, saves_s, NOW - age_s, kept)


def make_state(name: str, parent: str, size: int = 100, saves_s: float = 1.0, kept: bool = False) -> EvictionCandidate:
    return EvictionCandidate(name, parent, True, size, saves_s, NOW, kept)


def test_eviction_runs_between_watermarks() -> None:
    assert bytes_to_free(900, 100, 1000) == 0
    assert bytes_to_free(901, 100, 1000) == 101


def test_leaves_are_evicted_before_cheaper_parents() -> None:
    tree = [make_segment("a", saves_s=0.0, age_s=1e6), make_segment("b", "a"), make_segment("c", "b")]
    assert list(choose_evictions(tree, 250, NOW)) == ["c", "b", "a"]
    assert list(choose_evictions(tree, 100, NOW)) == ["c"]
    assert list(choose_evictions(tree, 0, NOW)) == []


@pytest.mark.parametrize(
    ("cheap", "dear"),
    [
        (make_segment("cheap", saves_s=1.0), make_segment("dear", saves_s=2.0)),
        (make_segment("cheap", size=200), make_segment("dear", size=100)),
        (make_segment("cheap", age_s=500.0), make_segment("dear", age_s=5.0)),
        (make_segment("cheap", age_s=0.0, saves_s=1.0), make_segment("dear", age_s=600.0, saves_s=20.0)),
    ],
)
def test_lowest_value_per_byte_is_evicted_first(cheap: EvictionCandidate, dear: EvictionCandidate) -> None:
    assert list(choose_evictions([dear, cheap], 1, NOW)) == ["cheap"]


def test_checkpoint_is_evicted_alone_or_with_segment() -> None:
    tree = [make_segment("a"), make_state("s", "a", saves_s=0.1), make_state("t", "a", saves_s=50.0)]
    assert list(choose_evictions(tree, 100, NOW)) == ["s"]
    everything = choose_evictions(tree, 10_000, NOW)
    assert list(everything) == ["s", "t", "a"] and sum(everything.values()) == 300


def test_pinned_and_leased_keep_ancestors() -> None:
    tree = [
        make_segment("a"),
        make_segment("b", "a", kept=True),
        make_segment("c", "a"),
        make_segment("d"),
        make_state("s", "d", kept=True),
    ]
    assert list(choose_evictions(tree, 10_000, NOW)) == ["c"]


# --- on a real index ---


def test_budget_holds_before_each_save(home: Home) -> None:
    budget = 1_600_000
    with Index(home, budget) as index:
        for number in range(60):
            plan = plan_save(index, [number, *range(4000)], checkpoints=[1000])
            assert index.totals().bytes_used <= budget
            assert count_file_bytes(home) + plan.bytes_expected <= budget
            commit_save(index, plan)
            assert count_file_bytes(home) + index.totals().bytes_index <= budget
        assert verify_index(index) == []
        assert count_matched(index, [59, *range(4000)]) == 4001
        assert count_matched(index, [0, *range(4000)]) == 0
        assert index.match_prefix(ROOT, pack_tokens([0]), 1).end_reason == "evicted after token 0"
        assert 3 < index.totals().segments < 30


def test_leased_and_parent_files_are_not_evicted(home: Home) -> None:
    with Index(home, 1 << 30) as index:
        save(index, [1, *range(4000)], prefill_s=0.0)
        save(index, [2, *range(4000)], prefill_s=0.0)
        save(index, [3, *range(4000)], prefill_s=9.0)
        leased = index.match_prefix(ROOT, pack_tokens([1]), 1).chain[0].id
        index.lease([leased])
        growing = begin_save(index, [2, *range(5000)])
        index.budget_bytes = 1
        index.make_room()
        assert [count_matched(index, [number, *range(4000)]) for number in (1, 2, 3)] == [4001, 4001, 0]
        with pytest.raises(DiskBudgetError):
            index.make_room(1)
        with pytest.raises(DiskBudgetError, match="don't fit"):
            begin_save(index, [4])
        assert growing is not None and commit_save(index, growing).why_not == ""
        index.release([leased])
        index.make_room()
        assert index.totals().segments == 0
        assert index.sessions() == [] and verify_index(index) == []


def test_evicted_tail_keeps_session_id(home: Home) -> None:
    with Index(home, 1 << 30) as index:
        session = save(index, range(3000), turn_end=2000).session
        assert save(index, range(9000), turn_end=8000).session == session
        index.budget_bytes = index.totals().bytes_used - 1
        index.make_room()
        row = index.session(session)
        assert row is not None and (row.tokens, row.turn_segment) == (3000, "")
        index.budget_bytes = 1 << 30
        assert save(index, range(9100), turn_end=9050).session == session
        assert verify_index(index) == []


def test_quarantined_files_are_evicted_first(home: Home) -> None:
    with Index(home, 1 << 30) as index:
        save(index, [1, *range(4000)])
        save(index, [2, *range(4000)], prefill_s=0.0)
        index.quarantine(index.match_prefix(ROOT, pack_tokens([1]), 1).chain[0].id, "checksum")
        assert index.totals().bytes_quarantined > 0
        index.budget_bytes = index.totals().bytes_used - 1
        assert len(index.make_room()) == 1
        assert index.quarantined() == [] and count_matched(index, [2, *range(4000)]) == 4001
        assert count_file_bytes(home) == index.totals().bytes_segments


def test_leased_file_stays_in_quarantine(home: Home) -> None:
    with Index(home, 1 << 30) as index:
        save(index, range(4000))
        leased = index.segments()[0].id
        index.lease([leased])
        index.quarantine(leased, "checksum")
        index.budget_bytes = 1
        assert index.make_room() == []
        index.release([leased])
        assert index.make_room() == [leased]


def test_used_files_are_kept(home: Home) -> None:
    with Index(home, 1 << 30) as index:
        for number in range(4):
            save(index, [number, *range(4000)])
        old = time.time() - 3600

        def age(tables: object) -> None:
            for row in index.segments():
                row.created = old
                tables.update_segment(row)  # type: ignore[attr-defined]

        index.transact(age)
        index.record_use([index.match_prefix(ROOT, pack_tokens([0]), 1).chain[0].id])
        index.flush()
        index.budget_bytes = int((index.totals().bytes_index + 90_000) / LOW_WATERMARK)  # room for one
        index.make_room()
        assert [count_matched(index, [number, *range(4000)]) for number in range(4)] == [4001, 0, 0, 0]
