"""Errors of the index.

IndexStoreError
├── IndexDamagedError    its file is no LMDB file (any more), or its content can't be read
├── IndexMissingError    there is none (yet)
├── IndexSchemaError     another version of Warmline wrote it
├── IndexFullError       the map is full and can't grow: nothing more can be written
├── IndexReadOnlyError   nothing can be written, as was found out at the start
└── DiskBudgetError      the disk budget can't hold a save, whatever is evicted
"""

import errno
import os
from pathlib import Path

DAMAGE_MARKERS = ("MDB_BAD_TXN", "MDB_CORRUPTED", "MDB_PAGE_NOTFOUND")  # in what lmdb says
NO_SPACE_CODES = ("ENOSPC", "EDQUOT")
REBUILD_HINT = "`cachectl verify --repair`, or the next start, makes the index anew from the files"


class IndexStoreError(Exception):
    """The index can't be opened or written.  `code`: the name of the system's error ("ENOSPC"), where there is one."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class IndexDamagedError(IndexStoreError):
    pass


class IndexMissingError(IndexStoreError):
    pass


class IndexSchemaError(IndexStoreError):
    pass


class IndexFullError(IndexStoreError):
    pass


class DiskBudgetError(IndexStoreError):
    pass


class IndexReadOnlyError(IndexStoreError):
    pass


def make_damage_error(path: Path, flaw: object) -> IndexDamagedError:
    return IndexDamagedError(f"the index in {path} is damaged: {flaw}; {REBUILD_HINT}", "damaged")


def wrap_error(what: str, error: Exception) -> IndexStoreError:
    """Error with the code of the system's error, which lmdb gives in words alone; or "damaged"."""
    text = str(error)
    if any(marker in text for marker in DAMAGE_MARKERS):
        return IndexStoreError(f"{what}: it is damaged ({text}); {REBUILD_HINT}", "damaged")
    codes = (name for code, name in errno.errorcode.items() if os.strerror(code) in text)
    return IndexStoreError(f"{what}: {text}", next(codes, "EIO"))


def get_error_code(error: IndexStoreError | OSError) -> str:
    """The name of the system's error, or "index"."""
    if isinstance(error, IndexStoreError):
        return error.code or "index"
    return errno.errorcode.get(error.errno or 0, "EIO")


def is_read_only_error(error: IndexStoreError | OSError) -> bool:
    """True where the location can't be written to."""
    return get_error_code(error) in ("EROFS", "EACCES", "EPERM")
