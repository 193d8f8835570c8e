"""Frame of an archive: a tar file (GNU format) of regular files in a known order, written and read header by header.

A name that is read is only compared with the expected one.  Links, folders, extended headers and sparse files are
refused, so that nothing but bytes can come out of an archive.
"""

import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from io import SEEK_END, SEEK_SET, RawIOBase
from typing import Any, BinaryIO

BLOCK_BYTES = 512
END_BYTES = 2 * BLOCK_BYTES  # zeros after the last file
PADDING_BYTES_MAX = 1 << 20  # zeros after the end: tar programs fill their last record
ENCODING = "ascii"
NOT_AN_ARCHIVE = "it is no archive of a conversation; cachectl export makes one"

Progress = Callable[[int, int], object]  # (bytes done, bytes in all)


class ArchiveError(Exception):
    """Archive that can't be made or used; the message says why."""


@dataclass(frozen=True)
class Member:
    """File within an archive, `offset` bytes from the archive's beginning."""

    name: str
    offset: int
    bytes_count: int

    @property
    def end(self) -> int:
        """Offset of the next header."""
        return self.offset + self.bytes_count + padding(self.bytes_count)


def padding(bytes_count: int) -> int:
    """Number of zeros after a file of this size."""
    return -bytes_count % BLOCK_BYTES


def encode_header(name: str, bytes_count: int, made: float) -> bytes:
    """Encode a file's header; `made` in Unix seconds."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = bytes_count, int(made), 0o600
    return info.tobuf(tarfile.GNU_FORMAT, ENCODING, "strict")


def read_member(file: BinaryIO, offset: int, expected: str) -> Member:
    """Read the header at `offset`.  Raises ArchiveError unless it is a regular file's of the expected name."""
    file.seek(offset)
    block = file.read(BLOCK_BYTES)
    if len(block) < BLOCK_BYTES:
        raise ArchiveError(f"it ends before {expected}: it is not whole" if offset else NOT_AN_ARCHIVE)
    try:
        info = tarfile.TarInfo.frombuf(block, ENCODING, "surrogateescape")
    except (tarfile.HeaderError, ValueError, OverflowError) as error:
        what = f"no tar header where {expected} should begin" if offset else NOT_AN_ARCHIVE
        raise ArchiveError(f"{what} ({error})") from error
    if info.type != tarfile.REGTYPE or info.name != expected:
        raise ArchiveError(f"{info.name[:80]!r} (type {info.type!r}) is in the place of the file {expected}")
    if info.size < 0:
        raise ArchiveError(f"{expected} has a size that makes no sense")
    return Member(expected, offset + BLOCK_BYTES, info.size)


def check_padding(file: BinaryIO, member: Member) -> None:
    """Raise ArchiveError unless zeros fill the member's last block."""
    file.seek(member.offset + member.bytes_count)
    if any(file.read(padding(member.bytes_count))):
        raise ArchiveError(f"unexpected data after {member.name}")


def check_end(file: BinaryIO, offset: int) -> None:
    """Raise ArchiveError unless the archive ends here, with zeros alone."""
    length = file.seek(0, SEEK_END) - offset
    if not END_BYTES <= length <= END_BYTES + PADDING_BYTES_MAX:
        raise ArchiveError("it is not whole" if length < END_BYTES else f"it continues after its end, at byte {offset}")
    file.seek(offset)
    if any(file.read(length)):
        raise ArchiveError(f"unexpected data after its end, at byte {offset}")


class MemberFile(RawIOBase):
    """Member as a read-only, seekable file.  All members of an archive are used on one thread."""

    def __init__(self, file: BinaryIO, member: Member) -> None:
        super().__init__()
        self._file, self._member, self._at = file, member, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        origin = {SEEK_SET: 0, SEEK_END: self._member.bytes_count}.get(whence, self._at)
        self._at = max(0, origin + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self._file.seek(self._member.offset + self._at)
        data = self._file.read(min(len(view), max(0, self._member.bytes_count - self._at)))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)
