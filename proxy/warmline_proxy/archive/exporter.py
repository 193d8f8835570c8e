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
    read_header_from,
    read_tokens_from,
)
from warmline_proxy.archive import tar
from warmline_proxy.archive.manifest import (
    MANIFEST,
    PREFILL_S_PER_TOKEN_MAX,
    CheckpointEntry,
    LayoutEntry,
    Manifest,
    SegmentEntry,
    SessionEntry,
    TurnEntry,
    encode_manifest,
)
from warmline_proxy.archive.tar import ArchiveError
from warmline_proxy.index.index import IndexReader
from warmline_proxy.index.reader import ConversationSnapshot
from warmline_proxy.store.rows import CheckpointRow, SegmentRow

TRIES_MAX = 5  # that files go which the index has just named: they are rewritten or evicted
DESCRIPTORS_RESERVED = 64
REPAIR_HINT = "cachectl verify --deep finds what is wrong, --repair mends it"

Progress = Callable[[int, int], object]  # bytes done, of how many


class ExportResult(msgspec.Struct, kw_only=True):
    session: str
    model: str
    fingerprint: str
    tokens: int
    segments: int
    checkpoints: int
    turns: int  # sampled ones that called tools
    bytes_count: int  # of the archive


class Exporter:
    """An archive that is about to be written: `with` it open, take its `parts` once.

    Raises ArchiveError where the conversation is not stored, or not sound; IndexFailure, OSError.
    """

    def __init__(self, reader: IndexReader, session_id: str, progress: Progress = lambda done, total: None) -> None:
        self._progress, self._files = progress, ExitStack()
        try:
            self._conversation, opened = _open_conversation(reader, session_id, self._files)
            self._copies = _build_copies(self._conversation, opened)
            self._manifest = _build_manifest(self._conversation, self._copies)
        except BaseException:
            self._files.close()
            raise
        self._manifest_bytes = encode_manifest(self._manifest)

    def __enter__(self) -> "Exporter":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    @property
    def bytes_count(self) -> int:
        sizes = [len(self._manifest_bytes), *(size for _, size in self._manifest.members)]
        return sum(tar.BLOCK_BYTES + size + tar.padding(size) for size in sizes) + tar.END_BYTES

    @property
    def result(self) -> ExportResult:
        manifest = self._manifest
        return ExportResult(
            session=manifest.session.id,
            model=manifest.model,
            fingerprint=manifest.fingerprint,
            tokens=manifest.token_count,
            segments=len(manifest.segments),
            checkpoints=len(manifest.checkpoints),
            turns=len(manifest.turns),
            bytes_count=self.bytes_count,
        )

    def read_chunks(self) -> Iterator[bytes]:
        """The archive's bytes in order.  A damaged file is found on the way: what was taken is worth nothing then."""
        done = 0
        for part in self._read_chunks():
            done += len(part)
            self._progress(done, self.bytes_count)
            yield part

    def _read_chunks(self) -> Iterator[bytes]:
        made = self._manifest.made
        yield tar.encode_header(MANIFEST, len(self._manifest_bytes), made)
        yield self._manifest_bytes
        yield bytes(tar.padding(len(self._manifest_bytes)))
        for (name, size), copy in zip(self._manifest.members, self._copies, strict=True):
            yield tar.encode_header(name, size, made)
            try:
                yield from copy.read_chunks()
            except SegmentFileError as error:
                raise ArchiveError(f"what is stored of it is damaged ({error}): {REPAIR_HINT}") from error
            yield bytes(tar.padding(size))
        yield bytes(tar.END_BYTES)


def _open_conversation(
    reader: IndexReader, session_id: str, files: ExitStack
) -> tuple[ConversationSnapshot, list[BinaryIO]]:
    """What is stored of it, and its files; none of them can go any more."""
    for _ in range(TRIES_MAX):
        if (found := reader.conversation(session_id)) is None:
            raise ArchiveError(f"nothing is stored of session {session_id}")
        raise_descriptor_limit(len(found.file_ids) + DESCRIPTORS_RESERVED)
        try:
            return found, [files.enter_context(_open_file(reader.home, file_id)) for file_id in found.file_ids]
        except FileNotFoundError:
            files.close()
    raise ArchiveError(f"files of session {session_id} are missing: {REPAIR_HINT}")


