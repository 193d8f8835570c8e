"""Saving: what of a conversation is to be written, making it part of the tree, and room for it."""

import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from warmline_common.protocol.messages import CheckpointRef, Layout, SavedFile, SaveReply, SegmentSpec
from warmline_common.protocol.tokens import SEGMENT_TOKENS_MAX, TOKEN_BYTES, chain_hashes
from warmline_proxy.index import eviction
from warmline_proxy.index.lookup import Walk, walk
from warmline_proxy.index.tree import advance_session, drop, new_id, replace
from warmline_proxy.store.errors import NoRoom
from warmline_proxy.store.rows import CheckpointRow, SaveCommitted, SavePlan, SegmentRow, SessionUpdate
from warmline_proxy.store.tables import Tables, blocks_within

SMALL_TOKENS = 1024  # a parent below this is rewritten together with what follows it
FILE_BYTES = 4096  # a file's header, at most
ROOM_FACTOR = 1.03  # what a file may weigh over its rows
ROW_BYTES = 4 * TOKEN_BYTES  # a row's token in the file and in the index, its share of hashes and blocks
INDEX_BYTES = 16 * 4096  # the pages that one commit may add to the index


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the caller would like to see saved: all of `tokens`, and the states at `checkpoints`."""

    root: bytes
    model: str
    tokens: bytes
    checkpoints: Sequence[int]
    layout: Layout
    may_replace: bool
    ends: Sequence[int] = ()  # where segments are to end, the last at the end of all tokens; else as large as may be


def begin(tables: Tables, wish: Wish, leased: Container[str]) -> SavePlan | None:
    """Plan the part that isn't stored; the plan stands in the index from now on."""
    count = len(wish.tokens) // TOKEN_BYTES
    found = walk(tables, wish.root, wish.tokens, count)
    small = _swallowable(tables, found, leased) if wish.may_replace and found.matched < count else None
    start, parent = (small.start, small.parent) if small else (found.matched, found.leaf)
    segments = _cut(start, count, parent, wish.ends) if found.matched < count else []
    checkpoints = _missing_checkpoints(tables, found, wish.checkpoints, count) if wish.layout.has_states else []
    if not segments and not checkpoints:
        return None
    plan = SavePlan(
        id=new_id(),
        root=wish.root,
        model=wish.model,
        matched=found.matched,
        tokens=wish.tokens,
        segments=segments,
        checkpoints=checkpoints,
        bytes_expected=_bytes_expected(segments, checkpoints, wish.layout),
        replaces=small.id if small else "",
    )
    tables.insert_save(plan)
    return plan


def _swallowable(tables: Tables, found: Walk, leased: Container[str]) -> SegmentRow | None:
    if not found.steps:
        return None
    row = found.steps[-1].row
    whole = found.matched == row.end and row.end - row.start < SMALL_TOKENS
    free = not row.pinned and row.id not in leased and not tables.children(row.root, row.id)
    return row if whole and free and row.id not in built_on(tables.saves()) else None


def built_on(plans: Iterable[SavePlan]) -> set[str]:
    """The segments that saves under way count on; perhaps "" among them."""
    return {segment for plan in plans for segment in (plan.replaces, *(spec.parent for spec in plan.segments[:1]))}


def _cut(start: int, end: int, parent: str, ends: Sequence[int]) -> list[SegmentSpec]:
    cuts = [cut for cut in ends if start < cut] or [*range(start + SEGMENT_TOKENS_MAX, end, SEGMENT_TOKENS_MAX), end]
    specs: list[SegmentSpec] = []
    for at, cut in zip([start, *cuts], cuts, strict=False):
        specs.append(SegmentSpec(id=new_id(), start=at, end=cut, parent=parent))
        parent = specs[-1].id
    return specs


def _missing_checkpoints(tables: Tables, found: Walk, positions: Sequence[int], count: int) -> list[CheckpointRef]:
    wanted = sorted({position for position in positions if 0 < position <= count})
    steps = {position: found.step_at(position) for position in wanted}
    return [
        CheckpointRef(id=new_id(), position=position)
        for position, step in steps.items()
        if step is None or not tables.checkpoint_at(step.row.id, position)
    ]


