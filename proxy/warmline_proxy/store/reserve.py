"""Reserved space on the disk: where that is full, the index can still record deletions.

LMDB writes changed pages to new places, so a deletion takes space before it frees any.
"""

import logging
from contextlib import suppress

from warmline_common.storage import disk
from warmline_common.storage.home import Home

RESERVE_BYTES = 8 << 20  # a segment of 8,192 tokens has its blocks in up to 128 pages

log = logging.getLogger(__name__)


def allocate_reserve(home: Home) -> None:
    """Allocate the reserve where it is not complete; a later call tries again where the disk has no space for it."""
    try:
        if not is_reserve_complete(home):
            disk.allocate(home.reserve, RESERVE_BYTES)
    except OSError as error:
        log.info("no room could be set aside: %s", error)
        with suppress(OSError):
            disk.delete(home.reserve)


def is_reserve_complete(home: Home) -> bool:
    """False where a process was killed while it allocated the reserve."""
    return home.reserve.exists() and home.reserve.stat().st_size >= RESERVE_BYTES


def release_reserve(home: Home) -> bool:
    """True where a reserve existed; its space is free now."""
    try:
        if not home.reserve.exists():
            return False
        disk.delete(home.reserve)
    except OSError:
        return False
    return True
