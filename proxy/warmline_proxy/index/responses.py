"""Stored responses of OpenAI's Responses in the index: a row and a body a response under its number, oldest first.

A body is the whole conversation, so that deleting one response leaves the others as they are.  It is found by its
response's id, and by the ids of its items: an item is found as long as any response has it.  The owner is part of each
key: a key's response is found for no other one.

Until a save tells a response's conversation, its row has the prompt's tokens: a purge of a conversation compares them.
"""

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_proxy.index.tree import digest_prefix
from warmline_proxy.store.rows import ResponseRow, SessionRow
from warmline_proxy.store.tables import DECODERS, Tables

log = logging.getLogger(__name__)

ITEM_KEY_BYTES = 16
ITEMS_MAX = 4096  # by which a response is found; its last ones
ITEM_BYTES = 64  # of an item's key in the row, and of its entry among the holders
ROW_BYTES = 256  # of a row and its ids, without its items
COMPRESSION_LEVEL = 1
DAY_S, MB = 86_400.0, 10**6
BUDGET_SHARE = 0.1  # of the disk budget, at most: responses are not evicted for the sake of KV

_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], ResponseRow] = DECODERS["responses"]


@dataclass(frozen=True)
class ResponseLimits:
    """Limits of all stored responses; no response is stored where one is 0."""

    age_max_s: float = 30 * DAY_S
    bytes_max: int = 256 * MB

    @classmethod
    def from_settings(cls, keep_days: float, keep_mb: float, budget_bytes: int) -> "ResponseLimits":
        return cls(keep_days * DAY_S, int(min(keep_mb * MB, budget_bytes * BUDGET_SHARE)))

    @property
    def is_off(self) -> bool:
        return not (self.age_max_s and self.bytes_max)

    def has_room(self, row: ResponseRow, body_bytes: int) -> bool:
        """True for a response that is small enough, however badly its body of so many bytes can be compressed."""
        compressed = body_bytes + (body_bytes >> 11) + 64  # more than zlib's compressBound
        return count_bytes(msgspec.structs.replace(row, bytes_body=compressed)) <= self.bytes_max


DEFAULT_LIMITS = ResponseLimits()


@dataclass(frozen=True)
class ResponseBody:
    """Body of a response, JSON, in a content coding of HTTP's."""

    data: bytes
    coding: str = "deflate"  # "identity" until it is written


@dataclass(frozen=True)
class FoundResponse:
    """A response that was looked up, its body still unread."""

    row: ResponseRow
    read_body: Callable[[], ResponseBody | None]  # None where it has gone since.  Raises IndexStoreError


@dataclass(frozen=True)
class ResponseEntry:
    """A response to be stored."""

    row: ResponseRow
    body: bytes  # JSON

    @property
    def key(self) -> tuple[str, str]:
        return self.row.owner, self.row.id

    @property
    def bytes_count(self) -> int:
        """In memory."""
        return len(self.body) + len(self.row.tokens)

    def has_item(self, item: bytes) -> bool:
        """`item`: as `id_key` returns it."""
        return item in split_keys(self.row)[1]

    def as_found(self) -> "FoundResponse":
        return FoundResponse(self.row, lambda: ResponseBody(self.body, "identity"))


def id_key(owner: str, id_: str) -> bytes:
    """Key of a response's or an item's id."""
    text = f"{owner}\0{id_}"
    return blake2b(text.encode(errors="replace"), digest_size=ITEM_KEY_BYTES).digest()


def join_keys(owner: str, answer_id: str, item_ids: Iterable[str]) -> bytes:
    """`ResponseRow.items` of a response with these items, in their order."""
    items = list(dict.fromkeys(item_ids))[-ITEMS_MAX:]
    return b"".join(id_key(owner, each) for each in (answer_id, *items))


def split_keys(row: ResponseRow) -> tuple[bytes, list[bytes]]:
    """Keys of a response's id, and of its items'."""
    keys = [row.items[at : at + ITEM_KEY_BYTES] for at in range(0, len(row.items), ITEM_KEY_BYTES)]
    return keys[0], keys[1:]


def count_bytes(row: ResponseRow) -> int:
    """Bytes in the index, nearly."""
    return row.bytes_body + len(row.tokens) + len(row.items) // ITEM_KEY_BYTES * ITEM_BYTES + ROW_BYTES


def is_of_conversation(row: ResponseRow, session: SessionRow, tokens: bytes) -> bool:
    """True where a response's prompt goes on with a conversation, or the conversation's packed `tokens` with it."""
    is_next = _begins_with(row.tokens, session.turn_end, session.turn_digest)
    return row.root == session.root and (is_next or _begins_with(tokens, row.turn_end, row.turn_digest))


def _begins_with(tokens: bytes, count: int, digest: bytes) -> bool:
    return 0 < count * TOKEN_BYTES <= len(tokens) and digest_prefix(tokens, count) == digest