def _bytes_expected(segments: list[SegmentSpec], checkpoints: list[CheckpointRef], layout: Layout) -> int:
    rows = sum(spec.end - spec.start for spec in segments) * (layout.row_bytes + ROW_BYTES)
    states = len(checkpoints) * layout.state_bytes
    return int((rows + states) * ROOM_FACTOR) + FILE_BYTES * (len(segments) + len(checkpoints)) + INDEX_BYTES


# --- commit ---


def commit(
    tables: Tables, plan: SavePlan, reply: SaveReply, prefill_s: float, update: SessionUpdate, now: float
) -> SaveCommitted:
    """Everything at once; see Index.commit_save."""
    files = {file.id: file for file in [*reply.segments, *reply.checkpoints]}
    why_not = _conflict(tables, plan)
    if tables.save(plan.id) is None:
        files = {}  # given up: its files are deleted, or will be
    tables.remove_save(plan)
    rows = [] if why_not else _write_segments(tables, plan, files, prefill_s, now)
    if not why_not and len(rows) < len(plan.segments):
        why_not = "the backend did not write all of it"
    count = len(plan.tokens) // TOKEN_BYTES
    found = walk(tables, plan.root, plan.tokens, count)
    if not why_not and found.matched < count:
        why_not = "the rows that its states belong to are gone"
    written = {row.id for row in rows} | set(_write_checkpoints(tables, plan, files, found, now))
    session = advance_session(tables, found, plan.root, plan.tokens, update, now)
    for row in rows:
        tables.update_segment(msgspec.structs.replace(row, session=session))
    removed = [plan.replaces] if plan.replaces and rows else []
    for unused in [file_id for file_id in plan.file_ids if file_id not in written]:
        tables.doom(unused, files[unused].bytes_written if unused in files else 0)
        removed.append(unused)
    end = rows[-1].end if rows else plan.matched
    return SaveCommitted(session=session, tokens_saved=end - plan.matched, removed=removed, why_not=why_not)


def _conflict(tables: Tables, plan: SavePlan) -> str:
    """Why the plan no longer fits; "" where it does."""
    if tables.save(plan.id) is None:
        return "it was given up"
    if not plan.segments:
        return ""
    first = plan.segments[0]
    if first.parent and tables.segment(first.parent) is None:
        return "its parent is gone"
    if plan.replaces and tables.segment(plan.replaces) is None:
        return "the segment that it replaces is gone"
    if plan.replaces and tables.children(plan.root, plan.replaces):
        return "the segment that it replaces is built on"
    token = plan.tokens[first.start * TOKEN_BYTES : (first.start + 1) * TOKEN_BYTES]
    if tables.child(plan.root, first.parent, first.start, token) != plan.replaces:
        return "another save was sooner"
    return ""


