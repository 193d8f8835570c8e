"""Disk operations of `warmline_common.storage.disk`, counted, killed at, or made to fail."""

import contextlib
import errno
import functools
import json
import os
import signal
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

CHANGES = (
    "create",
    "write",
    "write_at",
    "sync",
    "sync_folder",
    "rename",
    "link",
    "delete",
    "delete_folder",
    "make_folder",
    "set_mode",
    "allocate",
    "run_lmdb",
)
READS = "open_to_read"


class DiskWrapper(Protocol):
    """Replacement of a disk operation: called with its name, the real function, and its arguments."""

    def __call__(self, name: str, real: Callable[..., Any], *arguments: Any) -> Any: ...


def wrap_operations(disk: Any, wrapper: DiskWrapper) -> None:
    """Replace every operation of the module by `around`."""
    for name in (*CHANGES, READS):
        setattr(disk, name, functools.partial(wrapper, name, getattr(disk, name)))


def list_paths(arguments: tuple[Any, ...]) -> list[str]:
    """List the paths of an operation; of LMDB its description."""
    named = [each.name if isinstance(each, FileIO) else each for each in arguments]
    return [str(each) for each in named if isinstance(each, str | Path)]


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_self_at(when: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Kill this process before, after or in the middle of an operation."""
    if when == "after":
        real(*arguments)
    elif when == "middle" and real.__name__ == "write":
        file, data = arguments
        real(file, bytes(data)[: len(data) // 2])
    kill_self()


class DiskFaults:
    """Faults ordered by the file `disk-PROCESS`, while it exists.  Any thread."""

    def __init__(self, folder: Path, process: str) -> None:
        self._path = folder / f"disk-{process}"
        self._lock = threading.Lock()
        self._number = -1
        self._match_count = 0

    def __call__(self, name: str, real: Callable[..., Any], *arguments: Any) -> Any:
        order = self._read_order()
        if order and self._matches(order, name, arguments):
            with self._lock:
                self._match_count = self._match_count + 1 if order["number"] == self._number else 1
                self._number, met = order["number"], self._match_count
            if met == order.get("kill"):
                self._path.rename(self._path.with_name(f"{self._path.name}-taken"))
                kill_self_at(order["when"], real, arguments)
            if met == order.get("lose"):
                Path(arguments[0]).unlink()
            if "error" in order and not met > order["times"] > 0:
                return self._fail(order["error"], name, arguments)
        return real(*arguments)

    def _read_order(self) -> Any:
        with contextlib.suppress(FileNotFoundError):
            return json.loads(self._path.read_text())
        return None

    def _matches(self, order: Any, name: str, arguments: tuple[Any, ...]) -> bool:
        if name not in (order["steps"] or CHANGES):
            return False
        return any(order.get("under", "") in target for target in list_paths(arguments))

    def _fail(self, error: str, name: str, arguments: tuple[Any, ...]) -> Any:
        number = getattr(errno, error)
        if name == READS:
            return _UnreadableFile(number, arguments[0])
        raise OSError(number, os.strerror(number))


class _UnreadableFile(FileIO):
    """File that exists and can't be read."""

    def __init__(self, number: int, path: Path) -> None:
        super().__init__(path, "rb")
        self._error = OSError(number, os.strerror(number), str(path))

    def readinto(self, buffer: Any) -> int:
        raise self._error

    def read(self, size: int = -1) -> bytes:
        raise self._error

    def readall(self) -> bytes:
        raise self._error
