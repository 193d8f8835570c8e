"""What else belongs to what is purged: records, what was set aside, what is being written, what was sampled."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.index.indexes import MODEL, ROOT, begin, commit, save, turn
from warmline_common.protocol.tokens import namespace, pack_tokens
from warmline_common.storage.home import Home
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.index.recovery.startup import ReconcileReport, reconcile
from warmline_proxy.retention.purge import purge, remove_sampled_turns
from warmline_proxy.store.rows import PurgeRequest, RequestRecord

CANARY = list(range(77_000, 77_200))
KEPT = list(range(5_000, 5_200))


@pytest.fixture
def talks(index: Index) -> Iterator[tuple[str, str]]:
    """(the canary's conversation, the one to be kept)"""
    yield save(index, CANARY, client="canary-client").session, save(index, KEPT, client="kept-client").session


def record(number: int, session: str = "", root: bytes = ROOT, at: float = 1e9) -> RequestRecord:
    return RequestRecord(
        id=f"r{number}",
        at=at,
        endpoint="chat",
        client_model="any",
        session=session,
        root=root,
        outcome="ok",
        source="cold",
    )


def holding(home: Home, wanted: bytes) -> list[Path]:
    """The files under a home, of whatever generation, with these bytes."""
    return [path for path in home.root.rglob("*") if path.is_file() and wanted in path.read_bytes()]


@pytest.mark.parametrize("whole", [False, True])
def test_no_byte_of_it_is_left(index: Index, talks: tuple[str, str], whole: bool) -> None:
    session, _ = talks
    tokens = pack_tokens(CANARY[-20:])
    index.record_turn(turn(7, session=session, tokens=tokens))
    index.record_request(record(1, session))
    index.flush()
    save(index, [*CANARY[:150], 1, 2, 3])  # a branch of it, then evicted: the slot that it left holds a token
    index.quarantine(index.sessions()[0].leaf, "checksum")
    assert len(holding(index.home, tokens)) >= 2
    purge(index, PurgeRequest(everything=True) if whole else PurgeRequest(session=session))
    for left in (tokens, pack_tokens(CANARY[:20]), b"canary-client", session.encode()):
        if whole or left != pack_tokens(CANARY[:20]):
            assert holding(index.home, left) == []
    assert whole or holding(index.home, pack_tokens(KEPT[-20:]))


def test_a_turn_that_was_noted_too_late_for_the_purge_goes_all_the_same(index: Index, talks: tuple[str, str]) -> None:
    late, other = turn(91, 92), turn(93)
    index.record_turn(late)
    index.record_turn(other)
    remove_sampled_turns(index, [(late.root, late.calls[0])])
    index.compact()
    assert index.turns(ROOT, [late.calls[0], other.calls[0]]) == [other]


def test_a_purge_that_was_killed_before_the_index_was_written_anew_is_ended_by_a_start(
    index: Index, talks: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise IndexStoreError("no space left")

    monkeypatch.setattr(index, "compact", full)
    with pytest.raises(IndexStoreError, match="no space"):
        purge(index, PurgeRequest(session=talks[0]))
    assert holding(index.home, pack_tokens(CANARY[-20:])) != []
    assert reconcile(index).purges_ended == 0, "serving goes on"
    monkeypatch.undo()
    assert reconcile(index).purges_ended == 1
    assert holding(index.home, pack_tokens(CANARY[-20:])) == []
    assert reconcile(index) == ReconcileReport()


def test_what_was_set_aside_goes_with_a_conversation_of_its_model(index: Index, talks: tuple[str, str]) -> None:
    session, kept = talks
    before = {row.id for row in index.segments()}
    save(index, [*CANARY, *range(9)], may_replace=False)
    (leaf,) = {row.id for row in index.segments()} - before
    index.quarantine(leaf, "checksum")
    told = purge(index, PurgeRequest(session=session, dry_run=True))
    assert told.quarantined == [leaf]
    assert purge(index, PurgeRequest(session=session)).quarantined == [leaf]
    assert holding(index.home, pack_tokens(CANARY[-20:])) == [] and index.quarantined() == []
    assert [each.id for each in index.sessions()] == [kept]


def test_records_of_a_model_go_whether_or_not_anything_was_stored(index: Index, talks: tuple[str, str]) -> None:
    for number, (session, root) in enumerate([(talks[0], ROOT), ("", ROOT), ("", b"another model's r"), ("", b"")]):
        index.record_request(record(number, session, root))
    purge(index, PurgeRequest(model=MODEL))
    assert [each.id for each in index.requests()] == ["r3", "r2"]


def test_records_grow_old_with_conversations(index: Index, talks: tuple[str, str]) -> None:
    _, kept = talks
    for number, (of, at) in enumerate([(kept, 1.0), ("", 1.0), ("gone before", 1.0), ("", 4e9)]):
        index.record_request(record(number, of, at=at))
    purge(index, PurgeRequest(older_than_s=3600.0))
    assert [each.id for each in index.requests()] == ["r3", "r0"], "a conversation that is used keeps its records"


def test_what_was_sampled_and_belongs_to_none_yet_goes_too(index: Index, talks: tuple[str, str]) -> None:
    session, kept = talks
    for number, of in ((1, session), (2, ""), (3, kept)):
        index.record_turn(turn(number, session=of))
    purge(index, PurgeRequest(session=session))
    calls = [f"call_{number:024x}" for number in (1, 2, 3)]
    assert [row.session for row in index.turns(ROOT, calls)] == [kept]


def test_a_save_under_way_of_the_model_is_given_up(index: Index, talks: tuple[str, str]) -> None:
    assert begin(index, [1, 2, 3]) is not None
    purge(index, PurgeRequest(model="another"))
    assert index.totals().bytes_writing > 0
    purge(index, PurgeRequest(model=MODEL))
    assert index.totals().bytes_writing == 0


def test_all_of_one_key_goes_and_nothing_of_another(index: Index, talks: tuple[str, str]) -> None:
    """What it has stored of any model, what was set aside, what is being written, what it sampled, its records."""
    mine = [namespace(model, "mine") for model in ("model-a", "model-b")]
    for root in mine:
        plan = begin(index, CANARY, root=root)
        assert plan is not None
        commit(index, plan, client="mine")
        index.record_turn(turn(int(root == mine[0]), root=root))
        index.record_request(record(1, root=root))
    assert begin(index, [*CANARY, 1], root=mine[0]) is not None
    theirs = turn(3)
    index.record_turn(theirs)
    index.record_request(record(2))
    save(index, [9] * 40)
    index.quarantine(next(row.id for row in index.segments() if row.root == ROOT and row.end == 40), "checksum")
    reply = purge(index, PurgeRequest(roots=[root.hex() for root in mine]))
    assert (len(reply.sessions), len(reply.segments), len(reply.quarantined)) == (2, 2, 1)
    assert {row.root for row in index.segments()} == {ROOT} and {row.id for row in index.sessions()} == set(talks)
    assert index.totals().bytes_writing == 0 and index.quarantined() == []
    assert [each.id for each in index.requests()] == ["r2"]
    assert index.turns(ROOT, theirs.calls) == [theirs]
    assert [index.turns(root, [f"call_{number:024x}" for number in (0, 1)]) for root in mine] == [[], []]
    assert holding(index.home, b"mine") == [] and holding(index.home, pack_tokens(CANARY[-20:])) != []
