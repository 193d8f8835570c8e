"""Headers of stored files, checked, for verification and rebuilding."""

import re
from dataclasses import dataclass
from pathlib import Path

from warmline_common.storage.home import Home
from warmline_common.storage.segment_file import (
    FileMeta,
    SegmentFileError,
    file_checksum,
    read_checksums,
    read_header,
    read_tokens,
    verify_file,
)

ROOT = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class ValidFile:
    """A segment or checkpoint file."""

    id: str
    bytes_on_disk: int
    written_at: float  # Unix seconds
    meta: FileMeta
    tokens: bytes  # packed; b"" of a checkpoint
    checksum: str  # as in SavedFile

    @property
    def root(self) -> bytes:
        return bytes.fromhex(self.meta.root)


@dataclass(frozen=True)
class InvalidFile:
    """A file that can't be used; `reason` is one of SegmentFileError's."""

    id: str
    bytes_on_disk: int
    reason: str
    detail: str


def inspect_file(home: Home, file_id: str, *, deep: bool) -> ValidFile | InvalidFile:
    """Read a file's header and tokens, and compare their checksums; `deep`: all checksums.  Never raises."""
    path = home.segment_file(file_id)
    try:
        return _inspect(path, file_id, deep)
    except SegmentFileError as error:
        reason, detail = error.reason, error.detail
    except OSError as error:
        reason, detail = "io", str(error)
    try:
        size = path.stat().st_size
    except OSError:
        size = 0
    return InvalidFile(file_id, size, reason, detail)


def _inspect(path: Path, file_id: str, deep: bool) -> ValidFile:
    header, checksums = read_header(path), read_checksums(path)
    header.verify(checksums)
    if deep:
        verify_file(path)
    meta = header.meta
    if meta.id != file_id:
        raise SegmentFileError("foreign", f"is {meta.kind} {meta.id}")
    if not ROOT.fullmatch(meta.root):
        raise SegmentFileError("foreign", "names no root of its model and tenant")
    return ValidFile(
        file_id,
        bytes_on_disk=header.file_bytes,
        written_at=path.stat().st_mtime,
        meta=meta,
        tokens=read_tokens(path) if meta.kind == "segment" else b"",
        checksum=file_checksum(checksums),
    )
