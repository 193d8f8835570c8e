"""Pool of users of an open environment, which is closed, grown or replaced only while it has none."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from warmline_proxy.store.errors import IndexFullError, IndexStoreError, make_damage_error

DATA_FILE = "data.mdb"
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
    file_bytes: int = 0  # of the data file, when it was last seen

    def map_bytes(self) -> int:
        return int(self.env.info()["map_size"])

    def require_whole_file(self) -> None:
        """Raise IndexDamagedError where the data file became shorter: LMDB, which never cuts it, has it mapped, and the
        system ends a process that reads beyond a mapped file's end.
        """
        known = self.file_bytes
        try:
            now = (self.path / DATA_FILE).stat().st_size
        except OSError:  # of a compacted generation, which is open and has no name any more; or there is none
            return
        if now < known:
            raise make_damage_error(self.path, f"its file was cut from {known} to {now} bytes")
        self.file_bytes = now


class EnvironmentPool:
    """Access to the current generation.  Thread-safe; `acquire_exclusive` and `swap` are for one thread at a time."""

    def __init__(self, current: EnvironmentGeneration) -> None:
        self.current = current
        self._lock = threading.Condition()
        self._is_exclusive_wanted = False
        self._thread_state = threading.local()  # `depth`: how often this thread has acquired it

    @contextmanager
    def acquire(self) -> Iterator[EnvironmentGeneration]:
        """Raises IndexStoreError where it is closed, could not be opened again, or its file was cut."""
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
            generation.require_whole_file()
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
