"""Headers of stored files, as far as they can be trusted, for verification and rebuilding."""

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

ROOT_BYTES = 16


@dataclass(frozen=True)
class FileInspection:
    """A segment or checkpoint file; `reason` (a word of SegmentFileError) and `detail` say why it can't be used."""

    id: str
    bytes_on_disk: int = 0
    written_at: float = 0.0  # Unix seconds
    meta: FileMeta | None = None  # None where there is a reason
    tokens: bytes = b""  # packed, of a segment
    checksum: str = ""  # as in SavedFile
    reason: str = ""
    detail: str = ""

    @property
    def root(self) -> bytes:
        return bytes.fromhex(self.meta.root) if self.meta else b""


def inspect_file(home: Home, file_id: str, *, deep: bool) -> FileInspection:
    """Its header and tokens, their checksums compared; `deep` compares all the others too.  Never raises."""
    path = home.segment_file(file_id)
    try:
        return _inspect(path, file_id, deep)
    except SegmentFileError as error:
        return FileInspection(file_id, _size(path), reason=error.reason, detail=error.detail)
    except OSError as error:
        return FileInspection(file_id, _size(path), reason="io", detail=str(error))


def _inspect(path: Path, file_id: str, deep: bool) -> FileInspection:
    header, checksums = read_header(path), read_checksums(path)
    header.verify(checksums)
    if deep:
        verify_file(path)
    meta = header.meta
    if meta.id != file_id:
        raise SegmentFileError("foreign", f"is {meta.kind} {meta.id}")
    if not _is_root(meta.root):
        raise SegmentFileError("foreign", "does not say whose it is")
    return FileInspection(
        file_id,
        bytes_on_disk=header.file_bytes,
        written_at=path.stat().st_mtime,
        meta=meta,
        tokens=read_tokens(path) if meta.kind == "segment" else b"",
        checksum=file_checksum(checksums),
    )


def _is_root(text: str) -> bool:
    try:
        return len(bytes.fromhex(text)) == ROOT_BYTES
    except ValueError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
