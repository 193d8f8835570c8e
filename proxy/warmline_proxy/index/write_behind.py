"""Buffer of requests' bookkeeping until it is written to the index."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from warmline_proxy.index.responses import ResponseEntry, ResponseLimits, put_response, set_session
from warmline_proxy.index.turns import put_turn
from warmline_proxy.store.errors import IndexStoreError
from warmline_proxy.store.rows import FileUsage, RequestRecord, ResponseRow, TurnRow
from warmline_proxy.store.tables import REQUESTS_MAX, Tables

PENDING_MAX = 256  # of a kind; more are written before the next tick
RESPONSE_BYTES_MAX = 64 << 20  # of responses that can't be written; the oldest are dropped
ResponseKey = tuple[str, str]  # owner and id


@dataclass
class _Pending:
    uses: dict[str, FileUsage] = field(default_factory=dict)
    records: list[RequestRecord] = field(default_factory=list)
    audits: dict[str, tuple[str, str]] = field(default_factory=dict)  # by request id: its record's audit and guard
    turns: dict[tuple[bytes, str], TurnRow] = field(default_factory=dict)  # by namespace and first call
    responses: dict[ResponseKey, ResponseEntry] = field(default_factory=dict)  # oldest first
    response_sessions: dict[ResponseKey, str] = field(default_factory=dict)

    def write(self, tables: Tables, limits: ResponseLimits) -> None:
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
        for response in self.responses.values():
            put_response(tables, response, limits, time.time())
        for key, session in self.response_sessions.items():
            set_session(tables, *key, session)


class WriteBehindBuffer:
    """Thread-safe; bounded.  Responses can be read from it until they are written."""

    def __init__(self, response_limits: ResponseLimits) -> None:
        self._response_limits = response_limits
        self._lock = threading.Lock()  # guards `_pending` and `_writing`
        self._pending = _Pending()
        self._writing: dict[ResponseKey, ResponseEntry] = {}  # responses that a flush is writing

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

    def record_response(self, entry: ResponseEntry) -> None:
        with self._lock:
            self._pending.responses.pop(entry.key, None)  # the newest one is the last
            self._pending.responses[entry.key] = entry
            self._drop_excess_responses()

    def record_response_session(self, key: ResponseKey, session: str) -> None:
        with self._lock:
            self._pending.response_sessions[key] = session

    def find_response(self, is_wanted: Callable[[ResponseEntry], bool]) -> ResponseEntry | None:
        """The newest of the responses that are not written yet."""
        with self._lock:
            entries = [*self._writing.values(), *self._pending.responses.values()]
        return next(filter(is_wanted, reversed(entries)), None)

    def drop_responses(self, is_dropped: Callable[[ResponseRow], bool]) -> int:
        """Drop responses that are not written yet; how many."""
        with self._lock:
            keys = [key for key, entry in self._pending.responses.items() if is_dropped(entry.row)]
            for key in keys:
                del self._pending.responses[key]
        return len(keys)

    def _drop_excess_responses(self) -> None:
        responses = self._pending.responses
        size = sum(entry.bytes_count for entry in responses.values())
        while len(responses) > 1 and (len(responses) > PENDING_MAX or size > RESPONSE_BYTES_MAX):
            size -= responses.pop(next(iter(responses))).bytes_count

    def clear(self) -> None:
        """Drop all but the responses, which clients may refer to."""
        with self._lock:
            self._pending = _Pending(responses=self._pending.responses)

    def _take(self) -> _Pending:
        with self._lock:
            pending, self._pending = self._pending, _Pending()
            self._writing = pending.responses
        return pending

    def flush(self, write: Callable[[Callable[[Tables], None]], None]) -> bool:
        """True where there was something to write.  Raises IndexStoreError; the next flush tries again."""
        pending = self._take()
        if pending == _Pending():
            return False
        try:
            write(lambda tables: pending.write(tables, self._response_limits))
        except IndexStoreError:
            self._requeue(pending)
            raise
        finally:
            with self._lock:
                self._writing = {}
        return True

    def _requeue(self, old: _Pending) -> None:
        with self._lock:
            new = self._pending
            new.responses = {**old.responses, **new.responses}
            new.response_sessions = dict(
                list({**old.response_sessions, **new.response_sessions}.items())[-PENDING_MAX:]
            )
            self._drop_excess_responses()
            for file_id, use in list(old.uses.items())[:PENDING_MAX]:
                newer = new.uses.setdefault(file_id, use)
                if newer is not use:
                    newer.hits += use.hits
            new.records = [*old.records, *new.records][-REQUESTS_MAX:]
            new.audits = dict(list({**old.audits, **new.audits}.items())[-REQUESTS_MAX:])
            new.turns = dict(list({**old.turns, **new.turns}.items())[-PENDING_MAX:])
