"""Backends of an earlier keeper: they end by themselves when it has died, and hold memory and files until then."""

import asyncio
import logging
from contextlib import suppress

from warmline_common.storage import disk
from warmline_common.storage.drafts import delete_drafts
from warmline_common.storage.file_lock import LockedError, find_lock_holder, process_lock
from warmline_common.storage.home import Home

log = logging.getLogger(__name__)

POLL_S = 0.1  # locks have no event to wait for


async def wait_for_earlier_processes(home: Home) -> None:
    """Wait until no backend holds its lock, however long its requests take; then delete what they left behind."""
    logged = False
    while held := await asyncio.to_thread(_list_holders, home):
        if not logged:
            log.warning("waiting for backends of an earlier start to end: %s", ", ".join(held))
            logged = True
        await asyncio.sleep(POLL_S)
    if deleted := await asyncio.to_thread(delete_drafts, home.segments):
        log.info("%d drafts of an earlier start are deleted", deleted)
    await asyncio.to_thread(delete_process_files, home)


def _list_holders(home: Home) -> list[str]:
    locks = sorted(home.run.glob("backend-*.lock"))
    return [f"{lock.name} of process {holder}" for lock in locks if (holder := find_lock_holder(lock))]


def delete_process_files(home: Home) -> None:
    """Delete the pid and state files of all backends that don't run, configured or not: killed ones leave them.

    Their locks are held meanwhile, and stay: another process may have opened one to wait for it.
    """
    files = (file for pattern in ("backend-*.pid", "backend-*.json") for file in home.run.glob(pattern))
    for instance in sorted({file.stem.removeprefix("backend-") for file in files}):
        backend = Home(home.root, instance)
        with suppress(LockedError, OSError), process_lock(backend.backend_lock):
            disk.delete(backend.pid_file("backend"))
            disk.delete(backend.backend_state)
