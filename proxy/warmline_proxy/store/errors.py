"""What can be wrong with the index.

IndexFailure
├── DamagedIndex   its file is no LMDB file (any more), or what is in it can't be read
├── NoIndex        there is none (yet)
├── WrongSchema    another version of Warmline wrote it
├── IndexFull      the map is full and can't grow: nothing more can be written
├── ReadOnlyIndex  nothing can be written, as was found out at the start
└── NoRoom         the disk budget can't hold a save, whatever is evicted
"""

import errno
import os

SIGNS_OF_DAMAGE = ("MDB_BAD_TXN", "MDB_CORRUPTED", "MDB_PAGE_NOTFOUND")  # in what lmdb says
NO_SPACE = ("ENOSPC", "EDQUOT")
MADE_ANEW = "start Warmline again: a start makes the index anew from the files"


class IndexFailure(Exception):
    """The index can't be opened or written.  `code`: the name of the system's error ("ENOSPC"), where there is one."""

    code = ""


class DamagedIndex(IndexFailure):
    pass


class NoIndex(IndexFailure):
    pass


class WrongSchema(IndexFailure):
    pass


class IndexFull(IndexFailure):
    pass


class NoRoom(IndexFailure):
    pass


class ReadOnlyIndex(IndexFailure):
    pass


def failure(what: str, error: Exception) -> IndexFailure:
    """With the code of the system's error, which lmdb tells in words alone; or "damaged"."""
    text = str(error)
    if any(sign in text for sign in SIGNS_OF_DAMAGE):
        failed = IndexFailure(f"{what}: it is damaged ({text}); {MADE_ANEW}")
        failed.code = "damaged"
        return failed
    failed = IndexFailure(f"{what}: {text}")
    codes = (code for code in errno.errorcode if os.strerror(code) in text)
    failed.code = errno.errorcode.get(next(codes, 0), "EIO")
    return failed


def code_of(error: IndexFailure | OSError) -> str:
    """The name of the system's error, or "index"."""
    if isinstance(error, IndexFailure):
        return error.code or "index"
    return errno.errorcode.get(error.errno or 0, "EIO")


def is_read_only(error: IndexFailure | OSError) -> bool:
    """Whether it is the place that can't be written to."""
    return code_of(error) in ("EROFS", "EACCES", "EPERM")
