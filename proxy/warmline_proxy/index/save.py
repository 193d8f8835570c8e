"""Saves: plan of the part of a conversation to be written, its commit to the tree, and room for it."""

import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from warmline_common.protocol.messages import CheckpointRef, KvLayout, SavedFile, SaveReply, SegmentSpec
from warmline_common.protocol.tokens import SEGMENT_TOKENS_MAX, TOKEN_BYTES, chain_hashes
from warmline_proxy.index import eviction
from warmline_proxy.index.lookup import LookupPath, lookup_path
from warmline_proxy.index.tree import advance_session, delete_quarantined, delete_subtree, new_id, replace_segment
from warmline_proxy.store.errors import DiskBudgetError
from warmline_proxy.store.rows import CheckpointRow, SavePlan, SaveResult, SegmentRow, SessionUpdate
from warmline_proxy.store.tables import Tables, block_range, token_at

SMALL_SEGMENT_TOKENS = 1024  # a parent below this is rewritten together with what follows it
FILE_HEADER_BYTES_MAX = 4096  # a file's header, at most
FILE_OVERHEAD_FACTOR = 1.03  # what a file may weigh over its rows
TOKEN_OVERHEAD_BYTES = 4 * TOKEN_BYTES  # a row's token in the file and in the index, its share of hashes and blocks
COMMIT_OVERHEAD_BYTES = 16 * 4096  # the pages that one commit may add to the index


@dataclass(frozen=True)
class SaveIntent:
    """Content of a wanted save: all of `tokens`, which have rows in memory, and the states at `checkpoints`."""

    root: bytes
    model: str
    tokens: bytes  # packed
    layout: KvLayout
    checkpoints: Sequence[int] = ()  # positions whose state is in memory
    may_replace: bool = True  # rows of a small parent are in memory, too: the first segment may include it
    segment_ends: Sequence[int] = ()  # the last at the end of all tokens; without any, segments are as large as may be


def begin_save(tables: Tables, intent: SaveIntent, leased: Container[str]) -> SavePlan | None:
    """Plan the part that isn't stored, and insert the plan; None where all is stored."""
    count = len(intent.tokens) // TOKEN_BYTES
    path = lookup_path(tables, intent.root, intent.tokens, count)
    small = _find_mergeable_parent(tables, path, leased) if intent.may_replace and path.matched_tokens < count else None
    start, parent = (small.start, small.parent) if small else (path.matched_tokens, path.leaf)
    segments = _split_segments(start, count, parent, intent.segment_ends) if path.matched_tokens < count else []
    checkpoints = _missing_checkpoints(tables, path, intent.checkpoints, count) if intent.layout.has_states else []
    if not segments and not checkpoints:
        return None
    plan = SavePlan(
        id=new_id(),
        root=intent.root,
        model=intent.model,
        matched=path.matched_tokens,
        tokens=intent.tokens,
        segments=segments,
        checkpoints=checkpoints,
        bytes_expected=_estimate_bytes(segments, checkpoints, intent.layout),
        replaces=small.id if small else "",
    )
    tables.insert_save_plan(plan)
    return plan


def _find_mergeable_parent(tables: Tables, path: LookupPath, leased: Container[str]) -> SegmentRow | None:
    if not path.steps:
        return None
    row = path.steps[-1].row
    is_small = path.matched_tokens == row.end and row.end - row.start < SMALL_SEGMENT_TOKENS
    is_free = not row.pinned and row.id not in leased and not tables.children(row.root, row.id)
    return row if is_small and is_free and row.id not in find_base_segments(tables.save_plans()) else None


def find_base_segments(plans: Iterable[SavePlan]) -> set[str]:
    """Segments that saves under way build on or replace; perhaps "" among them."""
    return {segment for plan in plans for segment in (plan.replaces, *(spec.parent for spec in plan.segments[:1]))}


