"""Room that is set aside on the disk: where that is full, the index can still be told of files that go.

LMDB writes changed pages to new places, so a deletion takes room before it gives any.
"""

import logging
from contextlib import suppress

from warmline_common.storage import disk
from warmline_common.storage.home import Home

SPARE_BYTES = 8 << 20  # a segment of 8,192 tokens has its blocks in up to 128 pages

log = logging.getLogger(__name__)


def keep(home: Home) -> None:
    """Have it, from now on.  Where the disk has no room for it, that is tried again by who calls next."""
    try:
        if not is_whole(home):
            disk.allocate(home.spare, SPARE_BYTES)
    except OSError as error:
        log.info("no room could be set aside: %s", error)
        with suppress(OSError):
            disk.delete(home.spare)


def is_whole(home: Home) -> bool:
    """Not where a process was killed as it made it."""
    return home.spare.exists() and home.spare.stat().st_size >= SPARE_BYTES


def give_up(home: Home) -> bool:
    """Whether there was any, and it is free now."""
    try:
        if not home.spare.exists():
            return False
        disk.delete(home.spare)
    except OSError:
        return False
    return True
