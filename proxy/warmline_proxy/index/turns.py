"""Sampled turns in the index: a row a turn under its number, and the number under each of its calls.

The oldest are evicted first.  A call is found under the namespace of its model and tenant, never another tenant's.
"""

import re
from collections.abc import Iterable, Iterator

import msgspec

from warmline_proxy.store.rows import TurnRow
from warmline_proxy.store.tables import Tables

TURNS_MAX = 20_000
TURN_BYTES_MAX = 64 << 20  # of all of them
CALL_ID = re.compile(r"call_[0-9a-f]{24}")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TurnRow).decode


def call_key(root: bytes, call_id: str) -> bytes:
    return root + bytes.fromhex(call_id.removeprefix("call_"))


def call_keys(row: TurnRow) -> list[bytes]:
    return [call_key(row.root, call_id) for call_id in row.calls]


def list_turns(tables: Tables) -> Iterator[tuple[bytes, TurnRow]]:
    """Turns with their keys, oldest first."""
    return ((key, _decode(value)) for key, value in tables.items("turns"))


def find_turn(tables: Tables, root: bytes, call_id: str) -> TurnRow | None:
    key = tables.get("calls", call_key(root, call_id))
    value = tables.get("turns", key) if key else None
    return _decode(value) if value else None


def put_turn(tables: Tables, row: TurnRow) -> None:
    """Insert a turn, in the place of one with the same calls, and evict the oldest ones above the limits."""
    key = next(filter(None, (tables.get("calls", call) for call in call_keys(row))), None)
    if key and (old := tables.get("turns", key)):
        remove_turn(tables, key, _decode(old))
    insert_turn(tables, key or tables.next_key("turns"), row)
    while (sums := tables.sums()).turns > TURNS_MAX or sums.bytes_turns > TURN_BYTES_MAX:
        if (oldest := next(list_turns(tables), None)) is None:
            return
        remove_turn(tables, *oldest)


def insert_turn(tables: Tables, key: bytes, row: TurnRow) -> None:
    tables.put("turns", key, _encode(row))
    for call in call_keys(row):
        tables.put("calls", call, key)
    tables.add_to_sums(turns=1, bytes_turns=len(row.tokens))


def remove_turn(tables: Tables, key: bytes, row: TurnRow) -> None:
    tables.delete("turns", key)
    for call in call_keys(row):
        if tables.get("calls", call) == key:
            tables.delete("calls", call)
    tables.add_to_sums(turns=-1, bytes_turns=-len(row.tokens))


def remove_turns(tables: Tables, rows: Iterable[tuple[bytes, TurnRow]]) -> None:
    for key, row in list(rows):
        remove_turn(tables, key, row)
