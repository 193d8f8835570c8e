"""Exclusive locks between processes, by flock."""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
def process_lock(path: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock file, with this process's pid in it.  Raises LockedError after `wait_s`; OSError.

    The kernel releases the lock when its holder ends, however it ends.
    """
    try:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno not in READ_ONLY_ERRNOS:
            raise
        with _read_only_lock(path, wait_s):
            yield
        return
    try:
        _acquire(descriptor, time.monotonic() + wait_s)
        with suppress(OSError):  # of a full disk, which the holder may be about to free
            disk.overwrite_open(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)


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
