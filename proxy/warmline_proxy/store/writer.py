"""Writer thread: the owner of every write transaction of the index."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from warmline_proxy.store.errors import IndexStoreError

T = TypeVar("T")
log = logging.getLogger(__name__)


class WriterThread:
    """Runs submitted jobs one after the other, and `tick` every `interval_s` in between.  Thread-safe."""

    def __init__(self, tick: Callable[[], None], interval_s: float) -> None:
        self._tick = tick
        self._interval_s = interval_s
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="index-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Raises IndexStoreError once closed."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise IndexStoreError("the index is closed")
            self._jobs.put(lambda: _run_job(future, work))
        return future

    def close(self) -> None:
        """Close; waits for submitted jobs and a last tick."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic() + self._interval_s
        running = True
        while running:
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get(timeout=max(0.0, due - time.monotonic()))
                running = job is not None
                if job is not None:
                    job()
            if time.monotonic() >= due or not running:
                try:
                    self._tick()
                except Exception:  # must not end the thread, for which all writes wait
                    log.exception("the index's bookkeeping failed")
                due = time.monotonic() + self._interval_s


def _run_job(future: "Future[Any]", work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  whoever waits for the future gets it
        future.set_exception(error)
    else:
        future.set_result(result)
