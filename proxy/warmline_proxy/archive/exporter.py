"""Export of a conversation to an archive.

Needs neither a lock nor a proxy: an open file can be read to its end after it was evicted or purged.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from io import BufferedReader
from typing import BinaryIO

import msgspec

from warmline_common.process.file_limits import raise_descriptor_limit
from warmline_common.protocol.messages import convert
from warmline_common.protocol.tokens import TOKEN_BYTES, namespace, prefix_digests
from warmline_common.storage import disk
from warmline_common.storage.segment_copy import SegmentCopy
from warmline_common.storage.segment_file import SegmentFileError, SegmentHeader, read_header_from, read_tokens_from
from warmline_common.storage.segment_writer import Bytes
from warmline_proxy.archive import manifest, tar
from warmline_proxy.archive.tar import ArchiveError, Progress
from warmline_proxy.index.index import IndexReader
from warmline_proxy.index.reader import ConversationSnapshot
from warmline_proxy.store.rows import CheckpointRow, SegmentRow

TRIES_MAX = 5  # to open all files before one of them is rewritten or evicted
DESCRIPTORS_RESERVED = 64
REPAIR_HINT = "`cachectl verify --deep` finds the faults, `cachectl verify --repair` repairs them"


class ExportResult(msgspec.Struct, kw_only=True):
    """Result of an export, printed by `cachectl export --json`."""

    session: str
    model: str
    fingerprint: str
    tokens: int
    segments: int
    checkpoints: int
    turns: int  # sampled turns that called tools
    bytes_count: int  # of the archive


class Exporter(AbstractContextManager["Exporter"]):
    """Archive of a conversation to be written: a context manager; `read_chunks` is called once.

    Raises ArchiveError where the conversation is not stored or damaged; IndexStoreError, OSError.
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
        self._manifest_bytes = manifest.encode_manifest(self._manifest)

    def __exit__(self, *_: object) -> None:
        self._files.close()

    @property
    def bytes_count(self) -> int:
        sizes = [len(self._manifest_bytes), *(size for _, size in self._manifest.members)]
        return sum(tar.BLOCK_BYTES + size + tar.padding(size) for size in sizes) + tar.END_BYTES

    @property
    def result(self) -> ExportResult:
        content = self._manifest
        return ExportResult(
            session=content.session.id,
            model=content.model,
            fingerprint=content.fingerprint,
            tokens=content.token_count,
            segments=len(content.segments),
            checkpoints=len(content.checkpoints),
            turns=len(content.turns),
            bytes_count=self.bytes_count,
        )

    def read_chunks(self) -> Iterator[Bytes]:
        """Yield the archive's bytes.  Raises ArchiveError at a damaged file: then all that came before is useless."""
        done = 0
        for part in self._read_chunks():
            done += len(part)
            self._progress(done, self.bytes_count)
            yield part

    def _read_chunks(self) -> Iterator[Bytes]:
        made = self._manifest.made
        yield tar.encode_header(manifest.MANIFEST, len(self._manifest_bytes), made)
        yield self._manifest_bytes
        yield bytes(tar.padding(len(self._manifest_bytes)))
        for (name, size), copy in zip(self._manifest.members, self._copies, strict=True):
            yield tar.encode_header(name, size, made)
            try:
                yield from copy.read_chunks()
            except SegmentFileError as error:
                raise ArchiveError(f"its stored data is damaged ({error}): {REPAIR_HINT}") from error
            yield bytes(tar.padding(size))
        yield bytes(tar.END_BYTES)


def _open_conversation(
    reader: IndexReader, session_id: str, files: ExitStack
) -> tuple[ConversationSnapshot, list[BinaryIO]]:
    """Open a conversation's files, which can be read from then on whatever is evicted."""
    for _ in range(TRIES_MAX):
        if (found := reader.conversation(session_id)) is None:
            raise ArchiveError(f"nothing is stored of session {session_id}")
        raise_descriptor_limit(len(found.file_ids) + DESCRIPTORS_RESERVED)
        paths = [reader.home.segment_file(file_id) for file_id in found.file_ids]
        try:
            return found, [files.enter_context(BufferedReader(disk.open_to_read(path))) for path in paths]
        except FileNotFoundError:
            files.close()
    raise ArchiveError(f"files of session {session_id} are missing: {REPAIR_HINT}")


