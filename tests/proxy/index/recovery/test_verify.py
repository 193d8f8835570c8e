"""Invariants: each damage alone is found under its name, and a repair fixes it."""

import os
from collections.abc import Callable

import msgspec
import pytest

from support.index.indexes import ROOT, count_matched, make_response, make_turn, save
from support.index.segment_files import rewrite_meta
from warmline_common.protocol.tokens import pack_tokens
from warmline_common.storage.segment_file import file_checksum, read_checksums
from warmline_proxy.home_lock import home_lock
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.repair import repair
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.store.rows import QuarantineRow, RequestRecord, SegmentRow, SessionRow
from warmline_proxy.store.tables import DIGEST_KEY, INCOMPLETE_KEY, TABLES, Tables, encode_child_key

A = list(range(1000, 3000))
WHOLE = [*A[:1500], 7, 7, 7]


@pytest.fixture
def saved_conversations(index: Index) -> Index:
    """Index with a root and its state, a child that diverges in it, one at its end, a quarantined file, a request."""
    save(index, A[:1400], checkpoints=[700], turn_end=1390, client="first")
    save(index, [*A[:1200], 5, 5, 5], turn_end=1201, client="second", may_replace=False)
    save(index, [*A[:1400], *WHOLE[1400:]], turn_end=1450, client="first", may_replace=False)
    save(index, [9] * 70)
    index.quarantine(index.match_prefix(ROOT, pack_tokens([9]), 1).chain[0].id, "checksum")
    index.record_use(ref.id for ref in index.match_prefix(ROOT, pack_tokens(WHOLE), 1503).chain)
    index.record_turn(make_turn(1, 2))
    index.record_response(make_response("r1"))
    index.record_request(RequestRecord(id="r", at=1.0, endpoint="chat", client_model="m", outcome="ok", source="cold"))
    index.flush()
    return index


def find_path(index: Index) -> list[SegmentRow]:
    return [row for ref in index.match_prefix(ROOT, pack_tokens(WHOLE), 1503).chain if (row := index.segment(ref.id))]


def encode_id(row: SegmentRow) -> bytes:
    return bytes.fromhex(row.id)


def damage_tables(change: Callable[[Tables, SegmentRow, SegmentRow], object]) -> Callable[[Index], None]:
    """Make damage of the tables; `change` gets the tables, the root segment and the leaf below it."""

    def damage(index: Index) -> None:
        root, leaf = find_path(index)
        index.transact(lambda tables: change(tables, root, leaf))

    return damage


def damage_session(**changed: object) -> Callable[[Index], None]:
    def damage(index: Index) -> None:
        row = next(row for row in index.sessions() if row.client == "first")
        index.transact(lambda tables: tables.put_session(msgspec.structs.replace(row, **changed)))

    return damage


def move_session_turn(index: Index) -> None:
    """Move a session's turn to a segment that is not on its path."""
    first, second = sorted(index.sessions(), key=lambda row: row.client)
    damage_session(turn_segment=second.leaf, turn_end=1202)(index)
    assert first.leaf != second.leaf


def damage_file(change: Callable[[Index, SegmentRow], object]) -> Callable[[Index], None]:
    """Make damage of a file; `change` gets the index and the leaf."""
    return lambda index: change(index, find_path(index)[1]) and None


def write_at_other_place(index: Index, leaf: SegmentRow) -> None:
    """Write a file that is valid and agrees with its row, but follows other tokens."""
    file = index.home.segment_file(leaf.id)
    rewrite_meta(file, prefix="ab" * 16)
    leaf.checksum = file_checksum(read_checksums(file))
    index.transact(lambda tables: tables.update_segment(leaf))


def flip_bit(index: Index, leaf: SegmentRow) -> None:
    file = index.home.segment_file(leaf.id)
    data = bytearray(file.read_bytes())
    data[-30] ^= 1
    file.write_bytes(data)


def get_quarantined(index: Index) -> QuarantineRow:
    (row,) = index.quarantined()
    return row


def damage_quarantined_size(index: Index) -> None:
    row = get_quarantined(index)

    def change(tables: Tables) -> None:
        tables.remove_quarantined(row)
        tables.insert_quarantined(msgspec.structs.replace(row, bytes_on_disk=1))

    index.transact(change)


def put_entry(table: str, name: bytes, value: bytes) -> Callable[[Index], None]:
    return lambda index: index.transact(lambda tables: tables.put(table, name, value))


