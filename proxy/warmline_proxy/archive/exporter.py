"""A conversation into one file.  Needs no lock, and no proxy: a file that is open can be read to its end, even if it is
evicted or purged meanwhile.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from io import BufferedReader
from typing import BinaryIO

import msgspec

from warmline_common.process.file_limits import raise_descriptor_limit
from warmline_common.protocol.tokens import TOKEN_BYTES, namespace, prefix_digests
from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_common.storage.segment_copy import SegmentCopy
from warmline_common.storage.segment_file import (
    FileMeta,
    SegmentFileError,
    SegmentHeader,
    header_in,
    tokens_in,
)
from warmline_proxy.archive import tar
from warmline_proxy.archive.manifest import (
    MANIFEST,
    PREFILL_S_A_TOKEN_MAX,
    CheckpointEntry,
    LayoutEntry,
    Manifest,
    SegmentEntry,
    SessionEntry,
    TurnEntry,
    sealed,
)
from warmline_proxy.archive.tar import ArchiveError
from warmline_proxy.index.gather import Conversation
from warmline_proxy.index.index import IndexReader
from warmline_proxy.store.rows import CheckpointRow, SegmentRow

TRIES_MAX = 5  # that files go which the index has just named: they are rewritten or evicted
DESCRIPTORS_SPARE = 64
MEND = "cachectl verify --deep finds what is wrong, --repair mends it"

Progress = Callable[[int, int], object]  # bytes done, of how many


class Exported(msgspec.Struct, kw_only=True):
    session: str
    model: str
    fingerprint: str
    tokens: int
    segments: int
    checkpoints: int
    turns: int  # sampled ones that called tools
    bytes_count: int  # of the archive


class Export:
    """An archive that is about to be written: `with` it open, take its `parts` once.

    Raises ArchiveError where the conversation is not stored, or not sound; IndexFailure, OSError.
    """

    def __init__(self, reader: IndexReader, session_id: str, progress: Progress = lambda done, total: None) -> None:
        self._progress, self._files = progress, ExitStack()
        try:
            self._conversation, opened = _opened(reader, session_id, self._files)
            self._copies = _copies(self._conversation, opened)
            self._manifest = _manifest(self._conversation, self._copies)
        except BaseException:
            self._files.close()
            raise
        self._head = sealed(self._manifest)

    def __enter__(self) -> "Export":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    @property
    def bytes_count(self) -> int:
        sizes = [len(self._head), *(size for _, size in self._manifest.members)]
        return sum(tar.BLOCK_BYTES + size + tar.padding(size) for size in sizes) + tar.END_BYTES

    @property
    def told(self) -> Exported:
        manifest = self._manifest
        return Exported(
            session=manifest.session.id,
            model=manifest.model,
            fingerprint=manifest.fingerprint,
            tokens=manifest.count,
            segments=len(manifest.segments),
            checkpoints=len(manifest.checkpoints),
            turns=len(manifest.turns),
            bytes_count=self.bytes_count,
        )

    def parts(self) -> Iterator[bytes]:
        """The archive's bytes in order.  A damaged file is found on the way: what was taken is worth nothing then."""
        done = 0
        for part in self._parts():
            done += len(part)
            self._progress(done, self.bytes_count)
            yield part

    def _parts(self) -> Iterator[bytes]:
        made = self._manifest.made
        yield tar.header(MANIFEST, len(self._head), made)
        yield self._head
        yield bytes(tar.padding(len(self._head)))
        for (name, size), copy in zip(self._manifest.members, self._copies, strict=True):
            yield tar.header(name, size, made)
            try:
                yield from copy.parts()
            except SegmentFileError as error:
                raise ArchiveError(f"what is stored of it is damaged ({error}): {MEND}") from error
            yield bytes(tar.padding(size))
        yield bytes(tar.END_BYTES)


def _opened(reader: IndexReader, session_id: str, files: ExitStack) -> tuple[Conversation, list[BinaryIO]]:
    """What is stored of it, and its files; none of them can go any more."""
    for _ in range(TRIES_MAX):
        if (found := reader.conversation(session_id)) is None:
            raise ArchiveError(f"nothing is stored of session {session_id}")
        raise_descriptor_limit(len(found.file_ids) + DESCRIPTORS_SPARE)
        try:
            return found, [files.enter_context(_open(reader.home, file_id)) for file_id in found.file_ids]
        except FileNotFoundError:
            files.close()
    raise ArchiveError(f"files of session {session_id} are missing: {MEND}")


