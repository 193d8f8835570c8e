"""Files by which other programs find a running process: written as soon as the disk takes them."""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from warmline_common.storage import disk
from warmline_common.storage.home import Home

log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 5.0


def describe_process(home: Home, port: int) -> dict[Path, str]:
    """Texts of the files with this process's pid and port, of a backend or the keeper, by path."""
    pid = os.getpid()
    return {home.backend_state: json.dumps({"pid": pid, "port": port}), home.pid_file("backend"): f"{pid}\n"}


class ProcessFiles:
    """Files of this process, with its pid and port, by path; `more` are writes of its own, each repeatable.

    A full or read-only disk may recover: what fails is tried again until it is done.  Event loop thread.
    """

    def __init__(self, texts: Mapping[Path, str], more: Sequence[Callable[[], None]] = ()) -> None:
        self._paths = list(texts)
        self._missing: list[Callable[[], None]] = [partial(disk.replace_file, *each) for each in texts.items()]
        self._missing += more
        self._lock = threading.Lock()  # held while a thread writes
        self._is_logged = False
        self._retries: asyncio.Task[None] | None = None

    def write(self) -> None:
        """Write all, and begin to try again what fails."""
        if not self._write_missing():
            self._retries = asyncio.create_task(self._retry())

    def delete(self) -> None:
        """Delete the files, and try no more."""
        if self._retries is not None:
            self._retries.cancel()
        with self._lock, suppress(OSError):
            self._missing.clear()
            for path in self._paths:
                disk.delete(path)

    async def _retry(self) -> None:
        is_done = False
        while not is_done:
            await asyncio.sleep(RETRY_INTERVAL_S)
            is_done = await asyncio.to_thread(self._write_missing)

    def _write_missing(self) -> bool:
        """Write what is not written yet; True where nothing is missing any more."""
        with self._lock:
            self._missing = [write for write in self._missing if not self._try(write)]
            return not self._missing

    def _try(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except OSError as error:
            if not self._is_logged:
                log.warning("our process id could not be written down, which is tried again: %s", error)
            self._is_logged = True
            return False
        return True