def _build_copies(conversation: ConversationSnapshot, files: list[BinaryIO]) -> list[SegmentCopy]:
    """Make the archive's files: in the namespace of no tenant, cut to this conversation's rows."""
    try:
        headers = [read_header_from(file) for file in files]
        _check_places(conversation, headers, files)
        root = namespace(headers[0].meta.fingerprint)
        prefixes = prefix_digests(root, conversation.tokens, [header.meta.span[0] for header in headers])
        ends = [*conversation.segment_ends, *(row.position for row in conversation.checkpoints)]
        copies: list[SegmentCopy] = []
        parent = ""
        for file, header, end in zip(files, headers, ends, strict=True):
            meta = msgspec.structs.replace(
                header.meta,
                root=root.hex(),
                prefix=prefixes[header.meta.span[0]],
                end=end,
                parent=parent if header.meta.kind == "segment" else "",
                model=conversation.session.model,
            )
            parent = meta.id
            copies.append(SegmentCopy(file, header, meta))
        return copies
    except SegmentFileError as error:
        raise ArchiveError(f"its stored data is damaged ({error}): {REPAIR_HINT}") from error


def _check_places(conversation: ConversationSnapshot, headers: list[SegmentHeader], files: list[BinaryIO]) -> None:
    """Raise SegmentFileError unless each file's header and tokens are those of its row."""
    rows: list[SegmentRow | CheckpointRow] = [*conversation.segments, *conversation.checkpoints]
    starts = [header.meta.span[0] for header in headers]
    prefixes = prefix_digests(conversation.session.root, conversation.tokens, starts)
    for row, header in zip(rows, headers, strict=True):
        meta = header.meta
        if isinstance(row, SegmentRow):
            same = (meta.kind, meta.id, meta.start, meta.end) == ("segment", row.id, row.start, row.end)
        else:
            same = (meta.kind, meta.id, meta.position) == ("checkpoint", row.id, row.position)
        origin = (conversation.session.root.hex(), headers[0].meta.fingerprint)
        if not same or (meta.root, meta.fingerprint) != origin or meta.prefix != prefixes[meta.span[0]]:
            raise SegmentFileError("foreign", f"{row.id} says that it is {meta.kind} {meta.id}, after other tokens")
    for row, end, header, file in zip(conversation.segments, conversation.segment_ends, headers, files, strict=False):
        tokens = conversation.tokens[row.start * TOKEN_BYTES : end * TOKEN_BYTES]
        if not read_tokens_from(file, header).startswith(tokens):
            raise SegmentFileError("tokens", f"{row.id} has other tokens than the index")


def _build_manifest(conversation: ConversationSnapshot, copies: list[SegmentCopy]) -> manifest.Manifest:
    session, count = conversation.session, len(conversation.segments)
    segments, states = copies[:count], copies[count:]
    entry = convert(session, manifest.SessionEntry, from_attributes=True)
    return manifest.Manifest(
        made=time.time(),
        model=session.model,
        fingerprint=segments[0].meta.fingerprint,
        layout=manifest.LayoutEntry(
            row_bytes=max(-(-copy.bytes_count // (copy.meta.end - copy.meta.start)) for copy in segments),
            state_bytes=max((copy.bytes_count for copy in states), default=0),
            tensors=segments[0].tensor_count,
        ),
        tokens=conversation.tokens,
        segments=[
            manifest.SegmentEntry(end=end, bytes_count=copy.bytes_count, prefill_s=_prefill_cost_s(row, end))
            for row, end, copy in zip(conversation.segments, conversation.segment_ends, segments, strict=True)
        ],
        checkpoints=[
            manifest.CheckpointEntry(position=each.meta.position, bytes_count=each.bytes_count) for each in states
        ],
        session=msgspec.structs.replace(entry, turn_end=min(session.turn_end, session.tokens)),
        turns=[convert(turn, manifest.TurnEntry, from_attributes=True) for turn in conversation.turns],
    )


def _prefill_cost_s(row: SegmentRow, end: int) -> float:
    """Estimate the prefill time of a segment's rows up to `end`."""
    tokens = end - row.start
    return min(row.prefill_s * tokens / (row.end - row.start), manifest.PREFILL_S_PER_TOKEN_MAX * tokens)