def _split_segments(start: int, end: int, parent: str, segment_ends: Sequence[int]) -> list[SegmentSpec]:
    cuts = [start, *(cut for cut in segment_ends if start < cut)]
    if len(cuts) == 1:
        cuts = [*range(start, end, SEGMENT_TOKENS_MAX), end]
    specs: list[SegmentSpec] = []
    for at, cut in pairwise(cuts):
        specs.append(SegmentSpec(id=new_id(), start=at, end=cut, parent=parent))
        parent = specs[-1].id
    return specs


def _missing_checkpoints(tables: Tables, path: LookupPath, positions: Sequence[int], count: int) -> list[CheckpointRef]:
    return [
        CheckpointRef(id=new_id(), position=position)
        for position in sorted(set(positions))
        if 0 < position <= count
        if (step := path.step_at(position)) is None or not tables.checkpoint_at(step.row.id, position)
    ]


def _estimate_bytes(segments: list[SegmentSpec], checkpoints: list[CheckpointRef], layout: KvLayout) -> int:
    rows = sum(spec.end - spec.start for spec in segments) * (layout.row_bytes + TOKEN_OVERHEAD_BYTES)
    headers = FILE_HEADER_BYTES_MAX * (len(segments) + len(checkpoints))
    return int((rows + len(checkpoints) * layout.state_bytes) * FILE_OVERHEAD_FACTOR) + headers + COMMIT_OVERHEAD_BYTES


# --- commit ---


def commit_save(
    tables: Tables, plan: SavePlan, reply: SaveReply, prefill_s: float, update: SessionUpdate, now: float
) -> SaveResult:
    """Insert all that was written; see Index.commit_save."""
    files = {file.id: file for file in [*reply.segments, *reply.checkpoints]}
    why_not = _find_conflict(tables, plan)
    if tables.save_plan(plan.id) is None:
        files = {}  # aborted: its files are deleted, or will be
    tables.remove_save_plan(plan)
    rows = [] if why_not else _write_segments(tables, plan, files, prefill_s, now)
    if not why_not and len(rows) < len(plan.segments):
        why_not = "the backend did not write all of it"
    count = len(plan.tokens) // TOKEN_BYTES
    path = lookup_path(tables, plan.root, plan.tokens, count)
    if not why_not and path.matched_tokens < count:
        why_not = "the rows that its states belong to are gone"
    written = {row.id for row in rows} | set(_write_checkpoints(tables, plan, files, path, now))
    session = advance_session(tables, path, plan.root, plan.tokens, update, now)
    for row in rows:
        tables.update_segment(msgspec.structs.replace(row, session=session))
    removed = [plan.replaces] if plan.replaces and rows else []
    for unused in [file_id for file_id in plan.file_ids if file_id not in written and not tables.has_file(file_id)]:
        tables.mark_deleted(unused, files[unused].bytes_written if unused in files else 0)
        removed.append(unused)
    end = rows[-1].end if rows else plan.matched
    return SaveResult(session=session, tokens_saved=end - plan.matched, removed=removed, why_not=why_not)


def _find_conflict(tables: Tables, plan: SavePlan) -> str:
    """Reason why the plan no longer fits; "" where it does."""
    if tables.save_plan(plan.id) is None:
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
    if tables.child(plan.root, first.parent, first.start, token_at(plan.tokens, first.start)) != plan.replaces:
        return "another save was sooner"
    return ""


def _write_segments(
    tables: Tables, plan: SavePlan, files: dict[str, SavedFile], prefill_s: float, now: float
) -> list[SegmentRow]:
    """Insert the segments that the backend wrote, up to the first that it did not."""
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
        own_hashes = list(hashes[block_range(row.start, row.end)])
        old = tables.segment(plan.replaces) if not rows else None
        if old is not None:
            row.prefill_s += old.prefill_s
            row.pinned = old.pinned
            replace_segment(tables, old, row, tokens, own_hashes)
        else:
            tables.insert_segment(row, tokens, own_hashes)
        rows.append(row)
    return rows


