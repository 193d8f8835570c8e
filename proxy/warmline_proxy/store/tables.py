"""The index's tables, row by row, inside one transaction.  Here keys and sums agree; the tree is index_tree's.

segments     id                     SegmentRow          tokens    id              packed ids of [start, end)
children     parent, start, token   id                  hashes    id              its chain hashes, end to end
blocks       chain hash             id of the segment in which the block ends
checkpoints  id                     CheckpointRow       places    segment, position   checkpoint id
sessions     id                     SessionRow          anchors   segment, session    ""
usage        id                     Usage               requests  number          RequestRecord
saves        plan id                SavePlan            doomed    id              bytes: row gone, file not yet
quarantine   id                     QuarantineRow       gone      as children     why that child is no longer stored
turns        number                 TurnRow             calls     root, call id   its turn's number
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from warmline_common.protocol.tokens import BLOCK_TOKENS, TOKEN_BYTES
from warmline_proxy.store.rows import (
    CheckpointRow,
    FileUsage,
    IndexSnapshot,
    QuarantineRow,
    RequestRecord,
    SavePlan,
    SegmentRow,
    SessionRow,
    Totals,
    TurnRow,
)

TABLES = (
    "meta",
    "segments",
    "tokens",
    "children",
    "hashes",
    "blocks",
    "checkpoints",
    "places",
    "sessions",
    "anchors",
    "usage",
    "requests",
    "saves",
    "doomed",
    "quarantine",
    "gone",
    "turns",
    "calls",
)
TABLES_ADDED = frozenset({"turns", "calls"})  # an index that an older version wrote lacks them, until a proxy has it
SUMS_KEY = b"sums"
INCOMPLETE_KEY = b"anew"  # in meta, from when there was no index until all that is stored is in it
PURGED_DATA_KEY = (
    b"traces"  # in meta, from a purge until the file has no trace of what went, which a compaction sees to
)
PURGE_NOTICE_KEY = b"untold"  # in meta, from a purge until no backend can have in memory what went
REQUESTS_MAX = 1000
REMOVAL_REASONS_MAX = 10_000
HASH_BYTES = 16


class Sums(msgspec.Struct, kw_only=True):
    segments: int = 0
    checkpoints: int = 0
    sessions: int = 0
    quarantined: int = 0
    tokens: int = 0
    bytes_segments: int = 0
    bytes_checkpoints: int = 0
    bytes_quarantined: int = 0
    bytes_writing: int = 0
    bytes_doomed: int = 0
    turns: int = 0
    bytes_turns: int = 0


_encode = msgspec.msgpack.Encoder().encode


# Made while one thread imports this: msgspec (0.22) crashes where two meet a struct for the first time at once.
_decode_segment = msgspec.msgpack.Decoder(SegmentRow).decode
_decode_checkpoint = msgspec.msgpack.Decoder(CheckpointRow).decode
_decode_session = msgspec.msgpack.Decoder(SessionRow).decode
_decode_usage = msgspec.msgpack.Decoder(FileUsage).decode
_decode_request = msgspec.msgpack.Decoder(RequestRecord).decode
_decode_save_plan = msgspec.msgpack.Decoder(SavePlan).decode
_decode_quarantine = msgspec.msgpack.Decoder(QuarantineRow).decode
decode_sums = msgspec.msgpack.Decoder(Sums).decode
DECODERS: dict[str, Callable[[bytes], Any]] = {
    "segments": _decode_segment,
    "checkpoints": _decode_checkpoint,
    "sessions": _decode_session,
    "usage": _decode_usage,
    "requests": _decode_request,
    "saves": _decode_save_plan,
    "quarantine": _decode_quarantine,
    "turns": msgspec.msgpack.Decoder(TurnRow).decode,
}


def encode_number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def encode_child_key(root: bytes, parent: str, start: int, token: bytes) -> bytes:
    """Key of the child that leaves `parent` (or the root) at `start` with the packed `token`: at most one can."""
    return encode_parent_key(root, parent) + start.to_bytes(4, "big") + token


def encode_parent_key(root: bytes, parent: str) -> bytes:
    return b"s" + bytes.fromhex(parent) if parent else b"r" + root


def block_range(start: int, end: int) -> slice:
    """Blocks that end in (start, end]."""
    return slice(start // BLOCK_TOKENS, end // BLOCK_TOKENS)


class Tables:
    """One transaction's view.  `txn` is LMDB's; those that write need a write transaction."""

    def __init__(self, txn: Any, handles: dict[str, Any]) -> None:
        self._txn = txn
        self._handles = handles
        self._changed_sums: Sums | None = None

    # --- plain access ---

    def get(self, table: str, key: bytes) -> bytes | None:
        if (handle := self._handles[table]) is None:
            return None
        value: bytes | None = self._txn.get(key, db=handle)
        return value

    def put(self, table: str, key: bytes, value: bytes) -> None:
        self._txn.put(key, value, db=self._handles[table])

    def delete(self, table: str, key: bytes) -> bool:
        return bool(self._txn.delete(key, db=self._handles[table]))

    def items(self, table: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """In the order of keys.  Collect them before changing the table."""
        if (handle := self._handles[table]) is None:
            return
        cursor = self._txn.cursor(db=handle)
        if not cursor.set_range(prefix):
            return
        for key, value in cursor:
            if not key.startswith(prefix):
                return
            yield key, value

    def count(self, table: str) -> int:
        handle = self._handles[table]
        return 0 if handle is None else int(self._txn.stat(db=handle)["entries"])

    def last_key(self, table: str) -> bytes:
        """The last key; b"" where there is none."""
        cursor = self._txn.cursor(db=self._handles[table])
        return bytes(cursor.key()) if cursor.last() else b""

    # --- sums ---

    def sums(self) -> Sums:
        if self._changed_sums is not None:
            return self._changed_sums
        found = self.get("meta", SUMS_KEY)
        return Sums() if found is None else decode_sums(found)

    def add_to_sums(self, **amounts: int) -> None:
        sums = self._changed_sums = self.sums()
        for name, amount in amounts.items():
            setattr(sums, name, getattr(sums, name) + amount)

    def write_sums(self) -> None:
        if self._changed_sums is not None:
            self.put("meta", SUMS_KEY, _encode(self._changed_sums))

    def is_incomplete(self) -> bool:
        """True where the index may lack stored data: it was missing or unreadable."""
        return self.get("meta", INCOMPLETE_KEY) is not None

    def mark_complete(self) -> None:
        """From now on it lacks nothing."""
        self.delete("meta", INCOMPLETE_KEY)

    def has_purged_data(self) -> bool:
        """True where the file may still hold purged data."""
        return self.get("meta", PURGED_DATA_KEY) is not None

    def mark_purged(self) -> None:
        """Something is purged: until that is seen to, the file may hold it, and a backend may, too."""
        self.put("meta", PURGED_DATA_KEY, b"")
        self.put("meta", PURGE_NOTICE_KEY, b"")

    def has_purge_notice(self) -> bool:
        """True where a backend may hold purged KV in memory."""
        return self.get("meta", PURGE_NOTICE_KEY) is not None

    def clear_purge_notice(self) -> None:
        self.delete("meta", PURGE_NOTICE_KEY)

    def totals(self, bytes_index: int) -> Totals:
        return Totals(**msgspec.structs.asdict(self.sums()), bytes_index=bytes_index)

    def snapshot(self) -> IndexSnapshot:
        return IndexSnapshot(
            segments={row.id: row for row in self.segments()},
            checkpoints={row.id: row for row in self.checkpoints()},
            sessions={row.id: row for row in self.sessions()},
            quarantined={row.id: row for row in self.quarantined()},
            usage={row.id: self.usage(row.id) for row in self.files()},
        )

    # --- segments ---

    def segment(self, segment_id: str) -> SegmentRow | None:
        found = self.get("segments", bytes.fromhex(segment_id)) if segment_id else None
        return None if found is None else _decode_segment(found)

    def segments(self) -> Iterator[SegmentRow]:
        return (_decode_segment(value) for _, value in self.items("segments"))

    def tokens(self, segment_id: str) -> bytes:
        return self.get("tokens", bytes.fromhex(segment_id)) or b""

    def hashes(self, segment_id: str) -> list[bytes]:
        joined = self.get("hashes", bytes.fromhex(segment_id)) or b""
        return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]

    def block_segment(self, chain_hash: bytes) -> str:
        found = self.get("blocks", chain_hash)
        return "" if found is None else found.hex()

    def child(self, root: bytes, parent: str, start: int, token: bytes) -> str:
        found = self.get("children", encode_child_key(root, parent, start, token))
        return "" if found is None else found.hex()

    def children(self, root: bytes, parent: str, start: int | None = None) -> list[str]:
        """All, or those that leave at `start`."""
        prefix = encode_parent_key(root, parent) + (b"" if start is None else start.to_bytes(4, "big"))
        return [value.hex() for _, value in self.items("children", prefix)]

    def insert_segment(self, row: SegmentRow, tokens: bytes, hashes: Iterable[bytes]) -> None:
        key, hashes = bytes.fromhex(row.id), list(hashes)
        place = encode_child_key(row.root, row.parent, row.start, tokens[:TOKEN_BYTES])
        self.put("segments", key, _encode(row))
        self.put("tokens", key, tokens)
        self.put("hashes", key, b"".join(hashes))
        self.put("children", place, key)
        self.delete("gone", place)
        for chain_hash in hashes:
            self.put("blocks", chain_hash, key)
        self.add_to_sums(segments=1, tokens=row.end - row.start, bytes_segments=row.bytes_on_disk)

    def update_segment(self, row: SegmentRow) -> None:
        """For what is no part of a key or a sum: session, pinned; a parent together with its children's table."""
        self.put("segments", bytes.fromhex(row.id), _encode(row))

    def remove_segment(self, row: SegmentRow, why: str) -> None:
        """Its row, tokens, blocks and slot; `why` ("" for nothing) stays in the slot for who looks for it."""
        key = bytes.fromhex(row.id)
        place = encode_child_key(row.root, row.parent, row.start, self.tokens(row.id)[:TOKEN_BYTES])
        for chain_hash in self.hashes(row.id):
            if self.get("blocks", chain_hash) == key:
                self.delete("blocks", chain_hash)
        for table in ("segments", "tokens", "hashes", "usage"):
            self.delete(table, key)
        self.delete("children", place)
        for below, _ in list(self.items("gone", encode_parent_key(row.root, row.id))):
            self.delete("gone", below)
        if why and self.count("gone") < REMOVAL_REASONS_MAX:
            self.put("gone", place, why.encode())
        self.add_to_sums(segments=-1, tokens=row.start - row.end, bytes_segments=-row.bytes_on_disk)

    def removal_reason(self, root: bytes, parent: str, start: int, token: bytes) -> str:
        return (self.get("gone", encode_child_key(root, parent, start, token)) or b"").decode()

    # --- checkpoints ---

    def checkpoint(self, checkpoint_id: str) -> CheckpointRow | None:
        found = self.get("checkpoints", bytes.fromhex(checkpoint_id))
        return None if found is None else _decode_checkpoint(found)

    def checkpoints(self, segment_id: str = "") -> list[CheckpointRow]:
        """Those of one segment by position, or all."""
        if not segment_id:
            return [_decode_checkpoint(value) for _, value in self.items("checkpoints")]
        ids = [value for _, value in self.items("places", bytes.fromhex(segment_id))]
        return [_decode_checkpoint(self.get("checkpoints", key) or b"") for key in ids]

    def checkpoint_at(self, segment_id: str, position: int) -> str:
        found = self.get("places", bytes.fromhex(segment_id) + encode_number(position))
        return "" if found is None else found.hex()

    def insert_checkpoint(self, row: CheckpointRow) -> None:
        key = bytes.fromhex(row.id)
        self.put("checkpoints", key, _encode(row))
        self.put("places", bytes.fromhex(row.segment) + encode_number(row.position), key)
        self.add_to_sums(checkpoints=1, bytes_checkpoints=row.bytes_on_disk)

    def remove_checkpoint(self, row: CheckpointRow) -> None:
        key = bytes.fromhex(row.id)
        self.delete("checkpoints", key)
        self.delete("usage", key)
        self.delete("places", bytes.fromhex(row.segment) + encode_number(row.position))
        self.add_to_sums(checkpoints=-1, bytes_checkpoints=-row.bytes_on_disk)

    def has_file(self, file_id: str) -> bool:
        """True for the id of a stored segment or checkpoint."""
        key = bytes.fromhex(file_id)
        return self.get("segments", key) is not None or self.get("checkpoints", key) is not None

    def files(self) -> list[SegmentRow | CheckpointRow]:
        return [*self.segments(), *self.checkpoints()]

    # --- sessions ---

    def session(self, session_id: str) -> SessionRow | None:
        found = self.get("sessions", session_id.encode())
        return None if found is None else _decode_session(found)

    def sessions(self) -> Iterator[SessionRow]:
        return (_decode_session(value) for _, value in self.items("sessions"))

    def anchored_sessions(self, segment_id: str) -> list[SessionRow]:
        """The sessions whose leaf or turn end lies in this segment."""
        prefix = bytes.fromhex(segment_id)
        ids = [key[len(prefix) :] for key, _ in self.items("anchors", prefix)]
        return [_decode_session(self.get("sessions", key) or b"") for key in ids]

    def put_session(self, row: SessionRow) -> None:
        self.remove_session(row.id)
        key = row.id.encode()
        self.put("sessions", key, _encode(row))
        for anchor in {row.leaf, row.turn_segment} - {""}:
            self.put("anchors", bytes.fromhex(anchor) + key, b"")
        self.add_to_sums(sessions=1)

    def remove_session(self, session_id: str) -> None:
        if (old := self.session(session_id)) is None:
            return
        key = session_id.encode()
        self.delete("sessions", key)
        for anchor in {old.leaf, old.turn_segment} - {""}:
            self.delete("anchors", bytes.fromhex(anchor) + key)
        self.add_to_sums(sessions=-1)

    # --- bookkeeping ---

    def usage(self, file_id: str) -> FileUsage:
        found = self.get("usage", bytes.fromhex(file_id))
        return FileUsage() if found is None else _decode_usage(found)

    def put_usage(self, file_id: str, usage: FileUsage) -> None:
        self.put("usage", bytes.fromhex(file_id), _encode(usage))

    def requests(self) -> list[tuple[bytes, RequestRecord]]:
        """With their keys, oldest first."""
        return [(key, _decode_request(value)) for key, value in self.items("requests")]

    def append_request(self, record: RequestRecord) -> None:
        self.put("requests", encode_number(int.from_bytes(self.last_key("requests"), "big") + 1), _encode(record))
        if self.count("requests") > REQUESTS_MAX and (oldest := next(self.items("requests"), None)):
            self.delete("requests", oldest[0])

    def put_request(self, key: bytes, record: RequestRecord) -> None:
        self.put("requests", key, _encode(record))

    def record_audits(self, audits: dict[str, tuple[str, str]]) -> None:
        """Of those among the last requests."""
        for key, record in self.requests():
            if found := audits.get(record.id):
                audit, guard = found
                self.put_request(key, msgspec.structs.replace(record, audit=audit, guard=guard))

    # --- saves under way, files to delete, quarantine ---

    def save_plan(self, plan_id: str) -> SavePlan | None:
        found = self.get("saves", plan_id.encode())
        return None if found is None else _decode_save_plan(found)

    def save_plans(self) -> list[SavePlan]:
        return [_decode_save_plan(value) for _, value in self.items("saves")]

    def insert_save_plan(self, plan: SavePlan) -> None:
        """Without its tokens: nobody needs them before it is committed."""
        self.put("saves", plan.id.encode(), _encode(msgspec.structs.replace(plan, tokens=b"")))
        self.add_to_sums(bytes_writing=plan.bytes_expected)

    def remove_save_plan(self, plan: SavePlan) -> None:
        if self.delete("saves", plan.id.encode()):
            self.add_to_sums(bytes_writing=-plan.bytes_expected)

    def pending_deletions(self) -> dict[str, int]:
        return {key.hex(): int.from_bytes(value, "big") for key, value in self.items("doomed")}

    def mark_deleted(self, file_id: str, bytes_count: int) -> None:
        self.remove_pending_deletion(file_id)
        self.put("doomed", bytes.fromhex(file_id), encode_number(bytes_count))
        self.add_to_sums(bytes_doomed=bytes_count)

    def remove_pending_deletion(self, file_id: str) -> None:
        key = bytes.fromhex(file_id)
        if (found := self.get("doomed", key)) is not None:
            self.delete("doomed", key)
            self.add_to_sums(bytes_doomed=-int.from_bytes(found, "big"))

    def quarantined(self) -> list[QuarantineRow]:
        """Oldest first."""
        return sorted((_decode_quarantine(value) for _, value in self.items("quarantine")), key=lambda row: row.at)

    def is_quarantined(self, file_id: str) -> bool:
        return self.get("quarantine", bytes.fromhex(file_id)) is not None

    def insert_quarantined(self, row: QuarantineRow) -> None:
        self.put("quarantine", bytes.fromhex(row.id), _encode(row))
        self.add_to_sums(quarantined=1, bytes_quarantined=row.bytes_on_disk)

    def remove_quarantined(self, row: QuarantineRow) -> None:
        if self.delete("quarantine", bytes.fromhex(row.id)):
            self.add_to_sums(quarantined=-1, bytes_quarantined=-row.bytes_on_disk)


def token_at(tokens: bytes, at: int) -> bytes:
    return tokens[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES]
