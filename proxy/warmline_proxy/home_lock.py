"""Lock of a home: one owner at a time, the proxy or a command that changes the index."""

from collections.abc import Iterator
from contextlib import contextmanager

from warmline_common.storage.file_lock import LockedError, process_lock
from warmline_common.storage.home import Home


class HomeLockedError(Exception):
    """Another process owns this home."""


@contextmanager
def home_lock(home: Home, wait_s: float = 0.0) -> Iterator[None]:
    """Hold `home.lock`.  Raises HomeLockedError, with the holder, after `wait_s`."""
    try:
        with process_lock(home.lock, wait_s):
            yield
    except LockedError as error:
        raise HomeLockedError(f"{home.root} is in use by process {error.holder}, a proxy or cachectl") from None
