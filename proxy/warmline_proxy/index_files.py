"""The files that the index accounts for: deleting, setting aside, listing, and who may read them."""

import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from warmline_wire import disk
from warmline_wire.home import Home

log = logging.getLogger(__name__)

QUARANTINE = "quarantine"
SUFFIX = ".safetensors"
FILE_ID = re.compile("[0-9a-f]{32}")


def quarantine_file(home: Home, file_id: str) -> Path:
    return home.segments / QUARANTINE / f"{file_id}{SUFFIX}"


def size_aside(home: Home, file_id: str) -> int | None:
    """Of a file that was set aside, or is on its way there; None where it is gone."""
    for path in (quarantine_file(home, file_id), home.segment_file(file_id)):
        with suppress(FileNotFoundError):
            return path.stat().st_size
    return None


def delete(home: Home, file_id: str) -> None:
    disk.delete(home.segment_file(file_id))
    disk.delete(quarantine_file(home, file_id))


def deleted(home: Home, file_id: str) -> bool:
    """Delete it; False where the disk doesn't let it go."""
    try:
        delete(home, file_id)
    except OSError as error:
        log.info("%s could not be deleted: %s", file_id, error)
        return False
    return True


def set_aside(home: Home, ids: Iterable[str]) -> None:
    """Idempotent: what is aside, or gone, stays so."""
    disk.make_folders(home.segments / QUARANTINE)
    for file_id in ids:
        path = home.segment_file(file_id)
        if path.exists():
            disk.rename(path, quarantine_file(home, file_id))


def stored(home: Home) -> Iterator[tuple[str, Path]]:
    """(id, path) of each segment and checkpoint file in its place; id "" for what is none (a temporary file)."""
    aside_folder = home.segments / QUARANTINE
    for path in _files_below(home.segments):
        if not path.is_relative_to(aside_folder):
            yield _id_at(path, home.segment_file), path


def aside(home: Home) -> Iterator[tuple[str, Path]]:
    """The same of the files that were set aside."""
    for path in _files_below(home.segments / QUARANTINE):
        yield _id_at(path, lambda file_id: quarantine_file(home, file_id)), path


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def _id_at(path: Path, place: Callable[[str], Path]) -> str:
    return path.stem if FILE_ID.fullmatch(path.stem) and place(path.stem) == path else ""


def superseded(index: Iterable[Path]) -> list[Path]:
    """Of what lies in the index's folder, all but the newest generation: what a compaction left that was killed."""
    paths = list(index)
    newest = max((int(path.name) for path in paths if path.name.isdigit()), default=0)
    return [path for path in paths if path.name != str(newest)]


def too_open(home: Home) -> Iterator[tuple[Path, int]]:
    """Folders and files with what was said or computed that others than their owner may use, and their mode."""
    paths = [home.root / "secret", home.index, home.segments, *home.index.rglob("*"), *home.segments.rglob("*")]
    for path in paths:
        with suppress(FileNotFoundError):
            mode = stat.S_IMODE(path.lstat().st_mode)
            if mode & 0o077 or mode & 0o600 != 0o600:
                yield path, mode


def make_private(home: Home) -> list[Path]:
    """Set what `too_open` has found; the paths."""
    found = [path for path, _ in too_open(home)]
    for path in found:
        disk.set_mode(path, 0o700 if path.is_dir() else 0o600)
    return found