def _write_checkpoints(
    tables: Tables, plan: SavePlan, files: dict[str, SavedFile], path: LookupPath, now: float
) -> list[str]:
    """Insert the checkpoints that lie on stored segments, where no other save was sooner; returns their ids."""
    written = []
    for ref in plan.checkpoints:
        step, file = path.step_at(ref.position), files.get(ref.id)
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


def abort_save(tables: Tables, plan: SavePlan) -> list[str]:
    """Remove a plan, and mark the files that it may have written as deleted; [] where it is over already."""
    if tables.save_plan(plan.id) is None:
        return []
    tables.remove_save_plan(plan)
    for file_id in plan.file_ids:
        tables.mark_deleted(file_id, 0)
    return plan.file_ids


# --- room ---


def make_room(
    tables: Tables, budget: int, needed: int, bytes_index: int, leased: Container[str], is_required: bool
) -> dict[str, int]:
    """Evict until the budget holds with `needed` more bytes; returns the bytes of each file.

    Where that can't be: raises DiskBudgetError if `is_required`, else evicts all that may be evicted.
    """
    pending = sum(size for file_id, size in tables.pending_deletions().items() if file_id not in leased)
    used = tables.totals(bytes_index).bytes_used - pending
    chosen = _choose_files(tables, eviction.bytes_to_free(used, needed, budget), leased)
    freed = sum(chosen.values())
    if is_required and used + needed - freed > budget:
        raise DiskBudgetError(f"{used + needed} bytes don't fit into {budget}, and no more than {freed} may go")
    return _evict(tables, chosen)


def free_bytes(tables: Tables, bytes_wanted: int, leased: Container[str]) -> dict[str, int]:
    """Evict until so many more bytes are free, fewer where the rest is protected; returns the bytes of each file."""
    return _evict(tables, _choose_files(tables, bytes_wanted, leased))


def _choose_files(tables: Tables, bytes_wanted: int, leased: Container[str]) -> dict[str, int]:
    """Files to evict, quarantined ones first, and the bytes of each."""
    chosen: dict[str, int] = {}
    for row in tables.quarantined():
        if bytes_wanted > 0 and row.id not in leased:
            chosen[row.id] = row.bytes_on_disk
            bytes_wanted -= row.bytes_on_disk
    if bytes_wanted > 0:
        chosen |= eviction.choose_evictions(candidates(tables, leased), bytes_wanted, time.time())
    return chosen


def _evict(tables: Tables, chosen: dict[str, int]) -> dict[str, int]:
    delete_quarantined(tables, chosen)
    for file_id in chosen:
        delete_subtree(tables, file_id, "evicted")
    return chosen


def candidates(tables: Tables, leased: Container[str]) -> list[eviction.EvictionCandidate]:
    """All segments and checkpoints as candidates."""
    bases = find_base_segments(tables.save_plans())
    found: list[eviction.EvictionCandidate] = []
    for row in tables.segments():
        before = row.start
        for checkpoint in tables.checkpoints(row.id):
            saved_s = row.prefill_s * (checkpoint.position - before) / (row.end - row.start)
            before = checkpoint.position
            found.append(_make_candidate(tables, checkpoint, row.id, saved_s, row.pinned or checkpoint.id in leased))
        is_protected = row.pinned or row.id in leased or row.id in bases
        found.append(_make_candidate(tables, row, row.parent, row.prefill_s, is_protected))
    return found


def _make_candidate(
    tables: Tables, row: SegmentRow | CheckpointRow, parent: str, prefill_saved_s: float, is_protected: bool
) -> eviction.EvictionCandidate:
    return eviction.EvictionCandidate(
        id=row.id,
        parent=parent,
        is_checkpoint=isinstance(row, CheckpointRow),
        bytes_count=row.bytes_on_disk,
        prefill_saved_s=prefill_saved_s,
        last_used=max(row.created, tables.usage(row.id).last_used),
        is_protected=is_protected,
    )
