"""Exclusive locks between processes, by flock."""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from warmline_common.storage import disk
from warmline_common.storage.regular_file import open_regular

POLL_S = 0.05
READ_ONLY_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM)


class LockedError(Exception):
    """Another process holds the lock; `holder` is its pid as text, or "?"."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"in use by process {holder}")
        self.holder = holder


@contextmanager
def process_lock(path: Path, wait_s: float = 0.0) -> Iterator[Callable[[], None]]:
    """Hold the lock file, with this process's pid in it.  Raises LockedError after `wait_s`; OSError.

    The kernel releases the lock when its holder ends, however it ends.  Yields the write of the pid, which may be
    called again: it fails on a full disk.
    """
    try:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno not in READ_ONLY_ERRNOS:
            raise
        with _read_only_lock(path, wait_s):
            yield lambda: None
        return
    write_pid = partial(disk.overwrite_open, descriptor, f"{os.getpid()}\n".encode())
    try:
        _acquire(descriptor, time.monotonic() + wait_s)
        with suppress(OSError):  # of a full disk, which the holder may be about to free
            write_pid()
        yield write_pid
    finally:
        os.close(descriptor)


class InstanceLock:
    """Lock of one backend among several, whose keeper sees to it that there are no two: it is for other programs.

    So it is done without while a full disk takes no new file; `complete` it later.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._held = path, ExitStack()
        self._write_pid: Callable[[], None] | None = None  # once it is held

    @contextmanager
    def hold(self, wait_s: float) -> Iterator[None]:
        """Hold the lock file where that is possible.  Raises LockedError after `wait_s`; OSError."""
        with self._held:
            try:
                self._take(wait_s)
            except OSError as error:
                if error.errno not in disk.NO_SPACE_ERRNOS:
                    raise
            yield

    def complete(self) -> None:
        """Have the file, held and with this process's pid.  Raises OSError."""
        if self._write_pid is None:
            with suppress(LockedError):  # a reader looks at it just now
                self._take(0.0)
        if self._write_pid is None:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(self._path))
        self._write_pid()

    def _take(self, wait_s: float) -> None:
        self._write_pid = self._held.enter_context(process_lock(self._path, wait_s))


def find_lock_holder(path: Path) -> str:
    """Pid of the lock file's holder as text; "" where there is none, or where it is unknown.  Writes nothing."""
    try:
        descriptor = open_regular(path, os.O_RDONLY)
    except OSError:  # never held, or not readable for us
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_pid(descriptor)
    except OSError:  # a disk without locks: no process can hold one there
        return ""
    finally:
        os.close(descriptor)
    return ""


def read_pid(file: Path) -> int | None:
    """Pid in a process's file; None where there is none."""
    with suppress(OSError, ValueError):
        return int(disk.read_file(file))
    return None


def is_process_alive(pid: int) -> bool:
    """True where a process has this pid."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True


@contextmanager
def _read_only_lock(path: Path, wait_s: float) -> Iterator[None]:
    """Lock an existing file of a read-only home, if there is one."""
    try:
        descriptor = open_regular(path, os.O_RDONLY)
    except FileNotFoundError:  # never held, and no process can write what it guards
        yield
        return
    try:
        _acquire(descriptor, time.monotonic() + wait_s)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise LockedError(_read_pid(descriptor)) from None
            time.sleep(POLL_S)  # flock has no timeout, and no event to wait for


def _read_pid(descriptor: int) -> str:
    return os.pread(descriptor, 32, 0).decode(errors="replace").partition("\n")[0].strip() or "?"
