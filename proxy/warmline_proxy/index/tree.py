"""Changes that keep the tree whole: deletion from the leaves up, and conversations moved along with their segments."""

import secrets
from collections.abc import Callable, Container

import msgspec
import xxhash

from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_proxy.index.lookup import LookupPath
from warmline_proxy.store.rows import (
    PREWARM_CLIENT,
    CheckpointRow,
    QuarantineRow,
    SegmentRow,
    SessionRow,
    SessionUpdate,
)
from warmline_proxy.store.tables import Tables, encode_parent_key


def new_id() -> str:
    return secrets.token_hex(16)


# --- deletion and quarantine ---


def delete_subtree(tables: Tables, file_id: str, why: str) -> list[str]:
    """Remove a checkpoint, or a segment with all that builds on it; their files are to be deleted.  Returns the ids."""
    rows = _subtree_files(tables, file_id)
    for row in rows:
        _remove_file(tables, row, why)
        tables.mark_deleted(row.id, row.bytes_on_disk)
    return [row.id for row in rows]


def quarantine_subtree(tables: Tables, file_id: str, reason: str, now: float) -> list[str]:
    """As `delete_subtree`, but the files are kept in quarantine, each with its reason."""
    rows = _subtree_files(tables, file_id)
    for row in rows:
        if isinstance(row, CheckpointRow):
            segment, base, start, end = tables.segment(row.segment), row.segment, row.position, row.position
        else:
            segment, base, start, end = row, file_id, row.start, row.end
        _remove_file(tables, row, f"quarantined ({reason})")
        tables.insert_quarantined(
            QuarantineRow(
                id=row.id,
                kind="segment" if row is segment else "checkpoint",
                model=segment.model if segment else "",
                start=start,
                end=end,
                bytes_on_disk=row.bytes_on_disk,
                reason=reason if row.id == file_id else f"builds on {base}: {reason}",
                at=now,
            )
        )
    return [row.id for row in rows]


def delete_quarantined(tables: Tables, ids: Container[str]) -> None:
    """Remove these from quarantine; their files are to be deleted."""
    for row in tables.quarantined():
        if row.id in ids:
            tables.remove_quarantined(row)
            tables.mark_deleted(row.id, row.bytes_on_disk)


def _subtree_files(tables: Tables, file_id: str) -> list[SegmentRow | CheckpointRow]:
    """A checkpoint, or a segment with all that builds on it: leaves first, and checkpoints before their segment."""
    if checkpoint := tables.checkpoint(file_id):
        return [checkpoint]
    segments, pending = list[SegmentRow](), [tables.segment(file_id)]
    while pending:
        if row := pending.pop():
            segments.append(row)
            pending += [tables.segment(child) for child in tables.children(row.root, row.id)]
    files: list[SegmentRow | CheckpointRow] = []
    for segment in reversed(segments):
        files += [*tables.checkpoints(segment.id), segment]
    return files


def update_quarantine_sizes(tables: Tables, size_of: Callable[[str], int | None]) -> None:
    """Let the budget count the present sizes of these files; remove the rows of files that are gone."""
    for row in tables.quarantined():
        size = size_of(row.id)
        if size != row.bytes_on_disk:
            tables.remove_quarantined(row)
            if size is not None:
                tables.insert_quarantined(msgspec.structs.replace(row, bytes_on_disk=size))


def _remove_file(tables: Tables, row: SegmentRow | CheckpointRow, why: str) -> None:
    """Remove the row of a checkpoint, or of a leaf; conversations on a leaf end at its parent from now on."""
    if isinstance(row, CheckpointRow):
        tables.remove_checkpoint(row)
        return
    for session in tables.anchored_sessions(row.id):
        _shorten_session(tables, session, row)
    tables.remove_segment(row, why)


def _shorten_session(tables: Tables, session: SessionRow, row: SegmentRow) -> None:
    if session.leaf == row.id:
        session.leaf, session.tokens = row.parent, row.start
    if session.turn_segment == row.id:
        session.turn_segment = ""
    if not session.leaf or (not session.turn_segment and _is_parent_shared(tables, row, session.id)):
        tables.remove_session(session.id)  # all that is left is shared
    else:
        tables.put_session(session)


def _is_parent_shared(tables: Tables, row: SegmentRow, session_id: str) -> bool:
    siblings = len(tables.children(row.root, row.parent)) > 1
    return siblings or any(other.id != session_id for other in tables.anchored_sessions(row.parent))