def add_file(*parts: str) -> Callable[[Index], None]:
    def damage(index: Index) -> None:
        file = index.home.root.joinpath(*parts)
        file.parent.mkdir(0o700, exist_ok=True)
        file.touch(0o600)

    return damage


def encode_child(tables: Tables, row: SegmentRow) -> bytes:
    return encode_child_key(row.root, row.parent, row.start, tables.tokens(row.id)[:4])


OTHER = "cd" * 16
DAMAGES: dict[str, tuple[str, Callable[[Index], object]]] = {
    "tokens cut": ("tree", damage_tables(lambda t, r, leaf: t.put("tokens", encode_id(leaf), t.tokens(leaf.id)[:-4]))),
    "tokens of nothing": ("tree", put_entry("tokens", b"x" * 16, b"")),
    "a child forgotten": ("tree", damage_tables(lambda t, r, leaf: t.delete("children", encode_child(t, leaf)))),
    "a child too many": ("tree", put_entry("children", encode_child_key(ROOT, OTHER, 5, b"1234"), b"x" * 16)),
    "another parent": ("tree", damage_tables(lambda t, r, leaf: t.update_segment(replace_row(leaf, parent=leaf.id)))),
    "no parent": ("tree", damage_tables(lambda t, r, leaf: t.update_segment(replace_row(leaf, parent="")))),
    "a parent that is gone": (
        "tree",
        damage_tables(lambda t, r, leaf: t.update_segment(replace_row(leaf, parent=OTHER))),
    ),
    "another root": ("tree", damage_tables(lambda t, r, leaf: t.update_segment(replace_row(leaf, root=b"x" * 16)))),
    "gone, yet stored": ("tree", damage_tables(lambda t, r, leaf: t.put("gone", encode_child(t, leaf), b"evicted"))),
    "gone after nothing": ("tree", put_entry("gone", encode_child_key(ROOT, OTHER, 5, b"1234"), b"evicted")),
    "hashes of others": ("block", damage_tables(lambda t, r, leaf: t.put("hashes", encode_id(leaf), b"x" * 16))),
    "a block of another": (
        "block",
        damage_tables(lambda t, r, leaf: t.put("blocks", t.hashes(r.id)[3], encode_id(leaf))),
    ),
    "a block of nobody": ("block", put_entry("blocks", b"x" * 16, b"y" * 16)),
    "a state outside": ("checkpoint", damage_tables(lambda t, r, leaf: move_state(t, leaf.id))),
    "a state without a place": ("checkpoint", damage_tables(lambda t, r, leaf: t.delete("places", find_place(t)))),
    "a place too many": ("checkpoint", put_entry("places", b"x" * 24, b"y" * 16)),
    "a session that ends elsewhere": ("session", damage_session(tokens=1400)),
    "a session of another root": ("session", damage_session(root=b"x" * 16)),
    "a turn outside": ("session", damage_session(turn_end=1399)),
    "a turn in nothing": ("session", damage_session(turn_segment="")),
    "a turn with other tokens": ("session", damage_session(turn_digest=b"x" * 16)),
    "a turn on a branch": ("session", move_session_turn),
    "an anchor too many": ("session", put_entry("anchors", b"x" * 16 + b"0123456789ab", b"")),
    "an anchor lost": ("session", damage_tables(lambda t, r, leaf: t.delete("anchors", find_anchor(t, leaf)))),
    "usage of nothing": ("usage", put_entry("usage", b"x" * 16, msgspec.msgpack.encode({"hits": 1}))),
    "stored and doomed": ("standing", damage_tables(lambda t, r, leaf: t.mark_deleted(leaf.id, 5))),
    "a sum": ("sum", damage_tables(lambda t, r, leaf: t.add_to_sums(tokens=1))),
    "a file gone": ("missing", damage_file(lambda index, leaf: index.home.segment_file(leaf.id).unlink())),
    "a file cut": ("truncated", damage_file(lambda index, leaf: os.truncate(index.home.segment_file(leaf.id), 900))),
    "a file damaged": ("checksum", damage_file(flip_bit)),
    "another size": ("file", damage_tables(lambda t, r, leaf: resize_row(t, leaf))),
    "another checksum": ("file", damage_tables(lambda t, r, leaf: t.update_segment(replace_row(leaf, checksum="x")))),
    "another conversation's": ("place", damage_file(write_at_other_place)),
    "aside and gone": (
        "quarantine",
        lambda index: (index.home.segments / "quarantine" / get_quarantined_name(index)).unlink(),
    ),
    "aside, of another size": ("quarantine", damage_quarantined_size),
    "a file of nobody": ("orphan", add_file("segments", "ab", f"{'ab' * 16}.safetensors")),
    "a draft": ("orphan", add_file("segments", "ab", ".x.tmp")),
    "a file beside": ("orphan", add_file("segments", "x")),
    "a file of nobody aside": ("orphan", add_file("segments", "quarantine", "x")),
    "a draft of the index": ("orphan", add_file("index", ".2.tmp", "data.mdb")),
    "a file for all to read": ("mode", damage_file(lambda index, leaf: index.home.segment_file(leaf.id).chmod(0o640))),
    "a folder for all to see": ("mode", lambda index: index.home.segments.chmod(0o755)),
    "a secret for all to read": (
        "mode",
        lambda index: (index.home.load_secret(), (index.home.root / "secret").chmod(0o644)),
    ),
}


