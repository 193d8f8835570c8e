"""The index on real LMDB: matching, saving, conversations, leases, quarantine."""

import threading

import pytest

from support.index.indexes import (
    ROOT,
    begin_save,
    commit_save,
    count_matched,
    find_end_reason,
    plan_save,
    save,
    write_plan,
)
from warmline_common.protocol.tokens import chain_hashes, namespace, pack_tokens
from warmline_common.storage.segment_file import SegmentFileError, read_header
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.store.rows import SessionUpdate

A = list(range(1000, 4000))


def file_exists(index: Index, file_id: str) -> bool:
    try:
        return bool(read_header(index.home.segment_file(file_id)))
    except SegmentFileError:
        return False


# --- matching ---


def test_empty_index_matches_nothing(index: Index) -> None:
    found = index.match_prefix(ROOT, pack_tokens(A), 100)
    assert (found.tokens, found.chain, found.end_reason) == (0, [], "nothing stored")
    assert find_end_reason(index, []) == "all of it"


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200, 3000])
def test_match_is_exact_to_token(index: Index, count: int) -> None:
    save(index, A[:count])
    assert count_matched(index, A) == count
    assert count_matched(index, A[:count]) == count
    assert count_matched(index, A[: count // 2]) == count // 2
    assert count_matched(index, [*A[: count // 2], 7]) == count // 2
    assert count_matched(index, A, root=namespace("model-b")) == 0


def test_match_explains_its_end(index: Index) -> None:
    save(index, A[:200])
    assert find_end_reason(index, A[:200]) == "all of it"
    assert find_end_reason(index, A[:201]) == "stored up to token 200"
    assert find_end_reason(index, [*A[:150], 7]) == "differs from what is stored at token 150"
    assert find_end_reason(index, [7]) == "differs from what is stored at token 0"
    save(index, A[:300], may_replace=False)
    assert find_end_reason(index, [*A[:200], 7]) == "differs from what is stored at token 200"
    assert index.match_prefix(ROOT, pack_tokens(A), 120).end_reason == "all of it"


def test_branch_shares_ancestors(index: Index) -> None:
    save(index, A[:1500])
    branch = [*A[:700], *range(50)]
    plan = plan_save(index, branch)
    assert plan.matched == 700
    assert [(spec.start, spec.end) for spec in plan.segments] == [(700, 750)]
    commit_save(index, plan)
    found = index.match_prefix(ROOT, pack_tokens(branch), 740)
    assert [(ref.start, ref.end, ref.upto) for ref in found.chain] == [(0, 1500, 700), (700, 750, 740)]
    assert count_matched(index, A) == 1500
    other = [*A[:720], 9]
    save(index, other)  # leaves the first segment past the place where the branch does
    assert [count_matched(index, ids) for ids in (A, branch, other)] == [1500, 750, 721]


def test_long_saves_are_split_into_chain(index: Index) -> None:
    ids = list(range(20_000))
    save(index, ids)
    found = index.match_prefix(ROOT, pack_tokens(ids), 19_999)
    assert [(ref.start, ref.end) for ref in found.chain] == [(0, 8192), (8192, 16384), (16384, 20000)]
    assert found.tokens == 19_999


def test_colliding_hash_only_shortens_search(index: Index) -> None:
    """Blocks that point at another conversation, at nothing, or to another root's segment: equality still decides."""
    save(index, A[:640])
    save(index, [5, *A[:640]])
    lie = index.match_prefix(ROOT, pack_tokens([5]), 1).chain[0].id
    true = index.match_prefix(ROOT, pack_tokens(A), 1).chain[0].id
    blocks = index.transact(lambda tables: list(tables.items("blocks")))
    for target in (lie, "00" * 16):
        index.transact(
            lambda tables, target=target: [
                tables.put("blocks", key, bytes.fromhex(target)) for key, value in blocks if value.hex() == true
            ]
        )
        assert count_matched(index, A) == 640
        assert {finding.what for finding in verify_index(index)} == {"block"}
    index.transact(lambda tables: [tables.put("blocks", key, value) for key, value in blocks])


def test_colliding_hash_does_not_skip_comparison(index: Index) -> None:
    """It points at a segment with the right tokens at the right place, behind others."""
    tail = list(range(200))
    save(index, A[:1500])
    save(index, [*A[:1500], *tail])
    behind = index.match_prefix(ROOT, pack_tokens([*A[:1500], *tail]), 1700).chain[-1].id
    text = [9, *A[1:1500], *tail]
    hashes = chain_hashes(ROOT, pack_tokens(text))
    index.transact(lambda tables: [tables.put("blocks", lie, bytes.fromhex(behind)) for lie in hashes])
    assert count_matched(index, text) == 0
    index.transact(lambda tables: [tables.delete("blocks", lie) for lie in hashes])


def test_match_returns_checkpoints_on_path(index: Index) -> None:
    save(index, A[:2000], checkpoints=[500, 1000, 2000])
    branch = [*A[:700], *range(50)]
    save(index, branch, checkpoints=[750])
    assert [ref.position for ref in index.match_prefix(ROOT, pack_tokens(branch), 750).checkpoints] == [500, 750]
    assert [ref.position for ref in index.match_prefix(ROOT, pack_tokens(A), 1999).checkpoints] == [500, 1000]
    assert index.totals().checkpoints == 4


# --- saving ---


def test_save_plans_only_new_tokens(index: Index) -> None:
    save(index, A[:2000], checkpoints=[1000])
    assert begin_save(index, A[:2000], checkpoints=[1000]) is None
    assert begin_save(index, A[:500]) is None
    plan = plan_save(
        index, A[:2000], checkpoints=[1000, 1500, 3000]
    )  # a state that is stored nowhere, on rows that are
    assert not plan.segments
    assert [ref.position for ref in plan.checkpoints] == [1500]
    commit_save(index, plan)
    assert [ref.position for ref in index.match_prefix(ROOT, pack_tokens(A), 2000).checkpoints] == [1000, 1500]
    plan = plan_save(index, A[:2500])
    assert [(spec.start, spec.end) for spec in plan.segments] == [(2000, 2500)]
    index.abort_save(plan)


def test_uncommitted_save_is_not_matched(index: Index) -> None:
    plan = plan_save(index, A[:100], checkpoints=[50])
    assert index.totals().bytes_writing == plan.bytes_expected
    write_plan(index.home, plan)
    assert count_matched(index, A) == 0
    assert verify_index(index) == []  # its files are accounted for
    index.abort_save(plan)
    assert not any(file_exists(index, file_id) for file_id in plan.file_ids)
    committed = commit_save(index, plan)
    assert (committed.tokens_saved, committed.why_not) == (0, "it was given up")
    assert not any(file_exists(index, file_id) for file_id in plan.file_ids)
    assert count_matched(index, A) == 0


def test_small_parent_is_merged(index: Index) -> None:
    save(index, A[:1500])
    save(index, A[:1700], checkpoints=[1600], turn_end=1650)
    old = index.match_prefix(ROOT, pack_tokens(A), 1700).chain[-1].id
    index.record_use([old])
    index.flush()
    plan = plan_save(index, A[:1900])
    assert plan.replaces == old
    assert [(spec.start, spec.end) for spec in plan.segments] == [(1500, 1900)]
    assert count_matched(index, A) == 1700  # until it is committed, the old one serves
    committed = commit_save(index, plan, turn_end=1850)
    assert committed.removed == [old] and not file_exists(index, old)
    found = index.match_prefix(ROOT, pack_tokens(A), 1900)
    assert [(ref.start, ref.end) for ref in found.chain] == [(0, 1500), (1500, 1900)]
    assert [ref.position for ref in found.checkpoints] == [1600]
    assert index.snapshot().usage[found.chain[-1].id].hits == 1
    assert len(index.sessions()) == 1


def test_large_or_leased_parent_is_not_merged(index: Index) -> None:
    save(index, A[:100])
    small = index.segments()[0].id
    with_child = [*A[:100], 1]
    index.lease([small])
    leased = plan_save(index, A[:200])
    assert not leased.replaces
    index.release([small])
    index.abort_save(leased)
    refused, counted_on = plan_save(index, A[:200], may_replace=False), plan_save(index, A[:200])
    assert not refused.replaces and not counted_on.replaces  # the first save builds on it
    index.abort_save(refused)
    index.abort_save(counted_on)
    save(index, with_child, may_replace=False)
    branch = plan_save(index, A[:200])
    assert not branch.replaces
    commit_save(index, branch)
    long = [3, *A[:1100]]
    save(index, long)
    after_long = plan_save(index, [*long, 1])
    assert not after_long.replaces
    commit_save(index, after_long)


def test_leased_file_outlives_row(index: Index) -> None:
    save(index, A[:100])
    old = index.segments()[0].id
    plan = plan_save(index, A[:200])
    assert plan.replaces == old
    index.lease([old, old])
    commit_save(index, plan)
    assert index.segment(old) is None and file_exists(index, old)
    assert verify_index(index) == []
    index.release([old])
    assert index.sweep() == 0
    index.release([old])
    assert index.sweep() == 1 and not file_exists(index, old)
    assert index.totals().bytes_doomed == 0


def test_first_of_two_equal_saves_stays(index: Index) -> None:
    first, second = plan_save(index, A[:500]), plan_save(index, A[:600], checkpoints=[300])
    commit_save(index, first)
    late = commit_save(index, second)
    assert late.why_not == "another save was sooner" and late.tokens_saved == 0
    assert count_matched(index, A) == 500
    assert [row.position for row in index.snapshot().checkpoints.values()] == [300]  # its state is good all the same
    assert not file_exists(index, second.segments[0].id)


def test_save_with_evicted_parent_is_dropped(index: Index) -> None:
    save(index, A[:1500])
    plan = plan_save(index, A[:1600])
    index.quarantine(index.segments()[0].id, "checksum")
    assert commit_save(index, plan).why_not == "its parent is gone"
    assert count_matched(index, A) == 0 and index.sessions() == []


def test_checkpoint_with_evicted_rows_is_dropped(index: Index) -> None:
    save(index, A[:1500])
    plan = plan_save(index, A[:1500], checkpoints=[1000])
    index.quarantine(index.segments()[0].id, "checksum")
    committed = commit_save(index, plan)
    assert committed.why_not == "the rows that its states belong to are gone"
    assert committed.removed == plan.file_ids and not index.snapshot().checkpoints


def test_save_merges_only_childless_parent(index: Index) -> None:
    save(index, A[:100])
    swallowing, other = plan_save(index, A[:200]), plan_save(index, [*A[:100], 1])
    assert swallowing.replaces and not other.replaces
    commit_save(index, other)
    assert commit_save(index, swallowing).why_not == "the segment that it replaces is built on"
    assert count_matched(index, A) == 100


def test_half_written_save_keeps_written_part(index: Index) -> None:
    ids = list(range(20_000))
    plan = plan_save(index, ids, checkpoints=[100, 19_000])
    reply = write_plan(index.home, plan)
    del reply.segments[1]
    committed = index.commit_save(plan, reply, prefill_s=1.0, session=SessionUpdate(turn_end=15_000))
    assert committed.why_not and committed.tokens_saved == 8192
    assert count_matched(index, ids) == 8192
    assert [row.position for row in index.snapshot().checkpoints.values()] == [100]
    assert not file_exists(index, plan.segments[2].id)


def test_concurrent_saves_leave_sound_tree(index: Index) -> None:
    start = threading.Barrier(6)

    def run(number: int) -> None:
        start.wait()
        for length in (100, 300, 900):
            plan = begin_save(index, [*A[:length], number])
            if plan is not None:
                commit_save(index, plan)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count_matched(index, A) >= 900


# --- conversations ---


def test_growing_conversation_keeps_session_id(index: Index) -> None:
    first = save(index, [*A[:500], 1, 2, 3], turn_end=500, client="s1").session
    again = save(index, [*A[:500], 9, 9, *A[500:800]], turn_end=700).session  # the answer came back differently
    assert first == again != ""
    row = index.session(first)
    assert row is not None
    assert (row.tokens, row.turn_end, row.requests, row.client) == (802, 700, 2, "s1")
    branch = save(index, [*A[:400], 8, 8], turn_end=402).session
    assert branch != first
    assert index.record_session(ROOT, pack_tokens([*A[:500], 9, 9, *A[500:750]]), SessionUpdate(turn_end=740)) == first
    assert index.record_session(ROOT, pack_tokens([77]), SessionUpdate(turn_end=1)) == ""


def test_different_client_sessions_stay_separate(index: Index) -> None:
    first = save(index, A[:500], turn_end=400, client="one").session
    second = save(index, A[:600], turn_end=550, client="two").session
    assert first != second
    assert save(index, A[:700], turn_end=650, client="two").session == second


def test_parallel_conversations_with_shared_system_prompt_stay_separate(index: Index) -> None:
    system = A[:800]
    first = save(index, [*system, 1, 1, 1], turn_end=802).session
    second = save(index, [*system, 2, 2, 2], turn_end=802).session
    assert first != second
    assert save(index, [*system, 1, 1, 4, 4], turn_end=803).session == first


# --- quarantine ---


def test_quarantine_includes_descendants(index: Index) -> None:
    save(index, A[:1500], checkpoints=[1000])
    save(index, A[:3000], checkpoints=[2500])
    save(index, [4, *A[:100]])
    bad = index.match_prefix(ROOT, pack_tokens(A), 1).chain[0].id
    aside = index.quarantine(bad, "checksum")
    assert len(aside) == 4
    assert count_matched(index, A) == 0 and count_matched(index, [4, *A]) == 101
    assert find_end_reason(index, A) == "quarantined (checksum) after token 0"
    reasons = {row.id: row.reason for row in index.quarantined()}
    assert reasons[bad] == "checksum" and all("checksum" in reason for reason in reasons.values())
    assert not any(file_exists(index, file_id) for file_id in aside)
    assert index.totals().bytes_quarantined == sum(row.bytes_on_disk for row in index.quarantined())
    assert index.quarantine(bad, "checksum") == []
    save(index, A[:1500])
    assert count_matched(index, A) == 1500


def test_damaged_checkpoint_is_quarantined_alone(index: Index) -> None:
    save(index, A[:1500], checkpoints=[1000, 1500])
    bad = index.match_prefix(ROOT, pack_tokens(A), 1500).checkpoints[0].id
    assert index.quarantine(bad, "truncated") == [bad]
    assert count_matched(index, A) == 1500
    plan = plan_save(index, A[:1500], checkpoints=[1000, 1500])
    assert [ref.position for ref in plan.checkpoints] == [1000]
    commit_save(index, plan)
