"""Whether what is computed can be saved, and who hears of it: the log once, /health and the metrics at any time.

While saving fails it is tried again, but not by every request.  Serving goes on meanwhile.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable

from warmline_proxy.index.index import Index, IndexFailure
from warmline_proxy.metrics import Metrics

log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 5.0
OK = "ok"

FILES, INDEX, RECORDS = "segments/", "index/", "request records"  # what may fail by itself


class Persistence:
    """Told by who saves, of each part, whether it worked.  Any thread."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        retry_interval_s: float = RETRY_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics, self._retry_interval_s, self._clock = metrics, retry_interval_s, clock
        self._lock = threading.Lock()
        self._failing: dict[str, str] = {}  # part -> why
        self._since = 0.0
        self._retry_at = 0.0

    def watch(self, index: Index) -> None:
        """Hear of what the index writes by itself, and how it is now."""
        index.on_records = self._heard
        if index.read_only:
            self.failed(INDEX, index.read_only_code, index.read_only)

    def _heard(self, error: IndexFailure | None) -> None:
        if error is None:
            self.worked(RECORDS)
        else:
            self.failed(RECORDS, error.code or "index", str(error))

    @property
    def state(self) -> str:
        """ "ok", or why what is computed can't be saved."""
        with self._lock:
            return "; ".join(f"{part}: {why}" for part, why in self._failing.items()) or OK

    def may_try(self) -> bool:
        """Whether to save now.  While that fails: yes once in an interval, to whoever asks first."""
        with self._lock:
            if not self._failing:
                return True
            if self._clock() < self._retry_at:
                return False
            self._retry_at = self._clock() + self._retry_interval_s
            return True

    def failed(self, part: str, code: str, detail: str) -> None:
        """`code`: the system's name of the error, or a word of ours; `detail`: for people."""
        self._metrics.save_failures.labels(reason=code).inc()
        why = f"{os.strerror(getattr(errno, code))} ({code})" if hasattr(errno, code) else code
        with self._lock:
            news = self._failing.get(part) != why
            if not self._failing:
                self._since = self._clock()
            if part not in self._failing:
                self._retry_at = self._clock() + self._retry_interval_s
            self._failing[part] = why
            self._metrics.persistent.set(0)
        if news:
            log.error(
                "what is computed can't be saved: %s: %s: %s; serving goes on, and saving is tried again every %g s",
                part, why, detail, self._retry_interval_s,
            )  # fmt: skip

    def worked(self, *parts: str) -> None:
        with self._lock:
            was_failing = bool(self._failing)
            for part in parts:
                self._failing.pop(part, None)
            over = was_failing and not self._failing
            if over:
                self._metrics.persistent.set(1)
        if over:
            log.warning("saving works again, after %.0f s", self._clock() - self._since)
