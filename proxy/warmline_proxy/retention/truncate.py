"""Cutting: of a segment that others stand on the rows go that nobody needs; the rest becomes a file of its own.

The shorter file is written first, while a plan stands in the index for it, as for a save; then one transaction puts it
in the place of the longer one, which is deleted once no restore reads it.  Whatever is killed in between, all is as it
was (the next start deletes the file that has no row), or the cut is done.
"""

import logging
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from typing import Self

import msgspec

from warmline_common.protocol.messages import SavedFile, SegmentSpec
from warmline_common.protocol.tokens import BLOCK_TOKENS, TOKEN_BYTES
from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_common.storage.segment_copy import SegmentCopy, write_copy
from warmline_common.storage.segment_file import (
    SegmentFileError,
    SegmentHeader,
    file_checksum,
    read_checksums_from,
    read_header_from,
)
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.index.save import abort_save, find_base_segments
from warmline_proxy.index.tree import new_id, replace_segment
from warmline_proxy.store.rows import IndexSnapshot, SavePlan, SegmentRow, Truncation
from warmline_proxy.store.tables import Tables

ROUNDS_MAX = 3  # that what is to be cut changes while files are made
CHANGED_REASON = "it was changed meanwhile, again and again"

log = logging.getLogger(__name__)

TruncationPoints = Mapping[str, int]  # by segment, the position from which on nobody needs its rows; it lies within


@dataclass(frozen=True)
class _ShortenedCopy:
    """The file that is to take a segment's place, or why there is none."""

    row: SegmentRow  # the segment as it stood
    until: int
    plan: SavePlan | None = None
    file: SavedFile | None = None
    why_not: str = ""

    def is_copy_of(self, row: SegmentRow | None) -> bool:
        """Its parent may be another one by now: that is cut as well."""
        mine = self.row
        return row is not None and (row.checksum, row.start, row.end) == (mine.checksum, mine.start, mine.end)


class Truncator:
    """`with` it: `prepare` files, then `put` them in place in a transaction if it `is_ready`, else `prepare` again.

    What is not put in place is deleted at the end.  On any thread, on one at a time.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._copies: dict[str, _ShortenedCopy] = {}
        self._plans: list[SavePlan] = []
        self._rounds = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with suppress(IndexStoreError):  # the next start does it
            if self._plans and any(self._index.transact(self._abort_saves, frees_space=True)):
                self._index.sweep()

    def _abort_saves(self, tables: Tables) -> list[list[str]]:
        """Nothing is done about those that were put in place."""
        return [abort_save(tables, plan) for plan in self._plans]

    def prepare(self, cuts: TruncationPoints) -> None:
        """Write the files that are not there yet.  Blocks for as long as that takes."""
        self._rounds += 1
        for segment, until in cuts.items():
            known = self._copies.get(segment)
            if known is None or known.until != until:
                self._write_copy(segment, until)

    def is_ready(self, tables: Tables, cuts: TruncationPoints) -> bool:
        """Whether `put` can do all of it; or whether it won't get any better."""
        return self._rounds >= ROUNDS_MAX or all(self._find_copy(tables, *cut) for cut in cuts.items())

    def apply(self, tables: Tables, cuts: TruncationPoints, owner: str = "") -> list[Truncation]:
        """Nothing that is stored stands on what is cut away, by now.

        What can't be cut stays `owner`'s: `trim` does it later, when no conversation has this id any more.
        """
        return [self._apply_truncation(tables, segment, until, owner) for segment, until in cuts.items()]

    def find_base_segments(self, tables: Tables) -> set[str]:
        """The segments that saves under way, and other cuts, count on."""
        mine = {plan.id for plan in self._plans}
        return find_base_segments(plan for plan in tables.save_plans() if plan.id not in mine)

    def _write_copy(self, segment: str, until: int) -> None:
        row = self._index.segment(segment)
        if row is None:
            return  # it went meanwhile
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
        log.warning("what nobody needs of segment %s stays: %s", row.id, why_not)
        self._copies[row.id] = _ShortenedCopy(row, until, why_not=why_not)

    def _find_copy(self, tables: Tables, segment: str, until: int) -> _ShortenedCopy | None:
        """What was prepared, where it still fits."""
        copy = self._copies.get(segment)
        if copy is None or copy.until != until or not copy.is_copy_of(tables.segment(segment)):
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
    """It reserves nothing in the budget: for it nothing is to be evicted, and it takes room for a moment only."""
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
    """Raises SegmentFileError, OSError."""
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
    """What is left of a segment, under an id of its own.  Raises SegmentFileError."""
    header = read_header_from(source)
    _check_source(source, header, row)
    meta = msgspec.structs.replace(header.meta, id=file_id, end=until, parent=row.parent)
    return SegmentCopy(source, header, meta)


def _check_source(source: BufferedReader, header: SegmentHeader, row: SegmentRow) -> None:
    """It is the file that was saved: checksums stand for its place, tokens and rows."""
    if header.meta.id != row.id or file_checksum(read_checksums_from(source, header)) != row.checksum:
        raise SegmentFileError("foreign", f"it is not what was saved as {row.id}")


def _estimate_bytes(row: SegmentRow, until: int) -> int:
    """About what the rows from `until` on weigh."""
    return row.bytes_on_disk * (row.end - until) // (row.end - row.start)


def preview_truncation(home: Home, row: SegmentRow, until: int) -> Truncation:
    """What a cut would free, by the file's header; about, where that can't be read."""
    freed = _estimate_bytes(row, until)
    with suppress(SegmentFileError, OSError), _open_segment(home, row) as source:
        freed = row.bytes_on_disk - _shorten_segment(source, row, row.id, until).bytes_count
    return Truncation(segment=row.id, until=until, end=row.end, bytes_count=freed)


# ---- what no purge names any more


def find_needed_segments(snapshot: IndexSnapshot, sessions: Iterable[str]) -> dict[str, int]:
    """The segments that these conversations stand on, each with the position up to which they need it."""
    needed: dict[str, int] = {}
    for session in sessions:
        row = snapshot.sessions[session]
        until = row.tokens
        for link in reversed(snapshot.segment_path(row.leaf)):
            needed[link.id] = max(needed.get(link.id, 0), until)
            until = link.start
    return needed


def find_orphaned_tails(tables: Tables) -> dict[str, int]:
    """What no child and no conversation needs, and who wrote it is gone: tails that a purge had to leave.

    Branches that a conversation has left stay: it may come back to them.
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
    """Cut away what is `loose` and nothing is being saved on; `only`: of these.  Blocks; raises IndexFailure."""

    def find_truncations(tables: Tables) -> dict[str, int]:
        kept = cutter.find_base_segments(tables)
        return {
            segment: until
            for segment, until in find_orphaned_tails(tables).items()
            if segment not in kept and (segment_ids is None or segment in segment_ids)
        }

    def change(tables: Tables) -> list[Truncation] | None:
        cuts = find_truncations(tables)
        return cutter.apply(tables, cuts) if cutter.is_ready(tables, cuts) else None

    with Truncator(index) as cutter:
        while found := index.transact(find_truncations, frees_space=True):
            cutter.prepare(found)
            if (cuts := index.transact(change, frees_space=True)) is not None:
                return cuts
    return []
