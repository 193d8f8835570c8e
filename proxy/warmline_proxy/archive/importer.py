"""Import of an archive into a home, as one save: all of it becomes visible at once, or nothing.

The whole archive is checked before anything is written or evicted for it; stored tokens are skipped; after a kill the
next start deletes the written files.  Needs `home.lock`, as the index does.
"""

import shutil
import time
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from warmline_common.protocol.messages import KvLayout, SavedFile, SaveReply
from warmline_common.protocol.tokens import namespace, prefix_digests
from warmline_common.storage.segment_copy import SegmentCopy, write_copy
from warmline_common.storage.segment_file import FileMeta, SegmentFileError, SegmentHeader, read_header
from warmline_proxy.archive.manifest import Manifest
from warmline_proxy.archive.reader import Archive, verify_archive
from warmline_proxy.archive.tar import ArchiveError, Progress
from warmline_proxy.index.index import DiskBudgetError, Index, IndexReader
from warmline_proxy.index.save import SaveIntent
from warmline_proxy.store.rows import SavePlan, SessionUpdate, TurnRow

TRIES_MAX = 3  # when another save takes the place meanwhile
FREE_BYTES_MIN = 64 << 20  # left on the disk, for the index and other programs
FINGERPRINT_DIGITS = 12  # of a fingerprint in messages


class ImportRequest(msgspec.Struct, kw_only=True):
    """POST /warmline/import of the proxy."""

    path: str  # absolute, of a file that the proxy can read
    key: str = ""  # name of the client key that is to own it; "": the only key, or none where there are no keys
    anyway: bool = False  # also where no known model can use it


class ImportReply(msgspec.Struct, kw_only=True):
    """Answer of POST /warmline/import, printed by `cachectl import --json`."""

    session: str  # its id in this home
    model: str
    fingerprint: str
    tokens: int
    tokens_known: int  # stored before the import
    segments: int  # written
    checkpoints: int  # written
    turns: int
    bytes_written: int


class KnownModels(msgspec.Struct, kw_only=True):
    """Models that can use an import."""

    fingerprints: Collection[str]
    description: str  # for people: "the model served here (llama, 0123456789ab)"


def find_known_models(reader: IndexReader) -> KnownModels:
    """Find the models of the stored segments, for a home whose backend does not run."""
    by_root = {row.root: row for row in reader.segments()}
    found: dict[str, str] = {}
    for row in by_root.values():
        try:
            found[read_header(reader.home.segment_file(row.id)).meta.fingerprint] = row.model
        except SegmentFileError:
            continue
    named = ", ".join(f"{model} {fingerprint[:FINGERPRINT_DIGITS]}" for fingerprint, model in sorted(found.items()))
    return KnownModels(fingerprints=found, description=f"the stored data is of {named}")


def import_archive(
    index: Index,
    archive: Archive,
    tenant: str,
    known_models: KnownModels,
    *,
    anyway: bool = False,
    progress: Progress = lambda done, total: None,
) -> ImportReply:
    """Import an archive; blocks.  `progress` gets the bytes checked, then copied, and may raise to end the import.

    Raises ArchiveError, DiskBudgetError and other IndexStoreErrors, OSError; nothing is left behind then.
    """
    manifest = archive.manifest
    _check_fingerprint(manifest, known_models, anyway)
    whole = archive.bytes_count
    headers = verify_archive(archive, lambda done, _: progress(done, 2 * whole))
    root = namespace(manifest.fingerprint, tenant)
    for _ in range(TRIES_MAX):
        plan = _begin_save(index, manifest, headers, root)
        if plan is None:
            session = _find_continued_session(index, manifest, root)
            session = session or index.record_session(root, manifest.tokens, _make_session_update(index, manifest, 0))
            return _record_turns(index, manifest, root, _make_reply(manifest, session))
        try:
            reply = _write_files(index, archive, headers, plan, lambda done, of: progress(whole + done, whole + of))
            committed = index.commit_save(
                plan, reply, prefill_s=_prefill_cost_s(manifest, plan), session=_make_session_update(index, manifest, 1)
            )
        except BaseException:
            index.abort_save(plan)
            raise
        if not committed.why_not:
            return _record_turns(index, manifest, root, _make_reply(manifest, committed.session, plan, reply))
    raise ArchiveError(f"something else is being stored in its place, again and again: {committed.why_not}")


def _check_fingerprint(manifest: Manifest, known_models: KnownModels, anyway: bool) -> None:
    if anyway or not known_models.fingerprints or manifest.fingerprint in known_models.fingerprints:
        return
    raise ArchiveError(
        f"it was made with {manifest.model}, fingerprint {manifest.fingerprint[:FINGERPRINT_DIGITS]}, and "
        f"{known_models.description}: nothing here can use it; to store it for when that very model is served, say "
        "--anyway"
    )


def _find_continued_session(index: Index, manifest: Manifest, root: bytes) -> str:
    """Find the session whose tokens begin with all of these; "" where there is none."""
    chain = index.match_prefix(root, manifest.tokens, manifest.token_count).chain
    if not chain or chain[-1].upto < manifest.token_count:
        return ""
    snapshot, last = index.snapshot(), chain[-1].id
    for row in sorted(snapshot.sessions.values(), key=lambda row: -row.last_used):
        path = snapshot.segment_path(row.leaf)
        leaves_at = [link.start for link in path[1:]] + [row.tokens]
        if any(link.id == last and end >= manifest.token_count for link, end in zip(path, leaves_at, strict=True)):
            return row.id
    return ""


