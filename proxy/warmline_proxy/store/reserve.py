"""Reserved space on the disk: where that is full, the index can still record deletions.

LMDB writes changed pages to new places, so a deletion takes space before it frees any.
"""

import logging
from contextlib import suppress

from warmline_common.storage import disk
from warmline_common.storage.home import Home

RESERVE_BYTES = 8 << 20  # a segment of 8,192 tokens has its blocks in up to 128 pages

log = logging.getLogger(__name__)


def allocate_reserve(home: Home) -> bool:
    """Allocate the reserve where it is not complete; False where the disk has no space for it."""
    try:
        if not home.reserve.exists() or home.reserve.stat().st_size < RESERVE_BYTES:  # less: killed as it was allocated
            disk.allocate(home.reserve, RESERVE_BYTES)
    except OSError as error:
        log.info("no space could be reserved: %s", error)
        with suppress(OSError):
            disk.delete(home.reserve)
        return False
    return True


def release_reserve(home: Home) -> bool:
    """True where a reserve existed; its space is free now."""
    try:
        if not home.reserve.exists():
            return False
        disk.delete(home.reserve)
    except OSError:
        return False
    return True
