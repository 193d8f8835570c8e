"""Changes that keep the tree whole: dropping from the leaves up, and moving conversations with what they stand on."""

import secrets
from collections.abc import Callable

import msgspec
import xxhash

from warmline_common.protocol.tokens import TOKEN_BYTES
from warmline_proxy.index.lookup import LookupPath
from warmline_proxy.store.rows import CheckpointRow, QuarantineRow, SegmentRow, SessionRow, SessionUpdate
from warmline_proxy.store.tables import Tables, encode_parent_key


def new_id() -> str:
    return secrets.token_hex(16)


# --- dropping ---


def subtree(tables: Tables, row: SegmentRow) -> list[SegmentRow]:
    """The segment and all that builds on it, leaves first."""
    rows, waiting = [], [row]
    while waiting:
        rows.append(waiting.pop())
        children = (tables.segment(child) for child in tables.children(row.root, rows[-1].id))
        waiting += [child for child in children if child is not None]
    return rows[::-1]


def delete_subtree(tables: Tables, file_id: str, why: str) -> list[str]:
    """Take a checkpoint, or a segment with all that builds on it, out of the index; their files are doomed."""
    if checkpoint := tables.checkpoint(file_id):
        _delete_checkpoint(tables, checkpoint)
        return [file_id]
    if (row := tables.segment(file_id)) is None:
        return []
    dropped: list[str] = []
    for segment in subtree(tables, row):
        for checkpoint in tables.checkpoints(segment.id):
            _delete_checkpoint(tables, checkpoint)
            dropped.append(checkpoint.id)
        _remove_leaf(tables, segment, why)
        tables.mark_deleted(segment.id, segment.bytes_on_disk)
        dropped.append(segment.id)
    return dropped


def quarantine_subtree(tables: Tables, file_id: str, reason: str, now: float) -> list[str]:
    """As `drop`, but the files are kept aside, each with the reason."""
    if checkpoint := tables.checkpoint(file_id):
        _quarantine_checkpoint(tables, checkpoint, reason, now)
        return [file_id]
    if (row := tables.segment(file_id)) is None:
        return []
    quarantined: list[str] = []
    for segment in subtree(tables, row):
        why = reason if segment.id == file_id else f"builds on {file_id}: {reason}"
        for checkpoint in tables.checkpoints(segment.id):
            _quarantine_checkpoint(tables, checkpoint, f"builds on {segment.id}: {reason}", now)
            quarantined.append(checkpoint.id)
        _remove_leaf(tables, segment, f"quarantined ({reason})")
        tables.insert_quarantined(
            QuarantineRow(
                id=segment.id,
                kind="segment",
                model=segment.model,
                start=segment.start,
                end=segment.end,
                bytes_on_disk=segment.bytes_on_disk,
                reason=why,
                at=now,
            )
        )
        quarantined.append(segment.id)
    return quarantined


def update_quarantine_sizes(tables: Tables, size_of: Callable[[str], int | None]) -> None:
    """The budget counts what these files weigh now, not what was once written; those that are gone weigh nothing."""
    for row in tables.quarantined():
        size = size_of(row.id)
        if size != row.bytes_on_disk:
            tables.remove_quarantined(row)
            if size is not None:
                tables.insert_quarantined(msgspec.structs.replace(row, bytes_on_disk=size))


def _delete_checkpoint(tables: Tables, row: CheckpointRow) -> None:
    tables.remove_checkpoint(row)
    tables.mark_deleted(row.id, row.bytes_on_disk)


def _quarantine_checkpoint(tables: Tables, row: CheckpointRow, reason: str, now: float) -> None:
    segment = tables.segment(row.segment)
    tables.remove_checkpoint(row)
    tables.insert_quarantined(
        QuarantineRow(
            id=row.id,
            kind="checkpoint",
            model="" if segment is None else segment.model,
            start=row.position,
            end=row.position,
            bytes_on_disk=row.bytes_on_disk,
            reason=reason,
            at=now,
        )
    )


def _remove_leaf(tables: Tables, row: SegmentRow, why: str) -> None:
    """Remove a leaf's row, its conversations first: they end at its parent now."""
    for session in tables.anchored_sessions(row.id):
        _shorten_session(tables, session, row)
    tables.remove_segment(row, why)


def _shorten_session(tables: Tables, session: SessionRow, row: SegmentRow) -> None:
    if session.leaf == row.id:
        session.leaf, session.tokens = row.parent, row.start
    if session.turn_segment == row.id:
        session.turn_segment = ""
    cut = not session.turn_segment
    if not session.leaf or (cut and _is_parent_shared(tables, row, session.id)):
        tables.remove_session(session.id)  # nothing is left that is its own
    else:
        tables.put_session(session)


def _is_parent_shared(tables: Tables, row: SegmentRow, session_id: str) -> bool:
    siblings = len(tables.children(row.root, row.parent)) > 1
    return siblings or any(other.id != session_id for other in tables.anchored_sessions(row.parent))


def replace_segment(tables: Tables, old: SegmentRow, new: SegmentRow, tokens: bytes, hashes: list[bytes]) -> None:
    """Put `new` in the place of a segment that begins alike, and move over what that carried.

    No child and no conversation of `old` is beyond the end of `new`; states there go.
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
    """The children of `old`, of which there may be thousands: their own tables stay as they are."""
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
    """Let the conversation that `tokens` belong to end where they are stored now; a new one where none fits.

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
    row.turn_end, row.turn_digest = turn_end, _digest(tokens, turn_end)
    row.turn_segment = "" if turn is None else turn.row.id
    row.last_used = now
    row.requests += update.requests
    row.hits += update.hit
    row.client = update.client or row.client
    tables.put_session(row)
    return row.id


def _find_session(tables: Tables, path: LookupPath, tokens: bytes, client: str) -> SessionRow | None:
    """The session whose tokens up to the end of its last turn these begin with; the longest such, then the latest."""
    anchored = {row.id: row for step in path.steps for row in tables.anchored_sessions(step.row.id)}
    fitting = [
        row
        for row in anchored.values()
        if not (row.client and client and row.client != client)
        and row.turn_end * TOKEN_BYTES <= len(tokens)
        and _digest(tokens, row.turn_end) == row.turn_digest
    ]
    return max(fitting, key=lambda row: (row.turn_end, row.client == client, row.last_used), default=None)


def _digest(tokens: bytes, count: int) -> bytes:
    return xxhash.xxh3_128_digest(tokens[: count * TOKEN_BYTES])