def list_responses(tables: Tables) -> Iterator[tuple[bytes, ResponseRow]]:
    """Responses with their keys, oldest first."""
    return ((key, _decode(value)) for key, value in tables.items("responses"))


# ---- lookups


def find_response(tables: Tables, owner: str, answer_id: str) -> ResponseRow | None:
    """The owner's response of that id."""
    row = _read_row(tables, owner, tables.get("response_ids", id_key(owner, answer_id)))
    return row if row and row.id == answer_id else None


def has_response(tables: Tables, owner: str, answer_id: str) -> bool:
    """True for a stored response, damaged or not."""
    return tables.get("response_ids", id_key(owner, answer_id)) is not None


def find_holder(tables: Tables, owner: str, item_id: str) -> ResponseRow | None:
    """The owner's newest response that has an item."""
    return _read_row(tables, owner, tables.last_number("holders", id_key(owner, item_id)))


def _read_row(tables: Tables, owner: str, key: bytes | None) -> ResponseRow | None:
    value = tables.get("responses", key) if key else None
    row = _decode(value) if value else None
    return row if row and row.owner == owner else None


def get_body(tables: Tables, row: ResponseRow) -> ResponseBody | None:
    """Body of the response, compressed; possibly damaged.  None where it is missing."""
    key = tables.get("response_ids", id_key(row.owner, row.id))
    data = tables.get("response_bodies", key) if key else None
    return ResponseBody(data) if data else None


def read_body(tables: Tables, key: bytes) -> bytes | None:
    """Body of a response; None where it is missing or damaged."""
    try:
        return zlib.decompress(tables.get("response_bodies", key) or b"")
    except zlib.error as error:
        log.warning("a stored response is damaged, and is not used: %s", error)
        return None


# ---- changes


def put_response(tables: Tables, entry: ResponseEntry, limits: ResponseLimits, now: float) -> None:
    """Store a response, in the place of one with the same id, and evict the oldest ones above the limits.

    One that is larger than all may be is not stored.
    """
    delete_response(tables, *entry.key)
    body = zlib.compress(entry.body, COMPRESSION_LEVEL)
    row = msgspec.structs.replace(entry.row, bytes_body=len(body))
    if count_bytes(row) <= limits.bytes_max:
        insert_response(tables, tables.next_key("responses"), row, body)
    evict_responses(tables, limits, now)


def insert_response(tables: Tables, key: bytes, row: ResponseRow, body: bytes) -> None:
    """Insert a response with its compressed body."""
    own, items = split_keys(row)
    tables.put("responses", key, _encode(row))
    tables.put("response_bodies", key, body)
    tables.put("response_ids", own, key)
    for item in items:
        tables.put("holders", item + key, b"")
    tables.add_to_sums(responses=1, bytes_responses=count_bytes(row))


def set_session(tables: Tables, owner: str, answer_id: str, session: str) -> None:
    """Note the conversation of a response, whose prompt is not needed any more."""
    key = tables.get("response_ids", id_key(owner, answer_id))
    if key and (value := tables.get("responses", key)):
        row = _decode(value)
        tables.put("responses", key, _encode(msgspec.structs.replace(row, session=session, tokens=b"")))
        tables.add_to_sums(bytes_responses=-len(row.tokens))


def delete_response(tables: Tables, owner: str, answer_id: str) -> bool:
    """Delete the owner's response of that id; False where none is stored."""
    key = tables.get("response_ids", id_key(owner, answer_id))
    value = tables.get("responses", key) if key else None
    if key and value:
        remove_response(tables, key, _decode(value))
    return bool(key and value)


def remove_response(tables: Tables, key: bytes, row: ResponseRow) -> None:
    own, items = split_keys(row)
    tables.delete("responses", key)
    tables.delete("response_bodies", key)
    if tables.get("response_ids", own) == key:
        tables.delete("response_ids", own)
    for item in items:
        tables.delete("holders", item + key)
    tables.add_to_sums(responses=-1, bytes_responses=-count_bytes(row))


def evict_responses(tables: Tables, limits: ResponseLimits, now: float) -> int:
    """Remove the oldest responses until the limits hold; how many."""
    count = 0
    while (oldest := next(list_responses(tables), None)) and _is_excess(tables, oldest[1], limits, now):
        remove_response(tables, *oldest)
        count += 1
    return count


def has_excess(tables: Tables, limits: ResponseLimits, now: float) -> bool:
    """True where `evict_responses` would remove one."""
    oldest = next(list_responses(tables), None)
    return oldest is not None and _is_excess(tables, oldest[1], limits, now)


def is_expired(row: ResponseRow, limits: ResponseLimits, now: float) -> bool:
    return row.at < now - limits.age_max_s


def _is_excess(tables: Tables, oldest: ResponseRow, limits: ResponseLimits, now: float) -> bool:
    return limits.is_off or is_expired(oldest, limits, now) or tables.sums().bytes_responses > limits.bytes_max
