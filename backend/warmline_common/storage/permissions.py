"""Permissions of a home: files open to other users (after a copy, a restore or a lax umask) become private again.

Only what Warmline keeps in a home is changed.  The home's own folder is changed too, unless it holds other things:
the owner may have named a shared folder.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from warmline_common.storage import disk
from warmline_common.storage.home import Home

OTHERS_MASK = 0o077
FOLDER_MODE, FILE_MODE = 0o700, 0o600
CONFIG_FILE = "warmline.toml"


@dataclass
class PermissionReport:
    """Changed permissions, with the paths of a few."""

    count: int = 0
    first_path: str = ""
    open_paths: list[str] = field(default_factory=list)  # left as they are: the change failed, or the folder is shared

    def __str__(self) -> str:
        """One line; "" where nothing was changed."""
        some = "1 file or folder was" if self.count == 1 else f"{self.count} files and folders were"
        done = f"{some} open to others, such as {self.first_path}: private now"
        left = f"open to others, and left so: {', '.join(self.open_paths[:3])}"
        return "; ".join([*([done] if self.count else []), *([left] if self.open_paths else [])])


def set_private_umask() -> None:
    """Set the umask so that all new files of this process, libraries' too, are private.  Once, at a start."""
    os.umask(OTHERS_MASK)


def tighten_permissions(home: Home) -> PermissionReport:
    """Set folders to 0700 and files to 0600, where they allow others more; links are not followed."""
    done = PermissionReport()
    for path in _iter_home_paths(home):
        try:
            found = path.lstat()
        except OSError:  # deleted meanwhile
            continue
        if not stat.S_ISLNK(found.st_mode) and found.st_mode & OTHERS_MASK:
            _tighten_path(path, found, done)
    if not _is_dedicated_home(home) and _is_open_to_others(home.root):
        done.open_paths.append(f"{home.root} (it holds other things, too)")
    return done


def _tighten_path(path: Path, stat_result: os.stat_result, report: PermissionReport) -> None:
    try:
        disk.set_mode(path, FOLDER_MODE if stat.S_ISDIR(stat_result.st_mode) else FILE_MODE)
    except OSError as error:
        report.open_paths.append(f"{path} ({error.strerror})")
        return
    report.count += 1
    report.first_path = report.first_path or str(path)


def _iter_home_paths(home: Home) -> Iterator[Path]:
    if _is_dedicated_home(home):
        yield home.root
    yield from _home_files(home)
    for folder in _home_folders(home):
        yield folder
        for parent, names, others in os.walk(folder):
            yield from (Path(parent, name) for name in (*names, *others))


def _home_folders(home: Home) -> tuple[Path, ...]:
    return home.index, home.segments, home.models, home.logs, home.run, home.prewarm


def _home_files(home: Home) -> tuple[Path, ...]:
    return home.lock, home.keys, home.reserve, home.root / "secret", home.root / CONFIG_FILE


def _is_dedicated_home(home: Home) -> bool:
    """True where the home's folder holds nothing but Warmline's files."""
    ours, entries = (*_home_folders(home), *_home_files(home)), list(home.root.iterdir()) if home.root.is_dir() else []
    return all(path in ours or path.name.endswith(disk.DRAFT_SUFFIX) for path in entries)


def _is_open_to_others(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & OTHERS_MASK)
    except OSError:
        return False