def _open(home: Home, file_id: str) -> BufferedReader:
    return BufferedReader(disk.open_to_read(home.segment_file(file_id)))


def _copies(found: Conversation, files: list[BinaryIO]) -> list[SegmentCopy]:
    """Each file as it is to stand in the archive, in its order: under nobody's namespace, without others' rows."""
    try:
        headers = [header_in(file) for file in files]
        _check_places(found, headers, files)
        fingerprint = headers[0].meta.fingerprint
        root = namespace(fingerprint)
        prefixes = prefix_digests(root, found.tokens, [_place(header.meta) for header in headers])
        ends = [*found.ends, *(row.position for row in found.checkpoints)]
        copies: list[SegmentCopy] = []
        parent = ""
        for file, header, end in zip(files, headers, ends, strict=True):
            meta = msgspec.structs.replace(
                header.meta,
                root=root.hex(),
                prefix=prefixes[_place(header.meta)],
                end=end,
                parent=parent if header.meta.kind == "segment" else "",
                model=found.session.model,
            )
            parent = meta.id
            copies.append(SegmentCopy(file, header, meta))
        return copies
    except SegmentFileError as error:
        raise ArchiveError(f"what is stored of it is damaged ({error}): {MEND}") from error


def _place(meta: FileMeta) -> int:
    return meta.start if meta.kind == "segment" else meta.position


def _check_places(found: Conversation, headers: list[SegmentHeader], files: list[BinaryIO]) -> None:
    """Raises SegmentFileError unless each file is what the index says it is, in its place."""
    rows: list[SegmentRow | CheckpointRow] = [*found.segments, *found.checkpoints]
    prefixes = prefix_digests(found.session.root, found.tokens, [_place(header.meta) for header in headers])
    for row, header in zip(rows, headers, strict=True):
        meta = header.meta
        if isinstance(row, SegmentRow):
            same = (meta.kind, meta.id, meta.start, meta.end) == ("segment", row.id, row.start, row.end)
        else:
            same = (meta.kind, meta.id, meta.position) == ("checkpoint", row.id, row.position)
        whose = (found.session.root.hex(), headers[0].meta.fingerprint)
        if not same or (meta.root, meta.fingerprint) != whose or meta.prefix != prefixes[_place(meta)]:
            raise SegmentFileError("foreign", f"{row.id} says that it is {meta.kind} {meta.id}, after other tokens")
    for row, end, header, file in zip(found.segments, found.ends, headers, files, strict=False):
        wanted = found.tokens[row.start * TOKEN_BYTES : end * TOKEN_BYTES]
        if tokens_in(file, header)[: len(wanted)] != wanted:
            raise SegmentFileError("tokens", f"{row.id} has other tokens than the index")


def _manifest(found: Conversation, copies: list[SegmentCopy]) -> Manifest:
    session, segments, states = found.session, copies[: len(found.segments)], copies[len(found.segments) :]
    return Manifest(
        made=time.time(),
        model=session.model,
        fingerprint=segments[0].meta.fingerprint,
        layout=LayoutEntry(
            row_bytes=max(-(-copy.bytes_count // (copy.meta.end - copy.meta.start)) for copy in segments),
            state_bytes=max((copy.bytes_count for copy in states), default=0),
            tensors=segments[0].tensor_count,
        ),
        tokens=found.tokens,
        segments=[
            SegmentEntry(end=end, bytes_count=copy.bytes_count, prefill_s=_cost(row, end))
            for row, end, copy in zip(found.segments, found.ends, segments, strict=True)
        ],
        checkpoints=[CheckpointEntry(position=copy.meta.position, bytes_count=copy.bytes_count) for copy in states],
        session=SessionEntry(
            id=session.id,
            client=session.client,
            turn_end=min(session.turn_end, session.tokens),
            created=session.created,
            last_used=session.last_used,
            requests=session.requests,
            hits=session.hits,
        ),
        turns=[TurnEntry(calls=turn.calls, tokens=turn.tokens, at=turn.at) for turn in found.turns],
    )


def _cost(row: SegmentRow, end: int) -> float:
    """What prefilling its part of a segment took."""
    tokens = end - row.start
    return min(row.prefill_s * tokens / (row.end - row.start), PREFILL_S_A_TOKEN_MAX * tokens)
