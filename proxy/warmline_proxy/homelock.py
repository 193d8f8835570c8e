"""`home.lock`: whoever changes the index or deletes its files holds it, the proxy for as long as it lives."""

import fcntl
import os
from types import TracebackType
from typing import Self

from warmline_wire.home import Home


class HomeLocked(Exception):
    """Another process holds the home.  `pid` is 0 where it has not said."""

    def __init__(self, home: Home, pid: int) -> None:
        super().__init__(f"{home.root} is in use by process {pid or 'unknown'} (it holds {home.lock})")
        self.pid = pid


class HomeLock:
    """An exclusive flock, held from construction to `close`, or until the process dies, however it does."""

    def __init__(self, home: Home) -> None:
        """Raises HomeLocked at once where another holds it."""
        descriptor = os.open(home.lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).strip()
            os.close(descriptor)
            raise HomeLocked(home, int(holder) if holder.isdigit() else 0) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def close(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
