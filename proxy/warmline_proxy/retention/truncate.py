"""Truncation of segments: rows that no conversation needs are removed; those that others need become a file.

The shortened copy is written first, under a save plan in the index; then one transaction replaces the segment, whose
file is deleted once no restore reads it.  After a kill in between, the next start deletes the copy, or the cut is done.
"""

import logging
from collections.abc import Container, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from io import BufferedReader

import msgspec

from warmline_common.protocol.messages import SavedFile, SegmentSpec
from warmline_common.protocol.tokens import BLOCK_TOKENS, TOKEN_BYTES
from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_common.storage.segment_copy import SegmentCopy, write_copy
from warmline_common.storage.segment_file import SegmentFileError, file_checksum, read_checksums_from, read_header_from
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.index.save import abort_save, find_base_segments
from warmline_proxy.index.tree import new_id, replace_segment
from warmline_proxy.store.rows import IndexSnapshot, SavePlan, SegmentRow, Truncation
from warmline_proxy.store.tables import Tables

ROUNDS_MAX = 3  # when other saves change the cuts while copies are written
CHANGED_REASON = "it was changed meanwhile, again and again"

log = logging.getLogger(__name__)

TruncationPoints = Mapping[str, int]  # by segment, its new end, in tokens


@dataclass(frozen=True)
class _ShortenedCopy:
    """Copy that is to replace a segment, or the reason why there is none."""

    row: SegmentRow  # the segment when the copy was made
    until: int
    plan: SavePlan | None = None
    file: SavedFile | None = None
    why_not: str = ""


class Truncator:
    """Truncation in rounds: `prepare` copies, `apply` them in a transaction if it `is_ready`, else `prepare` again.

    `close` deletes the copies that were not applied.  Any thread, one at a time.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._copies: dict[str, _ShortenedCopy] = {}
        self._plans: list[SavePlan] = []
        self._rounds = 0

    def close(self) -> None:
        """Delete the copies that were not applied: the others have no plan any more."""

        def abort_saves(tables: Tables) -> list[list[str]]:
            return [abort_save(tables, plan) for plan in self._plans]

        with suppress(IndexStoreError):  # else the next start deletes them
            if self._plans and any(self._index.transact(abort_saves, frees_space=True)):
                self._index.sweep()

    def prepare(self, cuts: TruncationPoints) -> None:
        """Write the missing copies; blocks, for long."""
        self._rounds += 1
        for segment, until in cuts.items():
            copy = self._copies.get(segment)
            if copy is None or copy.until != until:
                self._write_copy(segment, until)

    def is_ready(self, tables: Tables, cuts: TruncationPoints) -> bool:
        """Say whether `apply` can make all cuts, or the rounds are used up."""
        return self._rounds >= ROUNDS_MAX or all(self._find_copy(tables, *cut) for cut in cuts.items())

    def apply(self, tables: Tables, cuts: TruncationPoints, owner: str = "") -> list[Truncation]:
        """Replace segments by their copies; no stored row may need the removed rows.

        A segment that can't be cut is assigned to the session `owner`: truncate_orphaned_tails cuts it later, once no
        session has this id.
        """
        return [self._apply_truncation(tables, segment, until, owner) for segment, until in cuts.items()]

    def find_base_segments(self, tables: Tables) -> set[str]:
        """Find the segments that saves under way and other truncators build on."""
        own = {plan.id for plan in self._plans}
        return find_base_segments(plan for plan in tables.save_plans() if plan.id not in own)

    def _write_copy(self, segment: str, until: int) -> None:
        row = self._index.segment(segment)
        if row is None:
            return  # deleted meanwhile
        plan = _make_plan(row, until)
        try:
            self._plans.append(plan)
            self._index.transact(lambda tables: tables.insert_save_plan(plan))
            self._copies[segment] = _ShortenedCopy(row, until, plan, _write_shortened(self._index.home, row, plan))
        except SegmentFileError as error:
            self._record_failure(row, until, f"its file can't be used ({error})")
        except (IndexStoreError, OSError) as error:
            self._record_failure(row, until, f"no shorter file could be written ({error})")

    def _record_failure(self, row: SegmentRow, until: int, why_not: str) -> None:
        log.warning("unneeded rows of segment %s stay: %s", row.id, why_not)
        self._copies[row.id] = _ShortenedCopy(row, until, why_not=why_not)

    def _find_copy(self, tables: Tables, segment: str, until: int) -> _ShortenedCopy | None:
        """Find the prepared copy of a segment, if it still fits."""
        copy, row = self._copies.get(segment), tables.segment(segment)
        if copy is None or copy.until != until or row is None:
            return None
        # Not by the parent, which may be replaced by a shortened segment as well.
        if (row.checksum, row.start, row.end) != (copy.row.checksum, copy.row.start, copy.row.end):
            return None
        return copy if copy.plan is None or tables.save_plan(copy.plan.id) else None

    def _apply_truncation(self, tables: Tables, segment: str, until: int, owner: str) -> Truncation:
        row, copy = tables.segment(segment), self._find_copy(tables, segment, until)
        assert row is not None
        if copy is None or copy.plan is None or copy.file is None:
            tables.update_segment(msgspec.structs.replace(row, session=owner or row.session))
            why_not = copy.why_not if copy else CHANGED_REASON
            return Truncation(
                segment=segment, until=until, end=row.end, bytes_count=_estimate_bytes(row, until), why_not=why_not
            )
        tables.remove_save_plan(copy.plan)
        new = msgspec.structs.replace(
            row,
            id=copy.file.id,
            end=until,
            bytes_on_disk=copy.file.bytes_written,
            checksum=copy.file.checksum,
            session=row.session if row.session and tables.session(row.session) else "",
            prefill_s=row.prefill_s * (until - row.start) / (row.end - row.start),
        )
        tokens = tables.tokens(segment)[: (until - row.start) * TOKEN_BYTES]
        blocks = until // BLOCK_TOKENS - row.start // BLOCK_TOKENS
        replace_segment(tables, row, new, tokens, tables.hashes(segment)[:blocks])
        freed = row.bytes_on_disk - new.bytes_on_disk
        return Truncation(segment=segment, until=until, end=row.end, bytes_count=freed, became=new.id)


def _make_plan(row: SegmentRow, until: int) -> SavePlan:
    """Plan a copy; it reserves nothing in the budget, so that nothing is evicted for a file of a few moments."""
    return SavePlan(
        id=new_id(),
        root=row.root,
        model=row.model,
        matched=row.start,
        tokens=b"",
        segments=[SegmentSpec(id=new_id(), start=row.start, end=until, parent=row.parent)],
        checkpoints=[],
        bytes_expected=0,
        replaces=row.id,
    )


def _write_shortened(home: Home, row: SegmentRow, plan: SavePlan) -> SavedFile:
    """Write the copy.  Raises SegmentFileError, OSError."""
    spec = plan.segments[0]
    with _open_segment(home, row) as source:
        return write_copy(home.segment_file(spec.id), lambda: _shorten_segment(source, row, spec.id, spec.end))


def _open_segment(home: Home, row: SegmentRow) -> BufferedReader:
    path = home.segment_file(row.id)
    try:
        return BufferedReader(disk.open_to_read(path))
    except FileNotFoundError as error:
        raise SegmentFileError("missing", path.name) from error


def _shorten_segment(source: BufferedReader, row: SegmentRow, file_id: str, until: int) -> SegmentCopy:
    """Make the copy up to `until`, after checking that the source is the saved file.  Raises SegmentFileError."""
    header = read_header_from(source)
    # The row's checksum covers the file's position and the checksums of its tokens and tensors.
    if header.meta.id != row.id or file_checksum(read_checksums_from(source, header)) != row.checksum:
        raise SegmentFileError("foreign", f"it is not the file saved as {row.id}")
    meta = msgspec.structs.replace(header.meta, id=file_id, end=until, parent=row.parent)
    return SegmentCopy(source, header, meta, keeps_coding=True)


def _estimate_bytes(row: SegmentRow, until: int) -> int:
    """Estimate the bytes of the rows from `until` on."""
    return row.bytes_on_disk * (row.end - until) // (row.end - row.start)


def preview_truncation(home: Home, row: SegmentRow, until: int) -> Truncation:
    """Compute the bytes that a cut would free, by the file's header; estimate them where that can't be read, or where
    its tensors are coded.
    """
    freed = _estimate_bytes(row, until)
    with suppress(SegmentFileError, OSError), _open_segment(home, row) as source:
        copy = _shorten_segment(source, row, row.id, until)
        if not copy.is_coded:
            freed = row.bytes_on_disk - copy.bytes_count
    return Truncation(segment=row.id, until=until, end=row.end, bytes_count=freed)


def find_needed_segments(snapshot: IndexSnapshot, sessions: Iterable[str]) -> dict[str, int]:
    """Find the segments of these sessions' paths, each with the position up to which a session needs it."""
    needed: dict[str, int] = {}
    for session in sessions:
        row = snapshot.sessions[session]
        until = row.tokens
        for link in reversed(snapshot.segment_path(row.leaf)):
            needed[link.id] = max(needed.get(link.id, 0), until)
            until = link.start
    return needed