def replace_segment(tables: Tables, old: SegmentRow, new: SegmentRow, tokens: bytes, hashes: list[bytes]) -> None:
    """Put `new` in the place of a segment that begins alike, with its checkpoints, sessions, usage and children.

    No child and no conversation of `old` is beyond the end of `new`; checkpoints there are deleted.
    """
    checkpoints, sessions, usage = tables.checkpoints(old.id), tables.anchored_sessions(old.id), tables.usage(old.id)
    for checkpoint in checkpoints:
        tables.remove_checkpoint(checkpoint)
    for session in sessions:
        tables.remove_session(session.id)
    tables.remove_segment(old, "")
    tables.insert_segment(new, tokens, hashes)
    tables.put_usage(new.id, usage)
    _reparent_children(tables, old, new)
    for checkpoint in checkpoints:
        if checkpoint.position <= new.end:
            tables.insert_checkpoint(msgspec.structs.replace(checkpoint, segment=new.id))
        else:
            tables.mark_deleted(checkpoint.id, checkpoint.bytes_on_disk)
    for session in sessions:
        session.leaf = new.id if session.leaf == old.id else session.leaf
        session.turn_segment = new.id if session.turn_segment == old.id else session.turn_segment
        tables.put_session(session)
    tables.mark_deleted(old.id, old.bytes_on_disk)


def _reparent_children(tables: Tables, old: SegmentRow, new: SegmentRow) -> None:
    """Move the children of `old`, of which there may be thousands; entries under their own ids stay as they are."""
    before, after = encode_parent_key(old.root, old.id), encode_parent_key(new.root, new.id)
    for key, child in list(tables.items("children", before)):
        row = tables.segment(child.hex())
        tables.delete("children", key)
        if row is not None:
            tables.put("children", after + key[len(before) :], child)
            tables.update_segment(msgspec.structs.replace(row, parent=new.id))


# --- conversations ---


def advance_session(
    tables: Tables, path: LookupPath, root: bytes, tokens: bytes, update: SessionUpdate, now: float
) -> str:
    """Move the end of the conversation of `tokens` to where they are stored now; create it where none fits.

    Returns its id, or "" where nothing of it is stored.
    """
    if not path.steps:
        return ""
    count = len(tokens) // TOKEN_BYTES
    turn_end = update.turn_end if 0 < update.turn_end <= count else count
    turn = path.step_at(turn_end)
    row = _find_session(tables, path, tokens, update.client)
    if row is None:
        row = SessionRow(
            id=secrets.token_hex(6), root=root, model="", leaf="", tokens=0, turn_end=0, turn_digest=b"",
            turn_segment="", created=now, last_used=now, requests=0,
        )  # fmt: skip
    row.model = path.steps[-1].row.model
    row.leaf, row.tokens = path.leaf, path.matched_tokens
    row.turn_end, row.turn_digest = turn_end, digest_prefix(tokens, turn_end)
    row.turn_segment = "" if turn is None else turn.row.id
    row.last_used = now
    row.requests += update.requests
    row.hits += update.hit
    row.client = update.client or row.client
    row.title = row.title or update.title
    tables.put_session(row)
    return row.id


def _find_session(tables: Tables, path: LookupPath, tokens: bytes, client: str) -> SessionRow | None:
    """Session whose tokens up to the end of its last turn `tokens` begin with; the longest such, then the latest."""
    anchored = {row.id: row for step in path.steps for row in tables.anchored_sessions(step.row.id)}
    fitting = [
        row
        for row in anchored.values()
        if _is_same_client(row.client, client)
        and row.turn_end * TOKEN_BYTES <= len(tokens)
        and digest_prefix(tokens, row.turn_end) == row.turn_digest
    ]
    return max(fitting, key=lambda row: (row.turn_end, row.client == client, row.last_used), default=None)


def _is_same_client(one: str, other: str) -> bool:
    """False where two names differ.  An unnamed conversation may be any client's, but none that was prewarmed."""
    is_prewarmed = any(name.startswith(PREWARM_CLIENT) for name in (one, other))
    return one == other or not (is_prewarmed or (one and other))


def digest_prefix(tokens: bytes, count: int) -> bytes:
    """Digest of the first `count` packed tokens, as in `SessionRow.turn_digest`."""
    return xxhash.xxh3_128_digest(tokens[: count * TOKEN_BYTES])
