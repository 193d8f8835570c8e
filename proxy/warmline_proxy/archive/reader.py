"""Reader of archives: `open_archive` checks the frame, `verify_archive` all contents; nothing is used before that."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from warmline_common.protocol.tokens import TOKEN_BYTES, namespace, prefix_digests
from warmline_common.storage import segment_file
from warmline_common.storage.segment_file import FileMeta, SegmentFileError, SegmentHeader
from warmline_proxy.archive import tar
from warmline_proxy.archive.manifest import MANIFEST, MANIFEST_BYTES_MAX, Manifest, decode_manifest
from warmline_proxy.archive.tar import ArchiveError, Member, MemberFile, Progress


@dataclass(frozen=True)
class Archive:
    """Open archive whose frame was checked: a manifest, then exactly the files that it names."""

    file: BinaryIO
    manifest: Manifest
    members: list[Member]  # as in `Manifest.members`

    @property
    def bytes_count(self) -> int:
        """Size of all files but the manifest."""
        return sum(member.bytes_count for member in self.members)

    def open_member(self, number: int) -> BinaryIO:
        """Open one of the files; they share a position, so one is read at a time."""
        return BufferedReader(MemberFile(self.file, self.members[number]))


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Open an archive and check its frame.  Raises ArchiveError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # not blocking on a pipe
    except OSError as error:
        raise ArchiveError(f"it can't be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ArchiveError("it is no plain file")
    with os.fdopen(descriptor, "rb") as file:
        yield read_archive(file)


def read_archive(file: BinaryIO) -> Archive:
    """Check the frame of an archive in a seekable file.  Raises ArchiveError."""
    first = tar.read_member(file, 0, MANIFEST)
    if first.bytes_count > MANIFEST_BYTES_MAX:
        raise ArchiveError(f"a manifest of {first.bytes_count} bytes; {MANIFEST_BYTES_MAX} are allowed")
    file.seek(first.offset)
    raw = file.read(first.bytes_count)
    if len(raw) < first.bytes_count:
        raise ArchiveError("it ends within its manifest: it is not whole")
    tar.check_padding(file, first)
    manifest, at, members = decode_manifest(raw), first.end, []
    for name, size in manifest.members:
        member = tar.read_member(file, at, name)
        if member.bytes_count != size:
            raise ArchiveError(f"{name} has {member.bytes_count} bytes, the manifest says {size}")
        tar.check_padding(file, member)
        members.append(member)
        at = member.end
    tar.check_end(file, at)
    return Archive(file, manifest, members)


def verify_archive(archive: Archive, progress: Progress = lambda done, total: None) -> list[SegmentHeader]:
    """Check every checksum, token and position; return the headers of the files.  Raises ArchiveError.

    A file's position is proved by the digest of the tokens before it, in its model's namespace of no tenant.
    """
    manifest = archive.manifest
    root = namespace(manifest.fingerprint)
    places = [*manifest.segment_starts, *(entry.position for entry in manifest.checkpoints)]
    prefixes = prefix_digests(root, manifest.tokens, places)
    headers: list[SegmentHeader] = []
    done = 0
    for number, (member, place) in enumerate(zip(archive.members, places, strict=True)):
        file = archive.open_member(number)
        try:
            header = segment_file.read_header_from(file)
            segment_file.verify_open_file(file, header)
            _check_member(manifest, number, header.meta, root.hex(), prefixes[place])
            if header.meta.kind == "segment":
                _check_segment(manifest, headers, header, segment_file.read_tokens_from(file, header))
        except SegmentFileError as error:
            raise ArchiveError(f"{member.name} in it can't be used: {error}") from error
        headers.append(header)
        done += member.bytes_count
        progress(done, archive.bytes_count)
    return headers


def _check_member(manifest: Manifest, number: int, meta: FileMeta, root: str, prefix: str) -> None:
    """Raise SegmentFileError unless a file's metadata are those of the manifest."""
    count = len(manifest.segments)
    if number < count:
        named = ("segment", manifest.segment_starts[number], manifest.segment_ends[number])
        is_named = (meta.kind, meta.start, meta.end) == named
    else:
        is_named = (meta.kind, meta.position) == ("checkpoint", manifest.checkpoints[number - count].position)
    if not is_named:
        raise SegmentFileError("foreign", f"a {meta.kind} of [{meta.start}, {meta.end}), position {meta.position}")
    if meta.fingerprint != manifest.fingerprint:
        raise SegmentFileError("foreign", f"made by another model ({meta.fingerprint[:12]})")
    if meta.root != root or meta.prefix != prefix:
        raise SegmentFileError("foreign", "it was computed after other tokens than the manifest has")


def _check_segment(manifest: Manifest, before: list[SegmentHeader], header: SegmentHeader, tokens: bytes) -> None:
    """Raise SegmentFileError unless a segment has the manifest's tokens, and tensors like the first segment's."""
    meta = header.meta
    if tokens != manifest.tokens[meta.start * TOKEN_BYTES : meta.end * TOKEN_BYTES]:
        raise SegmentFileError("tokens", "not those of the manifest")
    if before and _tensor_kinds(header) != _tensor_kinds(before[0]):
        raise SegmentFileError("foreign", "its tensors are not those of the first segment")


def _tensor_kinds(header: SegmentHeader) -> dict[str, tuple[object, ...]]:
    """Names, dtypes and shapes of tensors, but for the token axis: equal in all segments of a model."""
    tensors = header.select_kv_tensors().items()
    return {name: (each.dtype, len(each.shape), each.shape[:2], each.shape[3:]) for name, each in tensors}