def find_orphaned_tails(tables: Tables) -> dict[str, int]:
    """Find the tails that no child and no session needs, of segments of a deleted session; by segment, the new end.

    Abandoned branches of a stored session are not among them: a client may come back to them.
    """
    snapshot = tables.snapshot()
    needed = find_needed_segments(snapshot, snapshot.sessions)
    for row in snapshot.segments.values():
        if row.parent:
            needed[row.parent] = max(needed.get(row.parent, 0), row.start)
    return {
        row.id: needed[row.id]
        for row in snapshot.segments.values()
        if row.session and row.session not in snapshot.sessions
        if needed.get(row.id, row.end) < row.end
    }


def truncate_orphaned_tails(index: Index, segment_ids: Container[str] | None = None) -> list[Truncation]:
    """Cut orphaned tails, of all segments or these, unless a save builds on them.  Blocks; raises IndexStoreError."""

    def find_truncations(tables: Tables) -> dict[str, int]:
        bases = truncator.find_base_segments(tables)
        return {
            segment: until
            for segment, until in find_orphaned_tails(tables).items()
            if segment not in bases and (segment_ids is None or segment in segment_ids)
        }

    def change(tables: Tables) -> list[Truncation] | None:
        cuts = find_truncations(tables)
        return truncator.apply(tables, cuts) if truncator.is_ready(tables, cuts) else None

    with closing(Truncator(index)) as truncator:
        while found := index.transact(find_truncations, frees_space=True):
            truncator.prepare(found)
            if (cuts := index.transact(change, frees_space=True)) is not None:
                return cuts
    return []
