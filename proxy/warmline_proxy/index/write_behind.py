"""Buffer of requests' bookkeeping until it is written to the index."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from warmline_proxy.index.turns import put_turn
from warmline_proxy.store.errors import IndexStoreError
from warmline_proxy.store.rows import FileUsage, RequestRecord, TurnRow
from warmline_proxy.store.tables import REQUESTS_MAX, Tables

PENDING_MAX = 256  # of a kind; more are written before the next tick


@dataclass
class _Pending:
    uses: dict[str, FileUsage] = field(default_factory=dict)
    records: list[RequestRecord] = field(default_factory=list)
    audits: dict[str, tuple[str, str]] = field(default_factory=dict)  # by request id: its record's audit and guard
    turns: dict[tuple[bytes, str], TurnRow] = field(default_factory=dict)  # by namespace and first call

    def write(self, tables: Tables) -> None:
        for file_id, use in self.uses.items():
            if tables.has_file(file_id):
                hits = tables.usage(file_id).hits + use.hits
                tables.put_usage(file_id, FileUsage(hits=hits, last_used=use.last_used))
        for record in self.records:
            tables.append_request(record)
        if self.audits:
            tables.record_audits(self.audits)
        for turn in self.turns.values():
            put_turn(tables, turn)


class WriteBehindBuffer:
    """Thread-safe; bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards `_pending`
        self._pending = _Pending()

    def record_use(self, ids: Iterable[str]) -> bool:
        """True where the buffer is large enough to be written now."""
        now = time.time()
        with self._lock:
            for file_id in ids:
                use = self._pending.uses.setdefault(file_id, FileUsage())
                use.hits += 1
                use.last_used = now
            return len(self._pending.uses) > PENDING_MAX

    def record_request(self, record: RequestRecord) -> bool:
        """As `record_use`."""
        with self._lock:
            self._pending.records.append(record)
            return len(self._pending.records) > PENDING_MAX

    def record_audit(self, request_id: str, audit: str, guard: str) -> None:
        with self._lock:
            self._pending.audits[request_id] = audit, guard

    def record_turn(self, row: TurnRow) -> bool:
        """As `record_use`."""
        with self._lock:
            self._pending.turns[row.root, row.calls[0]] = row
            return len(self._pending.turns) > PENDING_MAX

    def clear(self) -> None:
        self._take()

    def _take(self) -> _Pending:
        with self._lock:
            pending, self._pending = self._pending, _Pending()
        return pending

    def flush(self, write: Callable[[Callable[[Tables], None]], None]) -> bool:
        """True where there was something to write.  Raises IndexStoreError; the next flush tries again."""
        pending = self._take()
        if pending == _Pending():
            return False
        try:
            write(pending.write)
        except IndexStoreError:
            self._requeue(pending)
            raise
        return True

    def _requeue(self, old: _Pending) -> None:
        with self._lock:
            new = self._pending
            for file_id, use in list(old.uses.items())[:PENDING_MAX]:
                newer = new.uses.setdefault(file_id, use)
                if newer is not use:
                    newer.hits += use.hits
            new.records = [*old.records, *new.records][-REQUESTS_MAX:]
            new.audits = dict(list({**old.audits, **new.audits}.items())[-REQUESTS_MAX:])
            new.turns = dict(list({**old.turns, **new.turns}.items())[-PENDING_MAX:])
