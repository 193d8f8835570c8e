"""Stored responses in the index: found by their owner alone, bounded, deleted, purged, repaired after damage."""

import time
import zlib

import pytest

from support.index.indexes import BUDGET, MODEL, ROOT, make_response, save
from warmline_common.protocol.tokens import namespace
from warmline_common.storage.home import Home
from warmline_proxy.index.index import Index, IndexReader
from warmline_proxy.index.recovery.repair import repair
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.index.responses import DAY_S, MB, FoundResponse, ResponseEntry, ResponseLimits, count_bytes, id_key
from warmline_proxy.retention.gc import collect_garbage
from warmline_proxy.retention.purge import preview_purge, purge
from warmline_proxy.store.errors import IndexFullError
from warmline_proxy.store.rows import GcRequest, PurgeRequest
from warmline_proxy.store.tables import Tables, encode_number


def record(index: Index, *entries: ResponseEntry) -> None:
    for entry in entries:
        index.record_response(entry)
    index.flush()


def list_ids(index: IndexReader) -> list[str]:
    return [row.id for row in index.responses()]


def read_text(found: FoundResponse | None) -> str:
    """Body of a response; "" where there is none, or a damaged one."""
    body = found.read_body() if found else None
    try:
        return (zlib.decompress(body.data) if body.coding == "deflate" else body.data).decode() if body else ""
    except zlib.error:
        return ""


def test_response_is_found_by_its_owner_alone(index: Index) -> None:
    record(
        index, make_response("a"), make_response("b", owner="laptop"), make_response("a", owner="laptop", body="other")
    )
    assert read_text(index.find_response("", "a")) == "text of a"
    assert read_text(index.find_response("laptop", "a")) == "other"
    assert index.find_response("", "b") is None and index.find_response_holder("", "b") is None
    assert index.find_response("desk", "a") is None


def read_holders(index: Index, *items: str) -> dict[str, str]:
    """Read the text of the response in which each of these items, or of all, is found; those not found are left out."""
    found = {item: read_text(index.find_response_holder("", item)) for item in items or ("a", "b", "c", "x")}
    return {item: text.removeprefix("text of ") for item, text in found.items() if text}


def test_item_is_found_in_the_newest_response_that_has_it(index: Index) -> None:
    record(index, make_response("a"), make_response("b", "a"), make_response("c", "b", "a", "x"))
    assert read_holders(index) == {"a": "c", "b": "c", "c": "c", "x": "c"}
    assert index.find_response("", "x") is None, "an item's id is no response's"
    assert index.delete_response("", "c")
    assert read_holders(index) == {"a": "b", "b": "b"}
    assert read_text(index.find_response("", "a")) == "text of a", "other responses stay as they are"
    assert verify_index(index, deep=True) == []


@pytest.mark.parametrize("is_repaired", [False, True])
@pytest.mark.parametrize("order", ["abcd", "acbd", "bdac", "cadb", "dbca", "dcba"])
def test_item_is_found_as_long_as_any_response_has_it(index: Index, order: str, is_repaired: bool) -> None:
    """`d` has only a part of the conversation before it."""
    items = {"a": "a", "b": "ab", "c": "abc", "d": "bd"}
    record(index, *(make_response(name, *having) for name, having in items.items()))
    for name in order:
        assert index.delete_response("", name)
        del items[name]
        if is_repaired:
            index.transact(lose_holders)
            repair(index, deep=True, is_saving=False)
        newest = {item: response for response, having in items.items() for item in having}
        assert read_holders(index, *"abcd") == newest
    assert index.totals().bytes_responses == 0 and verify_index(index, deep=True) == []


def test_item_of_evicted_response_is_found_in_a_later_one(home: Home) -> None:
    size = count_bytes(make_response("b", "a").row) + 30
    with Index(home, BUDGET, response_limits=ResponseLimits(DAY_S, 2 * size)) as index:
        record(index, make_response("a"), make_response("b", "a"), make_response("c"))
        assert list_ids(index) == ["b", "c"] and read_holders(index) == {"a": "b", "b": "b", "c": "c"}
        record(index, make_response("b", body="again, without it"))
        assert read_holders(index) == {"b": "again, without it", "c": "c"}


def test_items_are_of_one_owner(index: Index) -> None:
    record(index, make_response("a", "x"), make_response("b", "x", owner="laptop"))
    assert index.delete_response("", "a") and index.find_response_holder("", "x") is None
    assert read_text(index.find_response_holder("laptop", "x")) == "text of b"


