"""Keeps a home private: what is open to others (from a copy, a restore, or a careless umask) becomes its owner's alone.

Only what Warmline itself keeps in a home is touched.  The home's own folder is, too, unless it holds other things:
somebody may have named a folder that is not for us alone.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from warmline_common.storage import disk
from warmline_common.storage.home import Home

OTHERS = 0o077
FOLDER_MODE, FILE_MODE = 0o700, 0o600
CONFIG_FILE = "warmline.toml"


@dataclass
class Tightened:
    """What was done.  Paths of a few, for people."""

    count: int = 0
    first: str = ""
    left_open: list[str] = field(default_factory=list)  # that could not be, or are not ours to be

    def __str__(self) -> str:
        """One line; "" where all was well."""
        some = "1 file or folder was" if self.count == 1 else f"{self.count} files and folders were"
        done = f"{some} open to others, such as {self.first}: private now"
        left = f"open to others, and left so: {', '.join(self.left_open[:3])}"
        return "; ".join([*([done] if self.count else []), *([left] if self.left_open else [])])


def begin_private() -> None:
    """From now on, whatever this process makes, by libraries too, is its owner's alone.  At a start, once."""
    os.umask(OTHERS)


def tighten(home: Home) -> Tightened:
    """Folders to 0700 and files to 0600, where they allow others more; links are not followed."""
    done = Tightened()
    for path in _ours(home):
        try:
            found = path.lstat()
        except OSError:  # gone meanwhile
            continue
        if not stat.S_ISLNK(found.st_mode) and found.st_mode & OTHERS:
            _tighten(path, found, done)
    if not _is_ours_alone(home) and _is_open(home.root):
        done.left_open.append(f"{home.root} (it holds other things, too)")
    return done


def _tighten(path: Path, found: os.stat_result, done: Tightened) -> None:
    try:
        disk.set_mode(path, FOLDER_MODE if stat.S_ISDIR(found.st_mode) else FILE_MODE)
    except OSError as error:
        done.left_open.append(f"{path} ({error.strerror})")
        return
    done.count += 1
    done.first = done.first or str(path)


def _ours(home: Home) -> Iterator[Path]:
    if _is_ours_alone(home):
        yield home.root
    yield from _files(home)
    for folder in _folders(home):
        yield folder
        for parent, names, others in os.walk(folder):
            yield from (Path(parent, name) for name in (*names, *others))


def _folders(home: Home) -> tuple[Path, ...]:
    return home.index, home.segments, home.models, home.logs, home.run


def _files(home: Home) -> tuple[Path, ...]:
    return home.lock, home.keys, home.spare, home.root / "secret", home.root / CONFIG_FILE


def _is_ours_alone(home: Home) -> bool:
    """Whether the home's folder holds nothing but what Warmline keeps there."""
    ours, entries = (*_folders(home), *_files(home)), list(home.root.iterdir()) if home.root.is_dir() else []
    return all(path in ours or path.name.endswith(disk.DRAFT_SUFFIX) for path in entries)


def _is_open(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & OTHERS)
    except OSError:
        return False