def _make_session_update(index: Index, manifest: Manifest, requests: int) -> SessionUpdate:
    """`requests`: 1 where some tokens are new here, so that the archive's requests count; else 0."""
    session = manifest.session
    return SessionUpdate(
        turn_end=session.turn_end,
        client=session.client,
        title=session.title if index.keeps_texts else "",
        requests=requests * session.requests,
    )


def _begin_save(index: Index, manifest: Manifest, headers: Sequence[SegmentHeader], root: bytes) -> SavePlan | None:
    """Plan the save; None where all tokens are stored.  Raises DiskBudgetError, with figures."""
    states = headers[len(manifest.segments) :]
    rows_bytes = sum(header.file_bytes for header in headers[: len(manifest.segments)])
    layout = KvLayout(
        row_bytes=-(-rows_bytes // manifest.token_count),
        state_bytes=max((header.file_bytes for header in states), default=0),
        has_rows=True,
        has_states=bool(states),
        has_windows=False,
        persistent=True,
        families=[],
    )
    needed, free = sum(header.file_bytes for header in headers), shutil.disk_usage(index.home.segments).free
    stored = index.match_prefix(root, manifest.tokens, manifest.token_count).tokens
    if stored < manifest.token_count and needed + FREE_BYTES_MIN > free:
        raise DiskBudgetError(f"it takes {needed} bytes, and the disk of {index.home.segments} has {free} left")
    intent = SaveIntent(
        root=root,
        model=manifest.model,
        tokens=manifest.tokens,
        checkpoints=[entry.position for entry in manifest.checkpoints],
        layout=layout,
        may_replace=False,
        segment_ends=manifest.segment_ends,
    )
    return index.begin_save(intent)


def _write_files(
    index: Index, archive: Archive, headers: Sequence[SegmentHeader], plan: SavePlan, progress: Progress
) -> SaveReply:
    """Write the planned files from the archive, as a backend does on POST /kv/save."""
    files = _plan_files(archive.manifest, plan)
    saved: list[SavedFile] = []
    total, done = sum(archive.members[number].bytes_count for number, _ in files), 0
    for number, meta in files:
        saved.append(_copy_file(index, archive, number, headers[number], meta))
        done += archive.members[number].bytes_count
        progress(done, total)
    count = len(plan.segments)
    return SaveReply(boot="", generation=0, segments=saved[:count], checkpoints=saved[count:], seconds=0.0)


def _plan_files(manifest: Manifest, plan: SavePlan) -> list[tuple[int, FileMeta]]:
    """Files to write: the number of the archive's member with their rows or states, and their metadata."""
    places = [*(spec.start for spec in plan.segments), *(ref.position for ref in plan.checkpoints)]
    prefixes = prefix_digests(plan.root, plan.tokens, places)

    def make_meta(file_id: str, start: int, end: int, **fields: Any) -> FileMeta:
        origin: dict[str, Any] = {"fingerprint": manifest.fingerprint, "model": manifest.model, "root": plan.root.hex()}
        return FileMeta(id=file_id, start=start, end=end, prefix=prefixes[start], **origin, **fields)

    files = []
    for spec in plan.segments:
        number = next(number for number, end in enumerate(manifest.segment_ends) if end >= spec.end)
        files.append((number, make_meta(spec.id, spec.start, spec.end, kind="segment", parent=spec.parent)))
    positions = [entry.position for entry in manifest.checkpoints]
    for ref in plan.checkpoints:
        number = len(manifest.segments) + positions.index(ref.position)
        meta = make_meta(ref.id, ref.position, ref.position, kind="checkpoint", position=ref.position)
        files.append((number, meta))
    return files


def _copy_file(index: Index, archive: Archive, number: int, header: SegmentHeader, meta: FileMeta) -> SavedFile:
    path = index.home.segment_file(meta.id)
    try:
        return write_copy(path, lambda: SegmentCopy(archive.open_member(number), header, meta, keeps_coding=True))
    except SegmentFileError as error:
        raise ArchiveError(f"{archive.members[number].name} in it can't be used: {error}") from error


def _prefill_cost_s(manifest: Manifest, plan: SavePlan) -> float:
    """Estimate the prefill time of the tokens that were not stored."""
    entries = zip(manifest.segment_starts, manifest.segment_ends, manifest.segments, strict=True)
    return sum(
        entry.prefill_s * max(0, end - max(start, plan.matched)) / (end - start) for start, end, entry in entries
    )


def _make_reply(
    manifest: Manifest, session: str, plan: SavePlan | None = None, reply: SaveReply | None = None
) -> ImportReply:
    files = [*reply.segments, *reply.checkpoints] if reply else []
    return ImportReply(
        session=session,
        model=manifest.model,
        fingerprint=manifest.fingerprint,
        tokens=manifest.token_count,
        tokens_known=plan.matched if plan else manifest.token_count,
        segments=len(reply.segments) if reply else 0,
        checkpoints=len(reply.checkpoints) if reply else 0,
        turns=0,
        bytes_written=sum(file.bytes_written for file in files),
    )


def _record_turns(index: Index, manifest: Manifest, root: bytes, reply: ImportReply) -> ImportReply:
    """Record the archive's sampled turns, except those with stored calls; complete the reply."""
    stored = {call for row in index.turns(root, [turn.calls[0] for turn in manifest.turns]) for call in row.calls}
    new = [turn for turn in manifest.turns if stored.isdisjoint(turn.calls)]
    for turn in new:
        row = TurnRow(
            root=root, model=manifest.model, session=reply.session, calls=turn.calls, tokens=turn.tokens, at=time.time()
        )
        index.record_turn(row)
    index.flush()
    reply.turns = len(new)
    return reply
