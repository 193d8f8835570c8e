"""One owner of a home at a time: the proxy, or whoever changes the index while no proxy runs."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from warmline_wire.home import Home

POLL_S = 0.05


class HomeLocked(Exception):
    """Another process owns this home."""


@contextmanager
def home_lock(home: Home, wait_s: float = 0.0) -> Iterator[None]:
    """Hold `home.lock`, and write our pid in it.  Raises HomeLocked, naming the holder, after `wait_s`.

    The kernel frees it when the holder dies, however it does.
    """
    descriptor = os.open(home.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _acquire(descriptor, home, time.monotonic() + wait_s)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, home: Home, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                holder = os.pread(descriptor, 32, 0).decode().strip()
                raise HomeLocked(f"{home.root} is in use by process {holder or '?'}, a proxy or cachectl") from None
            time.sleep(POLL_S)  # flock has no timeout, and no event to wait for
