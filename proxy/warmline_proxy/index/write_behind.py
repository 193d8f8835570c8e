"""Buffer of requests' bookkeeping until it is written to the index."""

import threading
import time
from collections.abc import Callable, Iterable

from warmline_proxy.index.turns import put_turn
from warmline_proxy.store.errors import IndexStoreError
from warmline_proxy.store.rows import FileUsage, RequestRecord, TurnRow
from warmline_proxy.store.tables import REQUESTS_MAX, Tables

PENDING_MAX = 256  # of a kind; then they are to be written early


class WriteBehindBuffer:
    """Thread-safe; bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the four below
        self._uses: dict[str, FileUsage] = {}
        self._records: list[RequestRecord] = []
        self._audits: dict[str, tuple[str, str]] = {}  # by request id: its record's audit and guard
        self._turns: dict[tuple[bytes, str], TurnRow] = {}  # by namespace and first call

    def record_use(self, ids: Iterable[str]) -> bool:
        """True where the buffer is large enough to be written now."""
        now = time.time()
        with self._lock:
            for file_id in ids:
                use = self._uses.setdefault(file_id, FileUsage())
                use.hits += 1
                use.last_used = now
            return len(self._uses) > PENDING_MAX

    def record_request(self, record: RequestRecord) -> bool:
        """As `note_use`."""
        with self._lock:
            self._records.append(record)
            return len(self._records) > PENDING_MAX

    def record_audit(self, request_id: str, audit: str, guard: str) -> None:
        with self._lock:
            self._audits[request_id] = audit, guard

    def record_turn(self, row: TurnRow) -> bool:
        """As `note_use`."""
        with self._lock:
            self._turns[row.root, row.calls[0]] = row
            return len(self._turns) > PENDING_MAX

    def clear(self) -> None:
        with self._lock:
            self._uses, self._records, self._audits, self._turns = {}, [], {}, {}

    def flush(self, write: Callable[[Callable[[Tables], None]], None]) -> bool:
        """True where there was something to write.  Raises IndexStoreError; the next flush tries again."""
        with self._lock:
            uses, self._uses = self._uses, {}
            records, self._records = self._records, []
            audited, self._audits = self._audits, {}
            turns, self._turns = self._turns, {}
        if not (uses or records or audited or turns):
            return False

        def change(tables: Tables) -> None:
            for file_id, use in uses.items():
                if tables.has_file(file_id):
                    hits = tables.usage(file_id).hits + use.hits
                    tables.put_usage(file_id, FileUsage(hits=hits, last_used=use.last_used))
            for record in records:
                tables.append_request(record)
            if audited:
                tables.record_audits(audited)
            for turn in turns.values():
                put_turn(tables, turn)

        try:
            write(change)
        except IndexStoreError:
            self._requeue(uses, records, audited, turns)
            raise
        return True

    def _requeue(
        self,
        uses: dict[str, FileUsage],
        records: list[RequestRecord],
        audits: dict[str, tuple[str, str]],
        turns: dict[tuple[bytes, str], TurnRow],
    ) -> None:
        with self._lock:
            for file_id, use in list(uses.items())[:PENDING_MAX]:
                newer = self._uses.setdefault(file_id, use)
                if newer is not use:
                    newer.hits += use.hits
            self._records = [*records, *self._records][-REQUESTS_MAX:]
            self._audits = dict(list({**audits, **self._audits}.items())[-REQUESTS_MAX:])
            self._turns = dict(list({**turns, **self._turns}.items())[-PENDING_MAX:])
