"""Durable changes to a home, one function each: the only place that calls the system for them.

Tests stop a process before, in and after each step, and make each fail as disks do.  Callers use the module
(``disk.rename(...)``), not imported names: tests replace its attributes.  All raise OSError.
"""

import ctypes
import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from typing import TypeVar

from warmline_common.storage.regular_file import open_regular

T = TypeVar("T")

DRAFT_SUFFIX = ".tmp"
NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
SMALL_FILE_BYTES_MAX = 4 << 20
WRITE_BACK_BYTES = 16 << 20  # of a new file, each so many are sent to the disk while the next are written

_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux has it
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_SYNC_FILE_RANGE_WRITE = 2


# ---- single steps


def create(path: Path) -> FileIO:
    """Create a file with mode 0600, open for writing.  Raises FileExistsError."""
    return FileIO(path, "xb", opener=_open_private)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def write(file: FileIO, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data`."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while view.nbytes:
        view = view[file.write(view) :]


def write_at(file: FileIO, data: bytes, offset: int) -> None:
    """Write all of `data` over what the file has there."""
    while data:
        written = os.pwrite(file.fileno(), data, offset)
        data, offset = data[written:], offset + written


def start_write_back(file: FileIO, offset: int, bytes_count: int) -> None:
    """Send a part of the file to the disk without waiting for it, where the system can: `sync` then has less to do.

    A failure is raised by `sync`.
    """
    if _sync_file_range is not None:
        _sync_file_range(file.fileno(), offset, bytes_count, _SYNC_FILE_RANGE_WRITE)


def sync(file: FileIO) -> None:
    """Make the file's bytes durable."""
    _sync_descriptor(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in this folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def _sync_descriptor(descriptor: int) -> None:
    """Flush a descriptor through the drive's cache.

    On macOS plain fsync leaves data in the drive's cache, in any order; some of its file systems, such as those of
    network disks, offer nothing better.
    """
    if (full := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        with _ignore_unsupported():
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def rename(old: Path, new: Path) -> None:
    """Rename a file, replacing one of the new name."""
    old.replace(new)


def link(old: Path, new: Path) -> None:
    """Add a second name.  Raises FileExistsError where the new name is taken."""
    new.hardlink_to(old)


def delete(path: Path) -> None:
    """Delete a file; does nothing where it is gone."""
    path.unlink(missing_ok=True)


def delete_folder(folder: Path) -> None:
    """Delete an empty folder."""
    folder.rmdir()


def make_folder(folder: Path) -> None:
    """Create a folder with mode 0700 in an existing one; does nothing where it exists."""
    folder.mkdir(mode=0o700, exist_ok=True)


def set_mode(path: Path, mode: int) -> None:
    path.chmod(mode)


def overwrite(path: Path, data: bytes) -> None:
    """Overwrite a file from its beginning, and cut it there; creates the file.  Its blocks are used again."""
    descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT)
    try:
        overwrite_open(descriptor, data)
    finally:
        os.close(descriptor)


def overwrite_open(descriptor: int, data: bytes) -> None:
    """As `overwrite`, for an open file."""
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


def allocate(path: Path, bytes_count: int) -> None:
    """Give a file's first bytes blocks on the disk, zeros where there were none; creates the file.

    For mapped files: a page without a block, written to on a full disk, ends the process.  Where the system can't
    allocate (macOS), zeros are appended, and existing holes stay.
    """
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
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
    """Run a change that LMDB makes on the disk by itself: `what` is "open", "commit" or "grow"."""
    return act()


# ---- reading, which fails as disks do, too


def open_to_read(path: Path) -> FileIO:
    """Open a regular file for reading without a buffer."""
    return FileIO(path, "rb", opener=open_regular)


def read_file(path: Path) -> bytes:
    """Content of a small file, such as one of settings, keys or remembered values.  Raises OSError, also for anything
    that is no regular file, or larger than SMALL_FILE_BYTES_MAX.
    """
    with BufferedReader(open_to_read(path)) as file:
        data = file.read(SMALL_FILE_BYTES_MAX + 1)
    if len(data) > SMALL_FILE_BYTES_MAX:
        raise OSError(errno.EFBIG, f"it has more than {SMALL_FILE_BYTES_MAX >> 20} MiB", str(path))
    return data


def count_free_bytes(folder: Path) -> int:
    """Bytes that this user can still write on the folder's disk."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


# ---- whole errands, made of the steps above


def make_folders(folder: Path) -> None:
    """Create a folder and its parents, durably."""
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    for path in reversed(missing):
        make_folder(path)
        sync_folder(path.parent)


def write_durable(
    path: Path,
    chunks: Iterable[bytes | bytearray | memoryview],
    read_head: Callable[[], bytes] | None = None,
    draft: Path | None = None,
) -> int:
    """Write a new file that is complete and durable before it has its name; returns its size.  A failure leaves
    nothing.

    `read_head` is called after the last chunk; it returns bytes that replace the file's first ones.  `draft`: its path
    until it is complete, in the same folder.
    """
    make_folders(path.parent)
    draft = draft or path.with_name(f".{path.stem}.{secrets.token_hex(4)}{DRAFT_SUFFIX}")
    try:
        with create(draft) as file:
            _write_chunks(file, chunks)
            written = file.tell()
            if read_head is not None:
                write_at(file, read_head(), 0)
            sync(file)
        rename(draft, path)
    except BaseException:
        with suppress(OSError):  # the first failure is what counts; the next start sweeps drafts
            delete(draft)
        raise
    sync_folder(path.parent)
    return written


def _write_chunks(file: FileIO, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
    written = sent = 0
    for part in chunks:
        write(file, part)
        written += len(part)
        if written - sent >= WRITE_BACK_BYTES:
            start_write_back(file, sent, written - sent)
            sent = written


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a small file of mode 0600 at once.  Not durable: its content can be written again.

    On a full disk it is overwritten instead, where it is: it has a block already.
    """
    data = content.encode() if isinstance(content, str) else content
    draft = path.with_name(f".{path.name}{DRAFT_SUFFIX}")
    delete(draft)
    try:
        with create(draft) as file:
            write(file, data)
        rename(draft, path)
    except OSError as error:
        with suppress(OSError):
            delete(draft)
        if error.errno not in NO_SPACE_ERRNOS or not path.is_file():
            raise
        overwrite(path, data)


def delete_tree(path: Path) -> None:
    """Delete a file, or a folder with its content, the content first; does nothing where it is gone.

    Links are deleted, not followed.
    """
    if path.is_symlink() or not path.is_dir():
        delete(path)
        return
    for below in list(path.iterdir()):
        delete_tree(below)
    delete_folder(path)
