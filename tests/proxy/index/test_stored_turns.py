"""Sampled turns in the index: found by their calls, bounded, repaired after damage, and purged."""

import lmdb
import pytest

from support.index.indexes import BUDGET, MODEL, ROOT, make_turn, save
from warmline_common.protocol.messages import SampledTurn
from warmline_common.protocol.tokens import namespace, pack_tokens
from warmline_common.storage.home import Home
from warmline_proxy.index import turns as index_turns
from warmline_proxy.index.index import Index, IndexReader
from warmline_proxy.index.recovery.repair import repair
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.pipeline.sampled_turns import SampledTurnCache
from warmline_proxy.retention.purge import purge
from warmline_proxy.store.rows import PurgeRequest, TurnRow
from warmline_proxy.store.tables import TABLES_ADDED, Tables, encode_number

OTHER = namespace("model-b")
FINGERPRINT, TENANT = "f", "somebody"


def make_call_ids(*calls: int) -> list[str]:
    return [f"call_{call:024x}" for call in calls]


def list_turns(index: Index, *calls: int, root: bytes = ROOT) -> list[list[str]]:
    return [row.calls for row in index.turns(root, make_call_ids(*calls))]


def record_turn(index: Index, *rows: TurnRow) -> None:
    for row in rows:
        index.record_turn(row)
    index.flush()


def test_turn_is_found_by_any_call_id(index: Index) -> None:
    record_turn(index, make_turn(1, 2), make_turn(3))
    assert list_turns(index, 2) == [make_call_ids(1, 2)]
    assert list_turns(index, 1, 2, 9, 3) == [make_call_ids(1, 2), make_call_ids(3)]
    assert list_turns(index, 1, root=OTHER) == [], "another model's, or somebody else's"
    assert verify_index(index) == []


def test_repeated_turn_replaces_stored_one(index: Index) -> None:
    record_turn(index, make_turn(1, 2), make_turn(3))
    record_turn(index, make_turn(1, 2, session="abc"))
    assert [(row.calls, row.session) for row in list_rows(index)] == [
        (make_call_ids(1, 2), "abc"),
        (make_call_ids(3), ""),
    ]
    assert index.totals().turns == 2 and index.totals().bytes_turns == 12
    assert verify_index(index) == []


def list_rows(index: Index) -> list[TurnRow]:
    return index.transact(lambda tables: [row for _, row in index_turns.list_turns(tables)])


