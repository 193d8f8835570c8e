"""Reach of a purge: records, quarantined files, saves under way, sampled turns, responses without a conversation."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.index.indexes import (
    MODEL,
    ROOT,
    begin_save,
    commit_save,
    make_prompted_response,
    make_response,
    make_turn,
    save,
)
from warmline_common.protocol.tokens import namespace, pack_tokens
from warmline_common.storage.home import Home
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.index.recovery.startup import ReconcileReport, reconcile
from warmline_proxy.index.responses import ResponseEntry
from warmline_proxy.retention.purge import preview_purge, purge, remove_sampled_turns
from warmline_proxy.store.rows import Divergence, PurgeRequest, RequestRecord

CANARY = list(range(77_000, 77_200))
KEPT = list(range(5_000, 5_200))


@pytest.fixture
def sessions(index: Index) -> Iterator[tuple[str, str]]:
    """Sessions of the conversation to be purged and of the one to be kept."""
    kept = save(index, KEPT, client="kept-client", title="kept title").session
    yield save(index, CANARY, client="canary-client", title="canary title").session, kept


def make_record(number: int, session: str = "", root: bytes = ROOT, at: float = 1e9) -> RequestRecord:
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


def find_files_with(home: Home, wanted: bytes) -> list[Path]:
    """Find files in a home, of any index generation, with these bytes."""
    return [path for path in home.root.rglob("*") if path.is_file() and wanted in path.read_bytes()]


@pytest.mark.parametrize("everything", [False, True])
def test_purge_leaves_no_bytes_in_home(index: Index, sessions: tuple[str, str], everything: bool) -> None:
    session, _ = sessions
    tokens = pack_tokens(CANARY[-20:])
    index.record_turn(make_turn(7, session=session, tokens=tokens))
    index.record_request(make_record(1, session))
    index.flush()
    save(index, [*CANARY[:150], 1, 2, 3])  # a branch, then evicted: its removal reason has a token
    index.quarantine(index.sessions()[0].leaf, "checksum")
    assert len(find_files_with(index.home, tokens)) >= 2
    purge(index, PurgeRequest(everything=True) if everything else PurgeRequest(session=session))
    for left in (tokens, pack_tokens(CANARY[:20]), b"canary-client", b"canary title", session.encode()):
        if everything or left != pack_tokens(CANARY[:20]):
            assert find_files_with(index.home, left) == []
    assert everything or find_files_with(index.home, pack_tokens(KEPT[-20:]))


def test_remove_sampled_turns_removes_late_turn_alone(index: Index, sessions: tuple[str, str]) -> None:
    late, other = make_turn(91, 92), make_turn(93)
    index.record_turn(late)
    index.record_turn(other)
    remove_sampled_turns(index, [(late.root, late.calls[0])])
    index.compact()
    assert index.turns(ROOT, [late.calls[0], other.calls[0]]) == [other]


def test_start_without_titles_removes_all_texts(index: Index, sessions: tuple[str, str]) -> None:
    divergence = Divergence(at=3, begins=0, stored=b"", prompt=b"", stored_text="it was", prompt_text="it is now")
    index.record_request(msgspec.structs.replace(make_record(1, sessions[0]), parting=divergence))
    index.flush()
    assert save(index, [*KEPT, 9], title="another").session == sessions[1]
    assert {row.title for row in index.sessions()} == {"canary title", "kept title"}
    texts = (b"canary title", b"kept title", b"it was", b"it is now")
    assert all(find_files_with(index.home, text) for text in texts)
    index.keeps_texts = False
    report = reconcile(index)
    assert (report.texts_removed, report.purges_ended) == (3, 1)
    assert not any(find_files_with(index.home, text) for text in texts)
    assert {row.client for row in index.sessions()} == {"canary-client", "kept-client"}
    assert reconcile(index) == ReconcileReport()


def test_next_start_completes_purge_killed_before_compaction(
    index: Index, sessions: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise IndexStoreError("no space left")

    monkeypatch.setattr(index, "compact", full)
    with pytest.raises(IndexStoreError, match="no space"):
        purge(index, PurgeRequest(session=sessions[0]))
    assert find_files_with(index.home, pack_tokens(CANARY[-20:])) != []
    assert reconcile(index).purges_ended == 0, "the failure persists, and the start succeeds"
    monkeypatch.undo()
    assert reconcile(index).purges_ended == 1
    assert find_files_with(index.home, pack_tokens(CANARY[-20:])) == []
    assert reconcile(index) == ReconcileReport()


def test_purge_removes_quarantined_files_of_its_model(index: Index, sessions: tuple[str, str]) -> None:
    session, kept = sessions
    before = {row.id for row in index.segments()}
    save(index, [*CANARY, *range(9)], may_replace=False)
    (leaf,) = {row.id for row in index.segments()} - before
    index.quarantine(leaf, "checksum")
    preview = purge(index, PurgeRequest(session=session, dry_run=True))
    assert preview.quarantined == [leaf]
    assert purge(index, PurgeRequest(session=session)).quarantined == [leaf]
    assert find_files_with(index.home, pack_tokens(CANARY[-20:])) == [] and index.quarantined() == []
    assert [each.id for each in index.sessions()] == [kept]


def test_purge_of_model_removes_its_records(index: Index, sessions: tuple[str, str]) -> None:
    for number, (session, root) in enumerate([(sessions[0], ROOT), ("", ROOT), ("", b"another model's r"), ("", b"")]):
        index.record_request(make_record(number, session, root))
    purge(index, PurgeRequest(model=MODEL))
    assert [each.id for each in index.requests()] == ["r3", "r2"]


def test_purge_by_age_removes_records_without_recent_session(index: Index, sessions: tuple[str, str]) -> None:
    _, kept = sessions
    for number, (of, at) in enumerate([(kept, 1.0), ("", 1.0), ("gone before", 1.0), ("", 4e9)]):
        index.record_request(make_record(number, of, at=at))
    purge(index, PurgeRequest(older_than_s=3600.0))
    assert [each.id for each in index.requests()] == ["r3", "r0"], "a recently used session keeps its records"


def test_purge_removes_turns_without_session(index: Index, sessions: tuple[str, str]) -> None:
    session, kept = sessions
    for number, of in ((1, session), (2, ""), (3, kept)):
        index.record_turn(make_turn(number, session=of))
    purge(index, PurgeRequest(session=session))
    calls = [f"call_{number:024x}" for number in (1, 2, 3)]
    assert [row.session for row in index.turns(ROOT, calls)] == [kept]


@pytest.mark.parametrize(
    ("saved", "saved_turn_end", "response"),
    [
        (CANARY, 190, make_prompted_response("r", CANARY[:195], 190)),  # of the turn that was saved last
        (CANARY, 0, make_prompted_response("r", CANARY[:195], 190)),  # the same, of which no turn's end was known
        (CANARY[:128], 0, make_prompted_response("r", CANARY[:195], 190)),  # the same, cut to the grid
        (CANARY, 190, make_prompted_response("r", [*CANARY, *range(50)], 245)),  # of a later turn, not saved
        (CANARY, 190, make_prompted_response("r", CANARY[:60], 50)),  # of an earlier turn, not saved
        (CANARY, 190, make_prompted_response("r", CANARY[:60], 50, session="evicted", tokens=b"")),
    ],
)
def test_purge_of_conversation_removes_responses_whose_saves_were_killed(
    index: Index, saved: list[int], saved_turn_end: int, response: ResponseEntry
) -> None:
    session = save(index, saved, turn_end=saved_turn_end).session
    index.record_response(response)
    index.flush()
    purge(index, PurgeRequest(session=save(index, KEPT).session))
    assert preview_purge(index, PurgeRequest(session=session)).responses == len(index.responses()) == 1
    assert purge(index, PurgeRequest(session=session)).responses == 1 and index.responses() == []
    assert find_files_with(index.home, pack_tokens(CANARY[40:50])) == []


def test_purge_of_conversation_keeps_responses_of_others(index: Index, sessions: tuple[str, str]) -> None:
    """Also those of no stored conversation, and those that only begin alike."""
    session, kept = sessions
    branch = [*CANARY[:150], *range(50)]
    for response in (
        make_prompted_response("kept", KEPT, 190),
        make_prompted_response("same prompt", CANARY[:195], 190, session=kept, tokens=b""),
        make_prompted_response("branch", branch, 190),
        make_prompted_response("never saved", range(300), 290),
        make_prompted_response("another model's", CANARY, 190, root=namespace("model-b")),
        make_response("of an older version"),
    ):
        index.record_response(response)
    index.flush()
    assert purge(index, PurgeRequest(session=session)).responses == 0 and len(index.responses()) == 6


def test_purge_of_conversation_drops_unwritten_responses(index: Index, sessions: tuple[str, str]) -> None:
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(index._write_behind, "flush", lambda write: False)
        index.record_response(make_prompted_response("r", CANARY[:195], 190))
        index.record_response(make_prompted_response("kept", KEPT, 190))
        purge(index, PurgeRequest(session=sessions[0]))
        assert index.find_response("", "r") is None and index.find_response("", "kept")
    index.flush()


@pytest.mark.parametrize(
    "how", [{"older_than_s": 60.0}, {"model": MODEL}, {"roots": [ROOT.hex()]}, {"everything": True}]
)
def test_other_purges_remove_responses_whose_saves_were_killed(
    index: Index, sessions: tuple[str, str], how: dict[str, Any]
) -> None:
    for name, ids in (("saved", CANARY), ("never saved", range(300))):
        index.record_response(make_prompted_response(name, ids, 190, at=time.time() - 3600.0))
    assert purge(index, PurgeRequest(**how)).responses == 2 and index.responses() == []


def test_purge_of_model_aborts_its_saves(index: Index, sessions: tuple[str, str]) -> None:
    assert begin_save(index, [1, 2, 3]) is not None
    purge(index, PurgeRequest(model="another"))
    assert index.totals().bytes_writing > 0
    purge(index, PurgeRequest(model=MODEL))
    assert index.totals().bytes_writing == 0


def test_purge_of_roots_removes_one_key_alone(index: Index, sessions: tuple[str, str]) -> None:
    """Segments of any model, quarantined files, saves under way, sampled turns, and records."""
    own_roots = [namespace(model, "mine") for model in ("model-a", "model-b")]
    for root in own_roots:
        plan = begin_save(index, CANARY, root=root)
        assert plan is not None
        commit_save(index, plan, client="mine")
        index.record_turn(make_turn(int(root == own_roots[0]), root=root))
        index.record_request(make_record(1, root=root))
    assert begin_save(index, [*CANARY, 1], root=own_roots[0]) is not None
    other_turn = make_turn(3)
    index.record_turn(other_turn)
    index.record_request(make_record(2))
    save(index, [9] * 40)
    index.quarantine(next(row.id for row in index.segments() if row.root == ROOT and row.end == 40), "checksum")
    reply = purge(index, PurgeRequest(roots=[root.hex() for root in own_roots]))
    assert (len(reply.sessions), len(reply.segments), len(reply.quarantined)) == (2, 2, 1)
    assert {row.root for row in index.segments()} == {ROOT} and {row.id for row in index.sessions()} == set(sessions)
    assert index.totals().bytes_writing == 0 and index.quarantined() == []
    assert [each.id for each in index.requests()] == ["r2"]
    assert index.turns(ROOT, other_turn.calls) == [other_turn]
    assert [index.turns(root, [f"call_{number:024x}" for number in (0, 1)]) for root in own_roots] == [[], []]
    assert find_files_with(index.home, b"mine") == [] and find_files_with(index.home, pack_tokens(CANARY[-20:])) != []