def replace_row(row: SegmentRow, **changed: object) -> SegmentRow:
    return msgspec.structs.replace(row, **changed)


def resize_row(tables: Tables, row: SegmentRow) -> None:
    tables.update_segment(replace_row(row, bytes_on_disk=row.bytes_on_disk + 1))
    tables.add_to_sums(bytes_segments=1)


def move_state(tables: Tables, segment: str) -> None:
    (row,) = tables.checkpoints()
    tables.remove_checkpoint(row)
    tables.insert_checkpoint(msgspec.structs.replace(row, segment=segment))


def find_place(tables: Tables) -> bytes:
    ((place, _),) = tables.items("places")
    return place


def find_anchor(tables: Tables, row: SegmentRow) -> bytes:
    return next(found for found, _ in tables.items("anchors") if found.startswith(encode_id(row)))


def get_quarantined_name(index: Index) -> str:
    return f"{get_quarantined(index).id}.safetensors"


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_is_found_and_repaired(saved_conversations: Index, damage: str) -> None:
    assert verify_index(saved_conversations, deep=True) == []
    what, do = DAMAGES[damage]
    do(saved_conversations)
    assert what in {finding.what for finding in verify_index(saved_conversations, deep=True)}
    assert repair(saved_conversations, deep=True, is_saving=False).did
    assert verify_index(saved_conversations, deep=True) == []
    assert count_matched(saved_conversations, WHOLE) in (1503, 1400)


@pytest.mark.parametrize("table", [table for table in TABLES if table not in ("saves", "gone", "doomed")])
def test_unreadable_entry_is_found_in_every_table(saved_conversations: Index, table: str) -> None:
    def change(tables: Tables) -> None:
        entry = next(entry for entry, _ in tables.items(table) if entry not in (b"schema", DIGEST_KEY, INCOMPLETE_KEY))
        tables.put(table, entry, b"\xc1\xff\xff")

    saved_conversations.transact(change)
    assert {(finding.what, finding.detail.split(":")[0]) for finding in verify_index(saved_conversations)} == {
        ("entry", table)
    }
    assert repair(saved_conversations, deep=True, is_saving=False).did
    assert verify_index(saved_conversations, deep=True) == [] and count_matched(saved_conversations, WHOLE) == 1503


def test_running_compaction_is_no_orphan(saved_conversations: Index) -> None:
    draft = saved_conversations.home.index / ".2.tmp"
    draft.mkdir(0o700)
    with home_lock(saved_conversations.home, 0.0):
        assert verify_index(saved_conversations) == []
        os.utime(draft, (1.0, 1.0))
        assert [finding.what for finding in verify_index(saved_conversations)] == ["orphan"]
    assert saved_conversations.delete_superseded() == [draft]


def test_invalid_numbers_are_found(saved_conversations: Index) -> None:
    row = saved_conversations.sessions()[0]
    for changed in ({"created": float("nan")}, {"requests": -1}, {"last_used": float("inf")}):
        saved_conversations.transact(
            lambda tables, changed=changed: tables.put_session(msgspec.structs.replace(row, **changed))
        )
        assert {finding.what for finding in verify_index(saved_conversations)} == {"entry"}
        repair(saved_conversations, deep=False, is_saving=False)
        assert verify_index(saved_conversations) == []
        saved_conversations.transact(lambda tables: tables.put_session(row))


def test_session_rows_are_checked_on_read() -> None:
    row = SessionRow(
        id="0" * 12, root=ROOT, model="m", leaf="x", tokens=1, turn_end=1, turn_digest=ROOT, turn_segment="",
        created=0.0, last_used=0.0,
    )  # fmt: skip
    with pytest.raises(msgspec.ValidationError, match="leaf"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=SessionRow)