def _write_segments(
    tables: Tables, plan: SavePlan, files: dict[str, SavedFile], prefill_s: float, now: float
) -> list[SegmentRow]:
    """Those that the backend wrote, up to the first that it did not."""
    rows: list[SegmentRow] = []
    hashes = chain_hashes(plan.root, plan.tokens)
    seconds_a_token = prefill_s / max(1, len(plan.tokens) // TOKEN_BYTES - plan.matched)
    for spec in plan.segments:
        if spec.id not in files:
            break
        row = SegmentRow(
            id=spec.id,
            parent=spec.parent,
            root=plan.root,
            model=plan.model,
            start=spec.start,
            end=spec.end,
            bytes_on_disk=files[spec.id].bytes_written,
            checksum=files[spec.id].checksum,
            created=now,
            prefill_s=seconds_a_token * (spec.end - max(spec.start, plan.matched)),
        )
        tokens = plan.tokens[row.start * TOKEN_BYTES : row.end * TOKEN_BYTES]
        mine = list(hashes[blocks_within(row.start, row.end)])
        old = tables.segment(plan.replaces) if not rows else None
        if old is not None:
            row.prefill_s += old.prefill_s
            row.pinned = old.pinned
            replace(tables, old, row, tokens, mine)
        else:
            tables.insert_segment(row, tokens, mine)
        rows.append(row)
    return rows


def _write_checkpoints(
    tables: Tables, plan: SavePlan, files: dict[str, SavedFile], found: Walk, now: float
) -> list[str]:
    """Those that lie on what is stored now, where no other save was sooner."""
    written = []
    for ref in plan.checkpoints:
        step, file = found.step_at(ref.position), files.get(ref.id)
        if step is None or file is None or tables.checkpoint_at(step.row.id, ref.position):
            continue
        tables.insert_checkpoint(
            CheckpointRow(
                id=ref.id,
                segment=step.row.id,
                position=ref.position,
                bytes_on_disk=file.bytes_written,
                checksum=file.checksum,
                created=now,
            )
        )
        written.append(ref.id)
    return written


def abort(tables: Tables, plan: SavePlan) -> list[str]:
    """Forget a plan that still stands, and doom what it may have written."""
    if tables.save(plan.id) is None:
        return []
    tables.remove_save(plan)
    for file_id in plan.file_ids:
        tables.doom(file_id, 0)
    return plan.file_ids


# --- room ---


def room(tables: Tables, budget: int, needed: int, bytes_index: int, leased: Container[str], must: bool) -> list[str]:
    """Evict until the budget holds with `needed` more bytes; quarantined files go first.

    Where that can't be: raises NoRoom if it `must` (the transaction is then undone), else evicts what may go.
    """
    now = time.time()
    doomed = sum(size for file_id, size in tables.doomed().items() if file_id not in leased)
    used = tables.totals(bytes_index).bytes_used - doomed
    wanted = eviction.bytes_to_free(used, needed, budget)
    if not wanted:
        return []
    removed, freed = _empty_quarantine(tables, wanted, leased)
    choice = eviction.choose(candidates(tables, leased), wanted - freed, now)
    if must and used + needed - freed - choice.bytes_freed > budget:
        most = freed + choice.bytes_freed
        raise NoRoom(f"{used + needed} bytes don't fit into {budget}, and no more than {most} may go")
    for file_id in choice.ids:
        removed += drop(tables, file_id, "evicted")
    return removed


def free(tables: Tables, wanted: int, leased: Container[str]) -> list[str]:
    """Evict until so many bytes are free that were not, quarantined files first; less where the rest is kept."""
    removed, freed = _empty_quarantine(tables, wanted, leased)
    if freed < wanted:
        for file_id in eviction.choose(candidates(tables, leased), wanted - freed, time.time()).ids:
            removed += drop(tables, file_id, "evicted")
    return removed


def _empty_quarantine(tables: Tables, wanted: int, leased: Container[str]) -> tuple[list[str], int]:
    ids, freed = [], 0
    for row in tables.quarantined():
        if freed >= wanted:
            break
        if row.id in leased:
            continue
        tables.remove_quarantined(row)
        tables.doom(row.id, row.bytes_on_disk)
        ids.append(row.id)
        freed += row.bytes_on_disk
    return ids, freed


def candidates(tables: Tables, leased: Container[str]) -> list[eviction.Candidate]:
    """All segments and checkpoints, as eviction wants to see them."""
    counted_on = built_on(tables.saves())
    found: list[eviction.Candidate] = []
    for row in tables.segments():
        before = row.start
        for checkpoint in tables.checkpoints(row.id):
            spares_s = row.prefill_s * (checkpoint.position - before) / (row.end - row.start)
            before = checkpoint.position
            found.append(_candidate(tables, checkpoint, row.id, spares_s, row.pinned or checkpoint.id in leased))
        kept = row.pinned or row.id in leased or row.id in counted_on
        found.append(_candidate(tables, row, row.parent, row.prefill_s, kept))
    return found


def _candidate(
    tables: Tables, row: SegmentRow | CheckpointRow, parent: str, saves_s: float, kept: bool
) -> eviction.Candidate:
    return eviction.Candidate(
        id=row.id,
        parent=parent,
        checkpoint=isinstance(row, CheckpointRow),
        bytes_count=row.bytes_on_disk,
        saves_s=saves_s,
        last_used=max(row.created, tables.usage(row.id).last_used),
        kept=kept,
    )
