"""Draft of a rebuilt index in memory; only its differences are written to the index."""

from collections.abc import Iterator

import msgspec

from warmline_proxy.store.row_checks import find_flaw
from warmline_proxy.store.rows import Sums
from warmline_proxy.store.tables import DECODERS, SUMS_KEY, TABLES, Tables

NO_SUMS = msgspec.msgpack.encode(Sums())


class DraftTables(Tables):
    """Tables in memory.  Lookups by prefix are slow."""

    def __init__(self) -> None:
        super().__init__(None, {})
        self._entries: dict[str, dict[bytes, bytes]] = {table: {} for table in TABLES}

    def get(self, table: str, key: bytes) -> bytes | None:
        return self._entries[table].get(key)

    def put(self, table: str, key: bytes, value: bytes) -> None:
        self._entries[table][key] = value

    def delete(self, table: str, key: bytes) -> bool:
        return self._entries[table].pop(key, None) is not None

    def items(self, table: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        return iter(sorted(entry for entry in self._entries[table].items() if entry[0].startswith(prefix)))

    def count(self, table: str) -> int:
        return len(self._entries[table])

    def apply_to(self, tables: Tables) -> dict[str, int]:
        """Write the differences to `tables`; returns how many entries of each table differed."""
        self.add_to_sums()
        self.write_sums()
        changed = {table: self._apply_table(tables, table) for table in TABLES if table != "meta"}
        sums = self._entries["meta"][SUMS_KEY]
        if (tables.get("meta", SUMS_KEY) or NO_SUMS) != sums:
            tables.put("meta", SUMS_KEY, sums)
            changed["sums"] = 1
        return {table: count for table, count in changed.items() if count}

    def _apply_table(self, tables: Tables, table: str) -> int:
        new, old = self._entries[table], dict(tables.items(table))
        superfluous = old.keys() - new.keys()
        different = {key for key, value in new.items() if not _is_same_entry(table, key, value, old.get(key))}
        for key in superfluous:
            tables.delete(table, key)
        for key in different:
            tables.put(table, key, new[key])
        return len(superfluous) + len(different)


def _is_same_entry(table: str, key: bytes, expected: bytes, found: bytes | None) -> bool:
    """True also for a row that an older version wrote with fewer fields."""
    if found is None or expected == found or table not in DECODERS or find_flaw(table, key, found):
        return expected == found
    return bool(DECODERS[table](found) == DECODERS[table](expected))
