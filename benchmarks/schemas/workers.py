"""Items handled in processes of their own: one that crashes or hangs costs its item, and no other."""

import multiprocessing
import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

POLL_S = 0.5
RESTART_AFTER = 500  # items: bounds what compiled grammars hold

Failure = str  # why an item has no result


def run_items(
    handle: Callable[[Any], Any], items: Sequence[Any], *, process_count: int, timeout_s: float
) -> Iterator[tuple[Any, Any, Failure]]:
    """Yield each item with its result, or None and why, in the order in which they end."""
    waiting, done = queue.SimpleQueue[Any](), queue.SimpleQueue[tuple[Any, Any, Failure]]()
    for item in items:
        waiting.put(item)

    def drive() -> None:
        worker = _Worker(handle)
        while True:
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                worker.stop()
                return
            done.put((item, *worker.run(item, timeout_s)))
            if worker.failed or worker.count >= RESTART_AFTER:
                worker.stop()
                worker = _Worker(handle)

    for _ in range(process_count):
        threading.Thread(target=drive, daemon=True).start()
    for _ in items:
        yield done.get()


class _Worker:
    def __init__(self, handle: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, inner = context.Pipe()
        self._process = context.Process(target=_serve, args=(handle, inner), daemon=True)
        self._process.start()
        inner.close()
        self.count, self.failed = 0, False

    def run(self, item: Any, timeout_s: float) -> tuple[Any, Failure]:
        self.count += 1
        self._connection.send(item)
        try:
            if not self._connection.poll(timeout_s):
                self.failed = True
                return None, f"no end within {timeout_s:.0f} s"
            result, failure = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self.failed = True
            return None, "the process died"
        return result, failure

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(handle: Callable[[Any], Any], connection: "Connection[Any, Any]") -> None:
    while True:
        item = connection.recv()
        try:
            answer = (handle(item), "")
        except Exception:  # noqa: BLE001  (reported with its item)
            answer = (None, traceback.format_exc(limit=-3)[-600:])
        connection.send(answer)