@pytest.mark.parametrize(("limit", "value"), [("TURNS_MAX", 2), ("TURN_BYTES_MAX", 16)])
def test_oldest_turns_are_removed_first(index: Index, monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(index_turns, limit, value)
    record_turn(index, make_turn(1, 2), make_turn(3, 4))
    record_turn(index, make_turn(5, 6))
    assert list_turns(index, 1, 2) == [] and list_turns(index, 3, 5) == [make_call_ids(3, 4), make_call_ids(5, 6)]
    assert verify_index(index) == []


def test_turns_survive_restart(home: Home) -> None:
    with Index(home, BUDGET) as index:
        index.record_turn(make_turn(1))
    with IndexReader(home) as reader:
        assert [row.tokens for row in reader.turns(ROOT, make_call_ids(1))] == [pack_tokens([1])]


@pytest.mark.parametrize(
    ("request_", "left"),
    [
        (PurgeRequest(everything=True), []),
        (PurgeRequest(model=MODEL), [5]),
        (PurgeRequest(model="other"), [1, 2, 3]),
        (PurgeRequest(older_than_s=60.0), [3]),
    ],
)
def test_purged_turns_are_deleted(index: Index, request_: PurgeRequest, left: list[int]) -> None:
    save(index, range(100))
    record_turn(index, make_turn(1), make_turn(2), make_turn(3, at=1e12), make_turn(5, model="other"))
    purge(index, request_)
    assert [row.calls[0] for row in list_rows(index)] == make_call_ids(*left)
    assert verify_index(index, deep=True) == []


def test_old_turn_stays_with_conversation(index: Index) -> None:
    """Without it the rest of the conversation would be rendered otherwise, and computed anew."""
    save(index, range(100))
    (session,) = index.sessions()
    record_turn(index, make_turn(1, session=session.id), make_turn(2, session="evicted"))
    purge(index, PurgeRequest(older_than_s=60.0))
    assert [row.calls for row in list_rows(index)] == [make_call_ids(1)]


def test_purge_deletes_turns_without_trace(home: Home) -> None:
    secret = pack_tokens(list(range(70_000, 70_040)))
    with Index(home, BUDGET) as index:
        save(index, range(100))
        (session,) = index.sessions()
        record_turn(index, make_turn(1, session=session.id, tokens=secret), make_turn(2, session="another"))
        assert any(secret in path.read_bytes() for path in home.index.rglob("data.mdb"))
        purge(index, PurgeRequest(session=session.id))
        assert list_turns(index, 1, 2) == [make_call_ids(2)]
        assert not any(secret in path.read_bytes() for path in home.index.rglob("data.mdb"))


def remove_call(tables: Tables) -> None:
    tables.delete("calls", index_turns.call_key(ROOT, make_call_ids(1)[0]))


def misdirect_call(tables: Tables) -> None:
    tables.put("calls", index_turns.call_key(ROOT, make_call_ids(1)[0]), encode_number(2))


def lose_turn(tables: Tables) -> None:
    tables.delete("turns", encode_number(1))


def duplicate_turn(tables: Tables) -> None:
    tables.put("turns", encode_number(9), tables.get("turns", encode_number(1)) or b"")


@pytest.mark.parametrize("damage", [remove_call, misdirect_call, lose_turn, duplicate_turn])
def test_damaged_turns_are_found_and_repaired(index: Index, damage: object) -> None:
    record_turn(index, make_turn(1, 2), make_turn(3))
    index.transact(damage)  # type: ignore[arg-type]
    assert "turn" in {finding.what for finding in verify_index(index)}
    assert repair(index, deep=True, is_saving=False).did
    assert verify_index(index) == [] and list_turns(index, 3) == [make_call_ids(3)]
    assert list_turns(index, 1) == ([] if damage is lose_turn else [make_call_ids(1, 2)])


def test_index_without_turns_table_is_read(home: Home) -> None:
    with Index(home, BUDGET) as index:
        save(index, range(100))
    (folder,) = home.index.iterdir()
    env = lmdb.open(str(folder), max_dbs=20)
    with env.begin(write=True) as txn:
        for name in TABLES_ADDED:
            txn.drop(env.open_db(name.encode(), txn))
    env.close()
    with IndexReader(home) as reader:
        assert reader.turns(ROOT, make_call_ids(1)) == [] and verify_index(reader) == []
    with Index(home, BUDGET) as index:
        record_turn(index, make_turn(1))
        assert list_turns(index, 1) == [make_call_ids(1)]


# ---- the proxy's memory of them


def make_sampled_turn(*calls: int) -> SampledTurn:
    return SampledTurn(calls=make_call_ids(*calls), tokens=pack_tokens(list(calls)))


def make_messages(*calls: int) -> list[dict[str, object]]:
    """Make the messages that come back: each call, and its result."""
    return [{"tool_calls": [{"id": call_id}], "tool_call_id": call_id} for call_id in make_call_ids(*calls)]


def test_turn_is_available_at_once_and_after_restart(home: Home) -> None:
    root = namespace(FINGERPRINT, TENANT)
    with Index(home, BUDGET) as index:
        memory = SampledTurnCache(index)
        memory.add(root, MODEL, make_sampled_turn(1, 2))
        assert memory.find(root, make_messages(2, 1, 7)) == [make_sampled_turn(1, 2)]
    with Index(home, BUDGET) as index:
        memory = SampledTurnCache(index)
        assert memory.find(root, make_messages(1)) == [make_sampled_turn(1, 2)]
        assert memory.find(namespace("another model", TENANT), make_messages(1)) == []
        assert memory.find(namespace(FINGERPRINT, "somebody else"), make_messages(1)) == []
        purge(index, PurgeRequest(everything=True))
        memory.clear()
        assert memory.find(root, make_messages(1)) == []


def test_oversized_or_invalid_turns_are_not_stored(index: Index) -> None:
    memory, root = SampledTurnCache(index), namespace(FINGERPRINT, TENANT)
    memory.add(root, MODEL, SampledTurn(calls=make_call_ids(1), tokens=bytes(2 << 20)))
    memory.add(root, MODEL, SampledTurn(calls=["functions.look:0"], tokens=b""))
    memory.add(root, MODEL, SampledTurn(calls=[], tokens=b""))
    assert memory.find(root, make_messages(1)) == [] and memory.find(root, None) == []


def test_turn_cache_is_bounded_and_falls_back_to_index(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmline_proxy.pipeline.sampled_turns.TURNS_MAX", 2)
    memory, root = SampledTurnCache(index), namespace(FINGERPRINT, TENANT)
    for call in range(4):
        memory.add(root, MODEL, make_sampled_turn(call))
    assert memory.find(root, make_messages(0, 1, 2, 3)) == [make_sampled_turn(2), make_sampled_turn(3)], (
        "nothing is written yet"
    )
    index.flush()
    recalled = memory.find(root, make_messages(0, 1, 2, 3))
    assert sorted(turn.calls for turn in recalled) == [make_call_ids(call) for call in range(4)]
