"""Checks of single entries of the index: damage such as a flipped bit."""

from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any

import msgspec

from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_proxy.store.files import FILE_ID
from warmline_proxy.store.rows import IndexFinding
from warmline_proxy.store.tables import (
    DECODERS,
    DIGEST_BYTES,
    DIGEST_KEY,
    HASH_BYTES,
    SUMS_KEY,
    TABLES,
    Tables,
    decode_sums,
)

ID_BYTES = 16
SESSION_ID_BYTES = 12
NUMBER_BYTES = 8
CALL_BYTES = 12
ZLIB_HEADER = b"\x78"
CHILD_KEY_BYTES = 1 + ID_BYTES + 4 + TOKEN_BYTES


def find_flaws(tables: Tables) -> Iterator[IndexFinding]:
    for table in TABLES:
        for key, value in tables.items(table):
            if flaw := find_flaw(table, key, value):
                name = key.decode() if key.isascii() and key.decode().isprintable() else key.hex()
                yield IndexFinding(what="entry", id=name, detail=f"{table}: {flaw}")


def read_valid_entries(tables: Tables, table: str) -> dict[bytes, bytes]:
    """The entries of a table that have no flaw."""
    return {key: value for key, value in tables.items(table) if not find_flaw(table, key, value)}


def find_flaw(table: str, key: bytes, value: bytes) -> str:
    """Flaw of an entry; "" where there is none."""
    if table == "meta":
        return _find_meta_flaw(key, value)
    if table not in DECODERS:
        is_sound = _SHAPE_CHECKS[table](key, value)
        return "" if is_sound else f"an entry of {len(key)} and {len(value)} bytes makes no sense"
    try:
        row = DECODERS[table](value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"its row can't be read: {error}"
    if not all(map(_is_valid_value, msgspec.structs.astuple(row))):
        return "a number in its row makes no sense"
    return "" if _has_matching_key(table, key, row) else "its row has another key"


def _is_valid_value(value: object) -> bool:
    if isinstance(value, float):
        return isfinite(value)
    return not isinstance(value, int) or 0 <= value < 1 << 62


def _has_matching_key(table: str, key: bytes, row: Any) -> bool:
    if table in ("segments", "checkpoints", "quarantine"):
        return bool(key.hex() == row.id) and (table != "segments" or bool(row.start < row.end))
    if table == "sessions":
        return len(key) == SESSION_ID_BYTES and key == row.id.encode()
    if table == "turns":
        return len(key) == NUMBER_BYTES and len(row.tokens) % TOKEN_BYTES == 0
    if table == "responses":
        return len(key) == NUMBER_BYTES and not (len(row.items) % ID_BYTES or len(row.tokens) % TOKEN_BYTES)
    if table == "saves":
        return key == row.id.encode() and all(map(FILE_ID.fullmatch, row.file_ids))
    return len(key) == (NUMBER_BYTES if table == "requests" else ID_BYTES)


def _find_meta_flaw(key: bytes, value: bytes) -> str:
    if key == DIGEST_KEY and len(value) != DIGEST_BYTES:
        return f"a digest of {len(value)} bytes makes no sense"
    if key != SUMS_KEY:
        return ""  # the schema: an index of another one is not opened
    try:
        decode_sums(value)
    except msgspec.DecodeError as error:
        return f"its sums can't be read: {error}"
    return ""


def _is_child_key(key: bytes) -> bool:
    return len(key) == CHILD_KEY_BYTES and key[:1] in (b"s", b"r")


def _is_text(value: bytes) -> bool:
    try:
        return bool(value.decode())
    except UnicodeDecodeError:
        return False


_SHAPE_CHECKS: dict[str, Callable[[bytes, bytes], bool]] = {
    "tokens": lambda key, value: len(key) == ID_BYTES and len(value) % TOKEN_BYTES == 0,
    "children": lambda key, value: _is_child_key(key) and len(value) == ID_BYTES,
    "hashes": lambda key, value: len(key) == ID_BYTES and len(value) % HASH_BYTES == 0,
    "blocks": lambda key, value: len(key) == HASH_BYTES and len(value) == ID_BYTES,
    "places": lambda key, value: len(key) == ID_BYTES + NUMBER_BYTES and len(value) == ID_BYTES,
    "anchors": lambda key, value: len(key) == ID_BYTES + SESSION_ID_BYTES and not value,
    "doomed": lambda key, value: len(key) == ID_BYTES and len(value) == NUMBER_BYTES and value < b"\x40",
    "calls": lambda key, value: len(key) == ID_BYTES + CALL_BYTES and len(value) == NUMBER_BYTES,
    "gone": lambda key, value: _is_child_key(key) and _is_text(value),
    "response_bodies": lambda key, value: len(key) == NUMBER_BYTES and value.startswith(ZLIB_HEADER),
    "response_ids": lambda key, value: len(key) == ID_BYTES and len(value) == NUMBER_BYTES,
    "holders": lambda key, value: len(key) == ID_BYTES + NUMBER_BYTES and not value,
}
