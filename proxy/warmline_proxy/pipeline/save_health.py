"""Health of saving: logged at each change, read by /health and the metrics.

While saving fails it is retried once in an interval, not by every request.  Serving goes on meanwhile.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.metrics import ProxyMetrics

log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 5.0
OK = "ok"

FILES, INDEX, RECORDS = "segments/", "index/", "request records"  # parts that fail by themselves


@dataclass(eq=False)
class SaveHealth:
    """Failures of saves, by part of the home.  Any thread."""

    metrics: ProxyMetrics
    retry_interval_s: float = RETRY_INTERVAL_S
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _failures: dict[str, str] = field(default_factory=dict, init=False)  # part -> why
    _failing_since: float = field(default=0.0, init=False)
    _retry_at: float = field(default=0.0, init=False)

    def watch_index(self, index: Index) -> None:
        """Record the state of the index, and results of its own flushes."""
        index.on_flush = self._on_records_written
        if index.read_only:
            self.record_failure(INDEX, index.read_only_code, index.read_only)

    def _on_records_written(self, error: IndexStoreError | None) -> None:
        if error is None:
            self.record_success(RECORDS)
        else:
            self.record_failure(RECORDS, error.code or "index", str(error))

    @property
    def state(self) -> str:
        """ "ok", or the failing parts with their reasons."""
        with self._lock:
            return "; ".join(f"{part}: {why}" for part, why in self._failures.items()) or OK

    def can_save(self) -> bool:
        """True if saving works; while it fails, once in an interval."""
        with self._lock:
            if not self._failures:
                return True
            if self.clock() < self._retry_at:
                return False
            self._retry_at = self.clock() + self.retry_interval_s
            return True

    def record_failure(self, part: str, code: str, detail: str) -> None:
        """`code`: the system's name of the error, or a word of ours; `detail`: for the log."""
        self.metrics.save_failures.labels(reason=code).inc()
        why = f"{os.strerror(getattr(errno, code))} ({code})" if hasattr(errno, code) else code
        with self._lock:
            is_new = self._failures.get(part) != why
            if not self._failures:
                self._failing_since = self.clock()
            if part not in self._failures:
                self._retry_at = self.clock() + self.retry_interval_s
            self._failures[part] = why
            self.metrics.persistent.set(0)
        if is_new:
            log.error(
                "KV can't be saved: %s: %s: %s; serving continues, and saving is tried again every %g s",
                part, why, detail, self.retry_interval_s,
            )  # fmt: skip

    def record_success(self, *parts: str) -> None:
        with self._lock:
            was_failing = bool(self._failures)
            for part in parts:
                self._failures.pop(part, None)
            is_recovered = was_failing and not self._failures
            if is_recovered:
                self.metrics.persistent.set(1)
        if is_recovered:
            log.warning("saving works again, after %.0f s", self.clock() - self._failing_since)