def _open_file(home: Home, file_id: str) -> BufferedReader:
    return BufferedReader(disk.open_to_read(home.segment_file(file_id)))


def _build_copies(conversation: ConversationSnapshot, files: list[BinaryIO]) -> list[SegmentCopy]:
    """Each file as it is to stand in the archive, in its order: under nobody's namespace, without others' rows."""
    try:
        headers = [read_header_from(file) for file in files]
        _check_places(conversation, headers, files)
        fingerprint = headers[0].meta.fingerprint
        root = namespace(fingerprint)
        prefixes = prefix_digests(root, conversation.tokens, [_find_place(header.meta) for header in headers])
        ends = [*conversation.segment_ends, *(row.position for row in conversation.checkpoints)]
        copies: list[SegmentCopy] = []
        parent = ""
        for file, header, end in zip(files, headers, ends, strict=True):
            meta = msgspec.structs.replace(
                header.meta,
                root=root.hex(),
                prefix=prefixes[_find_place(header.meta)],
                end=end,
                parent=parent if header.meta.kind == "segment" else "",
                model=conversation.session.model,
            )
            parent = meta.id
            copies.append(SegmentCopy(file, header, meta))
        return copies
    except SegmentFileError as error:
        raise ArchiveError(f"what is stored of it is damaged ({error}): {REPAIR_HINT}") from error


def _find_place(meta: FileMeta) -> int:
    return meta.start if meta.kind == "segment" else meta.position


def _check_places(conversation: ConversationSnapshot, headers: list[SegmentHeader], files: list[BinaryIO]) -> None:
    """Raises SegmentFileError unless each file is what the index says it is, in its place."""
    rows: list[SegmentRow | CheckpointRow] = [*conversation.segments, *conversation.checkpoints]
    prefixes = prefix_digests(
        conversation.session.root, conversation.tokens, [_find_place(header.meta) for header in headers]
    )
    for row, header in zip(rows, headers, strict=True):
        meta = header.meta
        if isinstance(row, SegmentRow):
            same = (meta.kind, meta.id, meta.start, meta.end) == ("segment", row.id, row.start, row.end)
        else:
            same = (meta.kind, meta.id, meta.position) == ("checkpoint", row.id, row.position)
        whose = (conversation.session.root.hex(), headers[0].meta.fingerprint)
        if not same or (meta.root, meta.fingerprint) != whose or meta.prefix != prefixes[_find_place(meta)]:
            raise SegmentFileError("foreign", f"{row.id} says that it is {meta.kind} {meta.id}, after other tokens")
    for row, end, header, file in zip(conversation.segments, conversation.segment_ends, headers, files, strict=False):
        wanted = conversation.tokens[row.start * TOKEN_BYTES : end * TOKEN_BYTES]
        if read_tokens_from(file, header)[: len(wanted)] != wanted:
            raise SegmentFileError("tokens", f"{row.id} has other tokens than the index")


def _build_manifest(conversation: ConversationSnapshot, copies: list[SegmentCopy]) -> Manifest:
    session, segments, states = (
        conversation.session,
        copies[: len(conversation.segments)],
        copies[len(conversation.segments) :],
    )
    return Manifest(
        made=time.time(),
        model=session.model,
        fingerprint=segments[0].meta.fingerprint,
        layout=LayoutEntry(
            row_bytes=max(-(-copy.bytes_count // (copy.meta.end - copy.meta.start)) for copy in segments),
            state_bytes=max((copy.bytes_count for copy in states), default=0),
            tensors=segments[0].tensor_count,
        ),
        tokens=conversation.tokens,
        segments=[
            SegmentEntry(end=end, bytes_count=copy.bytes_count, prefill_s=_prefill_cost_s(row, end))
            for row, end, copy in zip(conversation.segments, conversation.segment_ends, segments, strict=True)
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
        turns=[TurnEntry(calls=turn.calls, tokens=turn.tokens, at=turn.at) for turn in conversation.turns],
    )


def _prefill_cost_s(row: SegmentRow, end: int) -> float:
    """What prefilling its part of a segment took."""
    tokens = end - row.start
    return min(row.prefill_s * tokens / (row.end - row.start), PREFILL_S_PER_TOKEN_MAX * tokens)
