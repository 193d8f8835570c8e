"""Tables of the index, row by row, inside one transaction.  Keys and sums agree here; `index.tree` keeps the tree.

segments     id                     SegmentRow          tokens    id              packed ids of [start, end)
children     parent, start, token   id                  hashes    id              its chain hashes, end to end
blocks       chain hash             id of the segment in which the block ends
checkpoints  id                     CheckpointRow       places    segment, position   checkpoint id
sessions     id                     SessionRow          anchors   segment, session    ""
usage        id                     FileUsage               requests  number          RequestRecord
saves        plan id                SavePlan            doomed    id              bytes: row gone, file not yet
quarantine   id                     QuarantineRow       gone      as children     why that child is no longer stored
turns        number                 TurnRow             calls     root, call id   its turn's number
responses    number                 ResponseRow         response_bodies  number   its JSON, compressed by zlib
response_ids key of its id          its number          holders   key of an item, number of a response with it  ""
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec
import xxhash

from warmline_common.protocol.tokens import BLOCK_TOKENS, TOKEN_BYTES
from warmline_proxy.store import rows

RESPONSE_TABLES = ("responses", "response_bodies", "response_ids", "holders")
TABLES_ADDED = frozenset(
    {"turns", "calls", *RESPONSE_TABLES}
)  # missing in an older version's index until a proxy has it
SUMS_KEY = b"sums"
INCOMPLETE_KEY = b"anew"  # in meta, from the creation of the index until it has all stored files
PURGED_DATA_KEY = b"traces"  # in meta, from a purge until a compaction has removed its traces from the index's file
DIGEST_KEY = b"digest"  # in meta: the digest of all other entries
PURGE_NOTICE_KEY = b"untold"  # in meta, from a purge until no backend can have purged KV in memory
REQUESTS_MAX = 1000
REMOVAL_REASONS_MAX = 10_000
HASH_BYTES = 16
DIGEST_BYTES = 16


_encode = msgspec.msgpack.Encoder().encode

# Made while one thread imports this: msgspec (0.22) crashes where two meet a struct for the first time at once.
_decode_segment = msgspec.msgpack.Decoder(rows.SegmentRow).decode
_decode_checkpoint = msgspec.msgpack.Decoder(rows.CheckpointRow).decode
_decode_session = msgspec.msgpack.Decoder(rows.SessionRow).decode
_decode_usage = msgspec.msgpack.Decoder(rows.FileUsage).decode
_decode_request = msgspec.msgpack.Decoder(rows.RequestRecord).decode
_decode_save_plan = msgspec.msgpack.Decoder(rows.SavePlan).decode
_decode_quarantine = msgspec.msgpack.Decoder(rows.QuarantineRow).decode
decode_sums = msgspec.msgpack.Decoder(rows.Sums).decode
DECODERS: dict[str, Callable[[bytes], Any]] = {
    "segments": _decode_segment,
    "checkpoints": _decode_checkpoint,
    "sessions": _decode_session,
    "usage": _decode_usage,
    "requests": _decode_request,
    "saves": _decode_save_plan,
    "quarantine": _decode_quarantine,
    "turns": msgspec.msgpack.Decoder(rows.TurnRow).decode,
    "responses": msgspec.msgpack.Decoder(rows.ResponseRow).decode,
}
TABLES = (
    *("meta", *DECODERS, "tokens", "children", "hashes", "blocks", "places", "anchors", "doomed", "gone", "calls"),
    *RESPONSE_TABLES[1:],
)
T = TypeVar("T")


def encode_number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def encode_child_key(root: bytes, parent: str, start: int, token: bytes) -> bytes:
    """Key of the child that leaves `parent` (or the root) at `start` with the packed `token`: at most one can."""
    return encode_parent_key(root, parent) + start.to_bytes(4, "big") + token


def encode_parent_key(root: bytes, parent: str) -> bytes:
    return b"s" + bytes.fromhex(parent) if parent else b"r" + root


def _encode_digest(digest: int) -> bytes:
    return (digest % (1 << 8 * DIGEST_BYTES)).to_bytes(DIGEST_BYTES, "big")


def block_range(start: int, end: int) -> slice:
    """Blocks that end in (start, end]."""
    return slice(start // BLOCK_TOKENS, end // BLOCK_TOKENS)


def digest_entry(table: str, key: bytes, value: bytes) -> int:
    """Digest of an entry.  The sum of all of them does not depend on their order."""
    head = b"%s %d " % (table.encode(), len(key))
    return int.from_bytes(xxhash.xxh3_128_digest(head + key + value), "big")


class Tables:
    """View of one transaction.  `txn` is LMDB's; methods that write need a write transaction."""

    def __init__(self, txn: Any, handles: dict[str, Any]) -> None:
        self._txn = txn
        self._handles = handles
        self._changed_sums: rows.Sums | None = None
        self._digest_change = 0

    # --- plain access ---

    def get(self, table: str, key: bytes) -> bytes | None:
        handle = self._handles[table]
        value: bytes | None = None if handle is None else self._txn.get(key, db=handle)
        return value

    def _find(self, table: str, key: bytes, decode: Callable[[bytes], T]) -> T | None:
        value = self.get(table, key)
        return None if value is None else decode(value)

    def _find_id(self, table: str, key: bytes) -> str:
        """Id of the file that an entry names; "" without an entry."""
        return (self.get(table, key) or b"").hex()

    def put(self, table: str, key: bytes, value: bytes) -> None:
        if (old := self.get(table, key)) is not None:
            self._digest_change -= digest_entry(table, key, old)
        self._digest_change += digest_entry(table, key, value)
        self._txn.put(key, value, db=self._handles[table])

    def delete(self, table: str, key: bytes) -> bool:
        if (old := self.get(table, key)) is not None:
            self._digest_change -= digest_entry(table, key, old)
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

    def next_key(self, table: str) -> bytes:
        """Key after the last one of a table with numbers as keys."""
        cursor = self._txn.cursor(db=self._handles[table])
        return encode_number(int.from_bytes(cursor.key(), "big") + 1 if cursor.last() else 1)

    def last_number(self, table: str, prefix: bytes) -> bytes | None:
        """Number that ends the last key with this prefix, which all keys with it have after it."""
        if (handle := self._handles[table]) is None:
            return None
        cursor = self._txn.cursor(db=handle)
        is_found = cursor.prev() if cursor.set_range(prefix + encode_number((1 << 64) - 1)) else cursor.last()
        return cursor.key()[len(prefix) :] if is_found and cursor.key().startswith(prefix) else None

    # --- sums ---

    def sums(self) -> rows.Sums:
        return self._changed_sums or self._find("meta", SUMS_KEY, decode_sums) or rows.Sums()

    def add_to_sums(self, **amounts: int) -> None:
        sums = self._changed_sums = self.sums()
        for name, amount in amounts.items():
            setattr(sums, name, getattr(sums, name) + amount)

    def write_sums(self) -> None:
        if self._changed_sums is not None:
            self.put("meta", SUMS_KEY, _encode(self._changed_sums))

    # --- digest: tells damage to entries that could be true ---

    def has_true_digest(self) -> bool | None:
        """True where all entries are those that were written; None where an older version wrote the index."""
        stored = self.get("meta", DIGEST_KEY)
        return None if stored is None else stored == self._compute_digest()

    def write_digest(self) -> None:
        """Add this transaction's changes to the digest, if there is one."""
        if self._digest_change and (stored := self.get("meta", DIGEST_KEY)) is not None:
            self._put_digest(int.from_bytes(stored, "big") + self._digest_change)

    def reset_digest(self) -> None:
        """Write the digest of the entries as they are now."""
        self._put_digest(int.from_bytes(self._compute_digest(), "big"))

    def _compute_digest(self) -> bytes:
        entries = ((table, key, value) for table in TABLES for key, value in self.items(table) if key != DIGEST_KEY)
        return _encode_digest(sum(digest_entry(*entry) for entry in entries))

    def _put_digest(self, digest: int) -> None:
        self._txn.put(DIGEST_KEY, _encode_digest(digest), db=self._handles["meta"])
        self._digest_change = 0

    # --- marks ---

    def is_incomplete(self) -> bool:
        """True where the index may lack stored data: it was missing or unreadable."""
        return self.get("meta", INCOMPLETE_KEY) is not None

    def mark_complete(self) -> None:
        """Note that the index has all stored files."""
        self.delete("meta", INCOMPLETE_KEY)

    def has_purged_data(self) -> bool:
        """True where the file may still hold purged data."""
        return self.get("meta", PURGED_DATA_KEY) is not None

    def mark_erasable(self) -> None:
        """Note that the index's file may still hold removed data."""
        self.put("meta", PURGED_DATA_KEY, b"")

    def mark_purged(self) -> None:
        """Note that the index's file, and a backend's memory, may still hold purged data."""
        self.mark_erasable()
        self.put("meta", PURGE_NOTICE_KEY, b"")

    def has_purge_notice(self) -> bool:
        """True where a backend may hold purged KV in memory."""
        return self.get("meta", PURGE_NOTICE_KEY) is not None

    def clear_purge_notice(self) -> None:
        self.delete("meta", PURGE_NOTICE_KEY)

    def totals(self, bytes_index: int) -> rows.Totals:
        return rows.Totals(**msgspec.structs.asdict(self.sums()), bytes_index=bytes_index)

    def snapshot(self) -> rows.IndexSnapshot:
        return rows.IndexSnapshot(
            segments={row.id: row for row in self.segments()},
            checkpoints={row.id: row for row in self.checkpoints()},
            sessions={row.id: row for row in self.sessions()},
            quarantined={row.id: row for row in self.quarantined()},
            usage={row.id: self.usage(row.id) for row in self.files()},
        )

    # --- segments ---

    def segment(self, segment_id: str) -> rows.SegmentRow | None:
        return self._find("segments", bytes.fromhex(segment_id), _decode_segment) if segment_id else None

    def segments(self) -> Iterator[rows.SegmentRow]:
        return (_decode_segment(value) for _, value in self.items("segments"))

    def tokens(self, segment_id: str) -> bytes:
        return self.get("tokens", bytes.fromhex(segment_id)) or b""

    def hashes(self, segment_id: str) -> list[bytes]:
        joined = self.get("hashes", bytes.fromhex(segment_id)) or b""
        return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]

    def block_segment(self, chain_hash: bytes) -> str:
        return self._find_id("blocks", chain_hash)

    def child(self, root: bytes, parent: str, start: int, token: bytes) -> str:
        return self._find_id("children", encode_child_key(root, parent, start, token))

    def children(self, root: bytes, parent: str, start: int | None = None) -> list[str]:
        """All children, or those that leave at `start`."""
        prefix = encode_parent_key(root, parent) + (b"" if start is None else start.to_bytes(4, "big"))
        return [value.hex() for _, value in self.items("children", prefix)]

    def insert_segment(self, row: rows.SegmentRow, tokens: bytes, hashes: Iterable[bytes]) -> None:
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

    def update_segment(self, row: rows.SegmentRow) -> None:
        """Write fields that are no part of a key or a sum: session, pinned; a parent only with its `children` entry."""
        self.put("segments", bytes.fromhex(row.id), _encode(row))

    def remove_segment(self, row: rows.SegmentRow, why: str) -> None:
        """Remove its row, tokens, blocks and `children` entry; `why`, unless "", is kept in `gone` for lookups."""
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

    def checkpoint(self, checkpoint_id: str) -> rows.CheckpointRow | None:
        return self._find("checkpoints", bytes.fromhex(checkpoint_id), _decode_checkpoint)

    def checkpoints(self, segment_id: str = "") -> list[rows.CheckpointRow]:
        """Checkpoints of one segment by position, or all."""
        if not segment_id:
            return [_decode_checkpoint(value) for _, value in self.items("checkpoints")]
        ids = [value for _, value in self.items("places", bytes.fromhex(segment_id))]
        return [_decode_checkpoint(self.get("checkpoints", key) or b"") for key in ids]

    def checkpoint_at(self, segment_id: str, position: int) -> str:
        return self._find_id("places", bytes.fromhex(segment_id) + encode_number(position))

    def insert_checkpoint(self, row: rows.CheckpointRow) -> None:
        key = bytes.fromhex(row.id)
        self.put("checkpoints", key, _encode(row))
        self.put("places", bytes.fromhex(row.segment) + encode_number(row.position), key)
        self.add_to_sums(checkpoints=1, bytes_checkpoints=row.bytes_on_disk)

    def remove_checkpoint(self, row: rows.CheckpointRow) -> None:
        key = bytes.fromhex(row.id)
        self.delete("checkpoints", key)
        self.delete("usage", key)
        self.delete("places", bytes.fromhex(row.segment) + encode_number(row.position))
        self.add_to_sums(checkpoints=-1, bytes_checkpoints=-row.bytes_on_disk)

    def has_file(self, file_id: str) -> bool:
        """True for the id of a stored segment or checkpoint."""
        key = bytes.fromhex(file_id)
        return self.get("segments", key) is not None or self.get("checkpoints", key) is not None

    def files(self) -> list[rows.SegmentRow | rows.CheckpointRow]:
        return [*self.segments(), *self.checkpoints()]

    # --- sessions ---

    def session(self, session_id: str) -> rows.SessionRow | None:
        return self._find("sessions", session_id.encode(), _decode_session)

    def sessions(self) -> Iterator[rows.SessionRow]:
        return (_decode_session(value) for _, value in self.items("sessions"))

    def anchored_sessions(self, segment_id: str) -> list[rows.SessionRow]:
        """The sessions whose leaf or turn end lies in this segment."""
        prefix = bytes.fromhex(segment_id)
        ids = [key[len(prefix) :] for key, _ in self.items("anchors", prefix)]
        return [_decode_session(self.get("sessions", key) or b"") for key in ids]

    def put_session(self, row: rows.SessionRow) -> None:
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

    def usage(self, file_id: str) -> rows.FileUsage:
        return self._find("usage", bytes.fromhex(file_id), _decode_usage) or rows.FileUsage()

    def put_usage(self, file_id: str, usage: rows.FileUsage) -> None:
        self.put("usage", bytes.fromhex(file_id), _encode(usage))

    def requests(self) -> list[tuple[bytes, rows.RequestRecord]]:
        """Records with their keys, oldest first."""
        return [(key, _decode_request(value)) for key, value in self.items("requests")]

    def append_request(self, record: rows.RequestRecord) -> None:
        self.put("requests", self.next_key("requests"), _encode(record))
        if self.count("requests") > REQUESTS_MAX and (oldest := next(self.items("requests"), None)):
            self.delete("requests", oldest[0])

    def put_request(self, key: bytes, record: rows.RequestRecord) -> None:
        self.put("requests", key, _encode(record))

    def record_audits(self, audits: dict[str, tuple[str, str]]) -> None:
        """Add (audit, guard) by request id to the records that are still kept."""
        for key, record in self.requests():
            if record.id in audits:
                audit, guard = audits[record.id]
                self.put_request(key, msgspec.structs.replace(record, audit=audit, guard=guard))

    # --- saves under way, files to delete, quarantine ---

    def save_plan(self, plan_id: str) -> rows.SavePlan | None:
        return self._find("saves", plan_id.encode(), _decode_save_plan)

    def save_plans(self) -> list[rows.SavePlan]:
        return [_decode_save_plan(value) for _, value in self.items("saves")]

    def insert_save_plan(self, plan: rows.SavePlan) -> None:
        """Insert a plan without its tokens: the index needs them only from its commit on."""
        self.put("saves", plan.id.encode(), _encode(msgspec.structs.replace(plan, tokens=b"")))
        self.add_to_sums(bytes_writing=plan.bytes_expected)

    def remove_save_plan(self, plan: rows.SavePlan) -> None:
        if self.delete("saves", plan.id.encode()):
            self.add_to_sums(bytes_writing=-plan.bytes_expected)

    def pending_deletions(self) -> dict[str, int]:
        return {key.hex(): int.from_bytes(value, "big") for key, value in self.items("doomed")}

    def mark_deleted(self, file_id: str, bytes_count: int) -> None:
        self.remove_pending_deletions([file_id])
        self.put("doomed", bytes.fromhex(file_id), encode_number(bytes_count))
        self.add_to_sums(bytes_doomed=bytes_count)

    def remove_pending_deletions(self, ids: Iterable[str]) -> None:
        for key in map(bytes.fromhex, ids):
            if (size := self.get("doomed", key)) is not None:
                self.delete("doomed", key)
                self.add_to_sums(bytes_doomed=-int.from_bytes(size, "big"))

    def quarantined(self) -> list[rows.QuarantineRow]:
        """Oldest first."""
        return sorted((_decode_quarantine(value) for _, value in self.items("quarantine")), key=lambda row: row.at)

    def is_quarantined(self, file_id: str) -> bool:
        return self.get("quarantine", bytes.fromhex(file_id)) is not None

    def insert_quarantined(self, row: rows.QuarantineRow) -> None:
        self.put("quarantine", bytes.fromhex(row.id), _encode(row))
        self.add_to_sums(quarantined=1, bytes_quarantined=row.bytes_on_disk)

    def remove_quarantined(self, row: rows.QuarantineRow) -> None:
        if self.delete("quarantine", bytes.fromhex(row.id)):
            self.add_to_sums(quarantined=-1, bytes_quarantined=-row.bytes_on_disk)


def token_at(tokens: bytes, at: int) -> bytes:
    return tokens[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES]
