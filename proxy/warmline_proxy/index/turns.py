"""Sampled turns in the index: a row a turn under its number, and the number under each of its calls.  Oldest out first.

A call is found under the namespace of its model and tenant: nobody else's tokens are looked at.
"""

import re
from collections.abc import Iterable, Iterator

import msgspec

from warmline_proxy.store.rows import TurnRow
from warmline_proxy.store.tables import Tables, encode_number

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
    """With their keys, oldest first."""
    return ((key, _decode(value)) for key, value in tables.items("turns"))


def find_turn(tables: Tables, root: bytes, call_id: str) -> TurnRow | None:
    key = tables.get("calls", call_key(root, call_id))
    found = None if key is None else tables.get("turns", key)
    return None if found is None else _decode(found)


def put_turn(tables: Tables, row: TurnRow) -> None:
    """A turn that is known is written anew in its place."""
    key = next(filter(None, (tables.get("calls", call) for call in call_keys(row))), None)
    if key is not None and (old := tables.get("turns", key)) is not None:
        remove_turn(tables, key, _decode(old))
    insert_turn(tables, key or _next_key(tables), row)
    _evict_oldest(tables)


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


def _next_key(tables: Tables) -> bytes:
    return encode_number(int.from_bytes(tables.last_key("turns"), "big") + 1)


def _evict_oldest(tables: Tables) -> None:
    while (sums := tables.sums()).turns > TURNS_MAX or sums.bytes_turns > TURN_BYTES_MAX:
        oldest = next(list_turns(tables), None)
        if oldest is None:
            return
        remove_turn(tables, *oldest)
