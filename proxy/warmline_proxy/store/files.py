"""Files that the index accounts for: deletion, quarantine, listing, modes."""

import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from warmline_common.storage import disk
from warmline_common.storage.home import Home

log = logging.getLogger(__name__)

QUARANTINE_FOLDER = "quarantine"
SEGMENT_SUFFIX = ".safetensors"
FILE_ID = re.compile("[0-9a-f]{32}")


def quarantine_path(home: Home, file_id: str) -> Path:
    return home.segments / QUARANTINE_FOLDER / f"{file_id}{SEGMENT_SUFFIX}"


def read_quarantined_size(home: Home, file_id: str) -> int | None:
    """Bytes of a file that is in quarantine, or on its way there; None where it is gone."""
    for path in (home.segment_file(file_id), quarantine_path(home, file_id)):  # in the order of its move
        with suppress(FileNotFoundError):
            return path.stat().st_size
    return None


def try_delete_file(home: Home, file_id: str) -> bool:
    """Delete a file, in quarantine or not; False where the disk refuses."""
    try:
        disk.delete(home.segment_file(file_id))
        disk.delete(quarantine_path(home, file_id))
    except OSError as error:
        log.info("%s could not be deleted: %s", file_id, error)
        return False
    return True


def move_to_quarantine(home: Home, ids: Iterable[str]) -> None:
    """Move files into quarantine, but for those that are there, or gone."""
    disk.make_folders(home.segments / QUARANTINE_FOLDER)
    for file_id in ids:
        with suppress(FileNotFoundError):
            disk.rename(home.segment_file(file_id), quarantine_path(home, file_id))


def list_stored(home: Home) -> Iterator[tuple[str, Path]]:
    """(id, path) of each segment and checkpoint file in its place; id "" for other files (temporary ones)."""
    quarantine = str(home.segments / QUARANTINE_FOLDER)
    for folder, subfolders, names in os.walk(home.segments):
        subfolders[:] = [name for name in subfolders if f"{folder}/{name}" != quarantine]
        yield from _identify_files(folder, names, home.segment_file)


def list_quarantined(home: Home) -> Iterator[tuple[str, Path]]:
    """(id, path) of each file in quarantine, as `list_stored` gives them."""
    for folder, _, names in os.walk(home.segments / QUARANTINE_FOLDER):
        yield from _identify_files(folder, names, lambda file_id: quarantine_path(home, file_id))


def _identify_files(folder: str, names: Iterable[str], path_of: Callable[[str], Path]) -> Iterator[tuple[str, Path]]:
    for name in names:
        file_id = name.removesuffix(SEGMENT_SUFFIX)
        path = Path(folder, name)
        yield (file_id if FILE_ID.fullmatch(file_id) and path_of(file_id) == path else ""), path


def is_generation(path: Path) -> bool:
    """True for the name of a generation of the index."""
    return path.name.isascii() and path.name.isdigit()


def restore_access(index: Path) -> None:
    """Let the owner use the index's folder and all in it, after a copy or a command that took that away."""
    paths = [index.resolve()]
    while paths:
        path = paths.pop()
        mode = path.lstat().st_mode
        wanted = 0o700 if stat.S_ISDIR(mode) else 0o600 if stat.S_ISREG(mode) else 0
        if mode & wanted != wanted:
            disk.set_mode(path, stat.S_IMODE(mode) | wanted)
        if stat.S_ISDIR(mode):
            paths += path.iterdir()


def find_superseded(index: Iterable[Path]) -> list[Path]:
    """All paths in the index's folder but the newest generation: the rest of a compaction that was killed."""
    paths = list(index)
    newest = max((int(path.name) for path in paths if is_generation(path)), default=0)
    return [path for path in paths if path.name != str(newest)]


def find_non_private(home: Home) -> Iterator[tuple[Path, int]]:
    """Folders and files with transcripts or KV that others than their owner may use, and their modes."""
    for path in (str(home.root / "secret"), *_list_tree(home.index), *_list_tree(home.segments)):
        with suppress(FileNotFoundError):
            mode = stat.S_IMODE(os.lstat(path).st_mode)
            if mode & 0o077 or mode & 0o600 != 0o600:
                yield Path(path), mode


def _list_tree(folder: Path) -> Iterator[str]:
    """The folder and all below it.  Strings: there may be tens of thousands, and a start checks each of them."""
    for path, _, names in os.walk(folder):
        yield path
        yield from (f"{path}/{name}" for name in names)


def make_private(home: Home) -> list[Path]:
    """Close to others all that `find_non_private` finds; returns the paths."""
    found = [path for path, _ in find_non_private(home)]
    for path in found:
        disk.set_mode(path, 0o700 if path.is_dir() else 0o600)
    return found
