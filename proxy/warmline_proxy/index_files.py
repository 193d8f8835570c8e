"""The files that the index accounts for: deleting, setting aside, listing."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from warmline_wire import disk
from warmline_wire.home import Home

QUARANTINE = "quarantine"
SUFFIX = ".safetensors"


def quarantine_file(home: Home, file_id: str) -> Path:
    return home.segments / QUARANTINE / f"{file_id}{SUFFIX}"


def delete(home: Home, file_id: str) -> None:
    disk.delete(home.segment_file(file_id))
    disk.delete(quarantine_file(home, file_id))


def set_aside(home: Home, ids: Iterable[str]) -> None:
    """Idempotent: what is aside, or gone, stays so."""
    disk.make_folders(home.segments / QUARANTINE)
    for file_id in ids:
        path = home.segment_file(file_id)
        if path.exists():
            disk.rename(path, quarantine_file(home, file_id))


def stored(home: Home) -> Iterator[tuple[str, Path]]:
    """(id, path) of each segment and checkpoint file in its place; id "" for what is none (a temporary file)."""
    for folder in home.segments.iterdir():
        if folder.name != QUARANTINE and folder.is_dir():
            for path in folder.iterdir():
                ours = path.suffix == SUFFIX and home.segment_file(path.stem) == path
                yield (path.stem if ours else ""), path


def aside(home: Home) -> Iterator[tuple[str, Path]]:
    folder = home.segments / QUARANTINE
    if folder.is_dir():
        yield from ((path.stem, path) for path in folder.iterdir())