def test_latest_items_of_a_response_are_found(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmline_proxy.index.responses.ITEMS_MAX", 2)
    record(index, make_response("a", "x"), make_response("b", "x", "a", "a"))
    assert read_holders(index) == {"a": "b", "b": "b", "x": "a"}


def test_response_of_repeated_id_replaces_the_first(index: Index) -> None:
    record(index, make_response("a", body="first"))
    record(index, make_response("a", body="second"))
    assert read_text(index.find_response("", "a")) == "second" and list_ids(index) == ["a"]


def test_responses_survive_restart(home: Home) -> None:
    with Index(home, BUDGET) as index:
        index.record_response(make_response("a", session=""))
        index.record_response_session("", "a", "123456789abc")
    with Index(home, BUDGET) as index:
        entry = index.find_response("", "a")
        assert entry and entry.row.session == "123456789abc" and read_text(entry) == "text of a"


def test_deletion_is_of_one_owner(index: Index) -> None:
    record(index, make_response("a"), make_response("a", owner="laptop"))
    assert not index.delete_response("desk", "a")
    assert index.delete_response("", "a") and not index.delete_response("", "a")
    assert index.find_response("laptop", "a")


# ---- limits


@pytest.mark.parametrize(
    ("days", "megabytes", "budget", "expected"),
    [
        (30.0, 256.0, 50 * 10**9, ResponseLimits()),
        (1.0, 256.0, 10**9, ResponseLimits(DAY_S, 100 * MB)),
        (0.5, 0.5, 10**9, ResponseLimits(DAY_S / 2, MB // 2)),
    ],
)
def test_limits_of_settings(days: float, megabytes: float, budget: int, expected: ResponseLimits) -> None:
    assert ResponseLimits.from_settings(days, megabytes, budget) == expected and not expected.is_off


@pytest.mark.parametrize("values", [(0.0, 256.0, BUDGET), (30.0, 0.0, BUDGET), (30.0, 256.0, 0)])
def test_limit_of_0_is_off(values: tuple[float, float, int]) -> None:
    assert ResponseLimits.from_settings(*values).is_off


def test_oldest_responses_are_evicted_first(home: Home) -> None:
    size = count_bytes(make_response("a").row) + 30
    with Index(home, BUDGET, response_limits=ResponseLimits(DAY_S, 3 * size)) as index:
        record(index, *(make_response(name) for name in "abcde"))
        assert list_ids(index) == ["c", "d", "e"]
        record(index, make_response("f", body="".join(map(chr, range(256, 4096)))))
        assert list_ids(index) == ["c", "d", "e"], "one that is larger than all may be takes no other's place"
        assert verify_index(index) == []


def test_old_responses_are_not_found_and_evicted_by_time(home: Home) -> None:
    with Index(home, BUDGET, response_limits=ResponseLimits()) as index:
        record(index, make_response("old", at=0.0, owner="laptop"))
        assert list_ids(index) == []
    with Index(home, BUDGET, response_limits=ResponseLimits(1e12)) as index:
        record(index, make_response("old", at=1.0), make_response("new"))
        assert index.find_response("", "old")
    with Index(home, BUDGET) as index:
        assert index.find_response("", "old") is None and index.find_response_holder("", "old") is None
        assert collect_garbage(index, GcRequest(), is_saving=False).responses == 1
        assert list_ids(index) == ["new"]


def test_switching_off_evicts_all(home: Home) -> None:
    with Index(home, BUDGET) as index:
        record(index, make_response("a"), make_response("b"))
    with Index(home, BUDGET, response_limits=ResponseLimits(0.0)) as index:
        assert index.evict_responses() == 2 and list_ids(index) == [] and index.totals().bytes_responses == 0


# ---- responses that are not written yet


def fail_writes(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(change: object) -> None:
        raise IndexFullError("the disk is full")

    monkeypatch.setattr(index._environment, "write", fail)
    index.on_flush = lambda error: None


def test_unwritten_response_is_found_and_written_later(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        fail_writes(index, broken)
        record(index, make_response("a"), make_response("b", "a"))
        assert read_text(index.find_response("", "a")) == "text of a" and list_ids(index) == []
        assert read_text(index.find_response_holder("", "a")) == "text of b"
        assert index.find_response("laptop", "a") is None
        assert index.delete_response("", "b") and not index.delete_response("", "b")
    index.flush()
    assert list_ids(index) == ["a"]


def test_response_is_found_while_home_is_read_only(index: Index) -> None:
    index.read_only = "the home can't be written to"
    record(index, make_response("a"))
    assert read_text(index.find_response("", "a")) == "text of a" and list_ids(index) == []
    index.read_only = ""
    index.flush()
    assert list_ids(index) == ["a"]


def test_unwritten_responses_are_bounded(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmline_proxy.index.write_behind.RESPONSE_BYTES_MAX", 25)
    with monkeypatch.context() as broken:
        fail_writes(index, broken)
        record(index, make_response("a"), make_response("b"), make_response("c"))
        assert [bool(index.find_response("", each)) for each in "abc"] == [False, True, True]
    index.flush()


def test_purge_drops_unwritten_responses(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(index._write_behind, "flush", lambda write: False)
        record(index, make_response("a"), make_response("b", model="other"))
        purge(index, PurgeRequest(model=MODEL))
        assert index.find_response("", "a") is None and index.find_response("", "b")
    index.flush()
    assert list_ids(index) == ["b"]


# ---- purges


@pytest.mark.parametrize(
    ("request_", "left"),
    [
        (PurgeRequest(everything=True), []),
        (PurgeRequest(model="other"), ["a", "b", "shared"]),
        (PurgeRequest(roots=[namespace(MODEL, "laptop").hex()]), ["a", "other"]),
        (PurgeRequest(roots=[ROOT.hex()]), ["b", "other"]),
        (PurgeRequest(older_than_s=60.0), ["b", "other", "shared"]),
    ],
)
def test_purge_removes_responses(index: Index, request_: PurgeRequest, left: list[str]) -> None:
    record(
        index,
        make_response("a", at=time.time() - 3600.0),
        make_response("b", owner="laptop"),
        make_response("other", model="other", fingerprint="other", root=namespace("other")),
        make_response("shared", owner="laptop", root=ROOT),
    )
    expected = 4 - len(left)
    assert preview_purge(index, request_).responses == expected
    assert purge(index, request_).responses == expected and list_ids(index) == left


def test_purge_of_session_removes_its_responses_without_trace(home: Home) -> None:
    with Index(home, BUDGET) as index:
        save(index, range(100))
        (session,) = index.sessions()
        record(index, make_response("a", session=session.id, body="a secret"), make_response("b", session="another"))
        record(index, make_response("c"))
        purge(index, PurgeRequest(session=session.id))
        assert list_ids(index) == ["b", "c"] and verify_index(index, deep=True) == []
        assert not any(session.id.encode() in path.read_bytes() for path in home.index.rglob("data.mdb"))


def test_old_response_stays_with_its_conversation(home: Home) -> None:
    with Index(home, BUDGET, response_limits=ResponseLimits(1e12)) as index:
        save(index, range(100))
        (session,) = index.sessions()
        record(index, make_response("a", at=1.0, session=session.id), make_response("b", at=1.0, session="evicted"))
        purge(index, PurgeRequest(older_than_s=60.0))
        assert list_ids(index) == ["a"]


def test_fingerprints_name_roots_of_owners_and_of_shared_cache(index: Index) -> None:
    record(index, make_response("a", owner="laptop", root=ROOT))
    assert index.response_fingerprints() == {ROOT: MODEL, namespace(MODEL, "laptop"): MODEL}


# ---- damage


def lose_body(tables: Tables) -> None:
    tables.delete("response_bodies", encode_number(1))


def flip_bit(tables: Tables) -> None:
    body = bytearray(tables.get("response_bodies", encode_number(1)) or b"")
    body[-1] ^= 1
    tables.put("response_bodies", encode_number(1), bytes(body))


def lose_row(tables: Tables) -> None:
    tables.delete("responses", encode_number(1))


def lose_id(tables: Tables) -> None:
    tables.delete("response_ids", id_key("", "a"))


def lose_holders(tables: Tables) -> None:
    for key, _ in list(tables.items("holders")):
        tables.delete("holders", key)


def duplicate_response(tables: Tables) -> None:
    for table in ("responses", "response_bodies"):
        tables.put(table, encode_number(9), tables.get(table, encode_number(1)) or b"")


def misdirect_item(tables: Tables) -> None:
    tables.put("holders", id_key("", "a") + encode_number(7), b"")


@pytest.mark.parametrize(
    ("damage", "is_lost"),
    [
        (lose_body, True),
        (flip_bit, True),
        (lose_row, True),
        (lose_id, False),
        (duplicate_response, False),
        (lose_holders, False),
        (misdirect_item, False),
    ],
)
def test_damaged_responses_are_found_and_repaired(index: Index, damage: object, is_lost: bool) -> None:
    record(index, make_response("a"), make_response("b"))
    index.transact(damage)  # type: ignore[arg-type]
    assert "response" in {finding.what for finding in verify_index(index, deep=True)}
    assert repair(index, deep=True, is_saving=False).did
    assert verify_index(index, deep=True) == []
    assert read_text(index.find_response("", "a")) == ("" if is_lost else "text of a")
    assert read_text(index.find_response("", "b")) == "text of b"


def test_repair_of_sound_index_changes_no_response(index: Index) -> None:
    record(index, make_response("a"), make_response("b", "a"))
    assert repair(index, deep=True, is_saving=False).did == []
    assert read_text(index.find_response_holder("", "a")) == "text of b"
