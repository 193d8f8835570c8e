"""Logs of the services: last lines and added ones, through rotations."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from warmline_common.storage import disk
from warmline_run.services.service import log_file, output_file

TAIL_BYTES_MAX = 4_000_000  # of one file
READ_BYTES_MAX = 1_000_000
POLL_S = 0.25


def list_log_files(home: Path, roles: Iterable[str]) -> list[Path]:
    """Log files of the roles: output of ended or crashed processes, and the processes' own logs.

    The backend's include those of the keeper of several models, and of each model's backend that has run.
    """
    files: list[Path] = []
    for role in roles:
        files += [output_file(home, role), log_file(home, role)]
        if role == "backend":
            files += [log_file(home, "keeper"), *sorted((home / "logs").glob("backend-*.log"))]
    return files


def read_last_lines(path: Path, count: int) -> list[str]:
    """At most `count` lines without their ends, also of the rotated file, where the present one has fewer."""
    lines = _read_tail(path, count)
    return [*_read_tail(path.with_name(f"{path.name}.1"), count - len(lines)), *lines]


def _read_tail(path: Path, count: int) -> list[str]:
    with suppress(OSError), BufferedReader(disk.open_to_read(path)) as file:
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES_MAX))
        return file.read().decode(errors="replace").splitlines()[-count:] if count else []
    return []


def show(paths: Sequence[Path], count: int, write: Callable[[str], None]) -> bool:
    """Write the last lines of each, under its name where there are several.  False where all are missing or empty."""
    tails = [(path, lines) for path in paths if (lines := read_last_lines(path, max(count, 1)))]
    for path, lines in tails:
        heading = f"==> {path} <==\n" if len(tails) > 1 else ""
        write(heading + "".join(f"{line}\n" for line in (lines if count else [])))
    return bool(tails)


class LogFollower:
    """Reader of a log from its present end on; a file that takes its name, or begins anew, is read from its start.

    `from_start`: so is the present one.
    """

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        if from_start:
            return
        with suppress(OSError):
            self._file = BufferedReader(disk.open_to_read(path))
            self._file.seek(0, 2)

    def read_added(self) -> str:
        """Text added since the last call; "" for none."""
        added = self._read_rest()
        if self._is_replaced():
            added += self._read_rest()  # written before the file was replaced
            self.close()
            with suppress(OSError):
                self._file = BufferedReader(disk.open_to_read(self.path))
            added += self._read_rest()
        return added.decode(errors="replace")

    def _read_rest(self) -> bytes:
        return self._file.read(READ_BYTES_MAX) if self._file else b""

    def _is_replaced(self) -> bool:
        """True where another file has the name, or the file is shorter than its part that was read."""
        try:
            now = self.path.stat()
        except OSError:
            return False
        if self._file is None:
            return True
        old = os.fstat(self._file.fileno())
        return (now.st_dev, now.st_ino) != (old.st_dev, old.st_ino) or now.st_size < self._file.tell()

    def close(self) -> None:
        if self._file:
            self._file.close()
        self._file = None


def follow(
    list_paths: Callable[[], Iterable[Path]], write: Callable[[str], None], is_over: Callable[[], bool] = lambda: False
) -> None:
    """Write added lines until `is_over`, or an interrupt.  A heading names the file, whenever that changes.

    A path that `list_paths` has only later is followed from its start.
    """
    followers = {path: LogFollower(path) for path in list_paths()}
    last_path: Path | None = None
    while not is_over():
        followers |= {path: LogFollower(path, from_start=True) for path in list_paths() if path not in followers}
        for log in followers.values():
            if added := log.read_added():
                write((f"==> {log.path} <==\n" if log.path != last_path and len(followers) > 1 else "") + added)
                last_path = log.path
        time.sleep(POLL_S)
