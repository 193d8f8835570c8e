"""Every durable change to a home, one function each: nobody else calls the system for one.

So that tests can stop a process before, in and after each of them, and make each of them fail as disks do.  Call them
through the module (``disk.rename(...)``), not by names of their own: that is where tests step in.  All raise OSError.
"""

import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

DRAFT_SUFFIX = ".tmp"


# ---- single steps


def create(path: Path) -> FileIO:
    """A new file, readable by its owner alone, open for writing.  Raises FileExistsError."""
    return FileIO(path, "xb", opener=_open_private)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def write(file: FileIO, data: bytes | memoryview) -> None:
    """All of it."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while view.nbytes:
        view = view[file.write(view) :]


def sync(file: FileIO) -> None:
    """What was written survives a power cut from here on."""
    _sync_descriptor(file.fileno())


def sync_folder(folder: Path) -> None:
    """And so do the names in this folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def _sync_descriptor(descriptor: int) -> None:
    """On macOS plain fsync leaves all in the drive's own cache, in any order; some of its file systems, such as those
    of network disks, know nothing better.
    """
    if (full := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        with _ignore_unsupported():
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def rename(old: Path, new: Path) -> None:
    """Takes the place of what has the new name."""
    old.replace(new)


def link(old: Path, new: Path) -> None:
    """A second name.  Raises FileExistsError where the new one is taken."""
    new.hardlink_to(old)


def delete(path: Path) -> None:
    """Nothing happens where it is gone."""
    path.unlink(missing_ok=True)


def delete_folder(folder: Path) -> None:
    """An empty one."""
    folder.rmdir()


def make_folder(folder: Path) -> None:
    """Open to its owner alone; its parent is there.  Nothing happens where it is there already."""
    folder.mkdir(mode=0o700, exist_ok=True)


def set_mode(path: Path, mode: int) -> None:
    path.chmod(mode)


def lengthen(path: Path, bytes_count: int) -> None:
    """With zeros."""
    os.truncate(path, bytes_count)


def allocate(path: Path, bytes_count: int) -> None:
    """So much of a file has blocks on the disk, zeros where there were none; made where it is not there.

    For what is mapped: a page without a block, written to where the disk is full, ends the process.  Where the system
    can't do that (macOS), zeros are added at the end, and holes in what a file has already stay.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):  # not on macOS
            with _ignore_unsupported():
                os.posix_fallocate(descriptor, 0, bytes_count)
        while (at := os.fstat(descriptor).st_size) < bytes_count:
            os.pwrite(descriptor, bytes(bytes_count - at), at)
    finally:
        os.close(descriptor)


@contextmanager
def _ignore_unsupported() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY):
            raise


def run_lmdb(what: str, act: Callable[[], T]) -> T:
    """What LMDB changes on the disk by itself: `what` is "open", "commit" or "grow"."""
    return act()


# ---- reading, which fails as disks do, too


def open_to_read(path: Path) -> FileIO:
    """Without a buffer."""
    return FileIO(path, "rb")


# ---- whole errands, made of the steps above


def make_folders(folder: Path) -> None:
    """With its parents; durable."""
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    for path in reversed(missing):
        make_folder(path)
        sync_folder(path.parent)


def write_durable(path: Path, chunks: Iterable[bytes | memoryview]) -> int:
    """A new file that is complete and durable before it has its name; its size.  Where it fails, nothing is left."""
    make_folders(path.parent)
    draft = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{DRAFT_SUFFIX}")
    try:
        with create(draft) as file:
            for part in chunks:
                write(file, part)
            sync(file)
            written = file.tell()
        rename(draft, path)
    except BaseException:
        with suppress(OSError):  # the first failure is what counts; the next start sweeps drafts
            delete(draft)
        raise
    sync_folder(path.parent)
    return written


def replace_file(path: Path, text: str) -> None:
    """Replace a small file at once, readable by its owner alone.  Not durable: what it says can be told again."""
    draft = path.with_name(f".{path.name}{DRAFT_SUFFIX}")
    delete(draft)
    with create(draft) as file:
        write(file, text.encode())
    rename(draft, path)


def delete_tree(folder: Path) -> None:
    """What it holds first; nothing happens where it is gone."""
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            delete_tree(path)
        else:
            delete(path)
    delete_folder(folder)
