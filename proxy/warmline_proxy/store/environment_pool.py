"""Pool of users of an open environment, which is closed, grown or replaced only while it has none."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from warmline_proxy.store.errors import IndexFullError, IndexStoreError

EXCLUSIVE_WAIT_S = 10.0  # readers take milliseconds, checking the whole index somewhat longer


class EmptyEnvironment(nullcontext[None]):
    """Environment, and its transactions, where there is no index and none can be made; without tables."""

    def begin(self) -> Self:
        return self

    def stat(self) -> dict[str, int]:
        return {"psize": 0}

    def info(self) -> dict[str, int]:
        return {"last_pgno": 0}

    def reader_check(self) -> int:
        return 0

    def abort(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class EnvironmentGeneration:
    """An open environment; closed when it is retired and its last transaction has ended."""

    path: Path
    env: Any
    handles: dict[str, Any]
    users: int = 0
    retired: bool = False
    lost: bool = False  # to be opened again before its next use

    def map_bytes(self) -> int:
        return int(self.env.info()["map_size"])


class EnvironmentPool:
    """Access to the current generation.  Thread-safe; `acquire_exclusive` and `swap` are for one thread at a time."""

    def __init__(self, current: EnvironmentGeneration) -> None:
        self.current = current
        self._lock = threading.Condition()
        self._is_exclusive_wanted = False
        self._thread_state = threading.local()  # `depth`: how often this thread has acquired it

    @contextmanager
    def acquire(self) -> Iterator[EnvironmentGeneration]:
        """Raises IndexStoreError where it is closed, or could not be opened again."""
        depth = getattr(self._thread_state, "depth", 0)
        with self._lock:
            if not depth:  # a thread with a use already would wait for itself
                self._lock.wait_for(lambda: not self._is_exclusive_wanted)
            generation = self.current
            if generation.retired or generation.lost:
                raise IndexStoreError("the index is closed" + ", and could not be opened again" * generation.lost)
            generation.users += 1
        self._thread_state.depth = depth + 1
        try:
            yield generation
        finally:
            self._thread_state.depth = depth
            with self._lock:
                generation.users -= 1
                if generation.retired and generation.users == 0:
                    generation.env.close()
                self._lock.notify_all()

    @contextmanager
    def acquire_exclusive(self) -> Iterator[EnvironmentGeneration]:
        """Wait for users to end; new ones wait meanwhile.  Raises IndexFullError where one does not end in time."""
        with self._lock:
            self._is_exclusive_wanted = True
            generation = self.current
            empty = self._lock.wait_for(lambda: not generation.users, EXCLUSIVE_WAIT_S)
        try:
            if not empty:
                raise IndexFullError("the index can't be changed while it is read for so long")
            yield generation
        finally:
            with self._lock:
                self._is_exclusive_wanted = False
                self._lock.notify_all()

    def swap(self, new: EnvironmentGeneration) -> EnvironmentGeneration:
        """Make `new` current for new users; returns the old generation, whose users finish with it."""
        with self._lock:
            old, self.current = self.current, new
        self._retire(old)
        return old

    def close(self) -> None:
        """Close; waits for users to end."""
        self._retire(self.current)
        with self._lock:
            self._lock.wait_for(lambda: not self.current.users, EXCLUSIVE_WAIT_S)

    def _retire(self, generation: EnvironmentGeneration) -> None:
        with self._lock:
            closing = not generation.retired and generation.users == 0
            generation.retired = True
        if closing:
            generation.env.close()
