"""Mending: the index made anew from what the files prove and what can still be read of its rows.

Files are the truth for tokens, places and sizes; rows only add what no file knows (names, times, who uses it).  Needs
`home.lock`.  Whatever the damage was, `verify --deep` finds nothing afterwards, and every match is a true prefix.
"""

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.file_headers import FileInspection, inspect_file
from warmline_proxy.index.recovery.rebuild import RebuiltSegment, RebuiltTree
from warmline_proxy.index.recovery.rebuild_draft import DraftTables
from warmline_proxy.index.turns import call_keys, insert_turn
from warmline_proxy.store import files as index_files
from warmline_proxy.store.row_checks import read_valid_entries
from warmline_proxy.store.rows import (
    CheckpointRow,
    IndexFinding,
    QuarantineRow,
    RepairReply,
    SavePlan,
    SegmentRow,
    SessionRow,
)
from warmline_proxy.store.tables import DECODERS, Tables

PREFILL_S_PER_TOKEN = 1e-3  # where no row is left to tell what prefill costs


def repair(index: Index, *, deep: bool, is_saving: bool) -> RepairReply:
    """Mend what can be mended.  Blocks; raises IndexFailure, OSError.

    `deep`: files are read whole, as `verify --deep` does; else their headers and tokens, and restores find the rest.
    `saving`: a proxy runs, so that what its saves are writing must be left alone.
    """
    home = index.home
    closed = index_files.make_private(home)
    modes = [IndexFinding(what="mode", id="", detail=str(path.relative_to(home.root))) for path in closed]
    found = _DiskFiles.from_home(home, deep)
    mended = index.transact(lambda tables: _Repairer(tables, home, found, is_saving=is_saving).run())
    index_files.move_to_quarantine(home, mended.quarantined_ids)
    for path in mended.orphans:
        disk.delete(path)
    index.update_quarantine_sizes()
    index.sweep()
    tidied = [
        IndexFinding(what="deleted", id="", detail=str(path.relative_to(home.root)))
        for path in index.delete_superseded()
    ]
    return RepairReply(did=modes + mended.findings + tidied)


@dataclass(frozen=True)
class _DiskFiles:
    """Files on the disk before the transaction."""

    files: dict[str, FileInspection]
    unidentified: list[Path]  # in the place of files, but none
    quarantined: list[tuple[str, Path]]

    @classmethod
    def from_home(cls, home: Home, deep: bool) -> "_DiskFiles":
        stored = list(index_files.list_stored(home))
        return cls(
            {file_id: inspect_file(home, file_id, deep=deep) for file_id, _ in stored if file_id},
            [path for file_id, path in stored if not file_id],
            list(index_files.list_quarantined(home)),
        )


@dataclass(frozen=True)
class _ReadableRows:
    """The rows that can still be read."""

    segments: dict[str, SegmentRow]
    checkpoints: dict[str, CheckpointRow]
    sessions: dict[str, SessionRow]
    quarantined: dict[str, QuarantineRow]
    saves: list[SavePlan]
    pending_deletions: dict[str, int]
    known_ids: set[str]  # ids that have a row of whatever quality

    @classmethod
    def from_tables(cls, tables: Tables) -> "_ReadableRows":
        rows = {
            table: _read_rows(tables, table) for table in ("segments", "checkpoints", "sessions", "quarantine", "saves")
        }
        return cls(
            segments=rows["segments"],
            checkpoints=rows["checkpoints"],
            sessions=rows["sessions"],
            quarantined=rows["quarantine"],
            saves=list(rows["saves"].values()),
            pending_deletions={
                key.hex(): int.from_bytes(size, "big") for key, size in read_valid_entries(tables, "doomed").items()
            },
            known_ids={key.hex() for table in ("segments", "checkpoints") for key, _ in tables.items(table)},
        )

    @property
    def prefill_s_per_token(self) -> float:
        tokens = sum(row.end - row.start for row in self.segments.values())
        return sum(row.prefill_s for row in self.segments.values()) / tokens if tokens else PREFILL_S_PER_TOKEN


def _read_rows(tables: Tables, table: str) -> dict[str, Any]:
    rows = [DECODERS[table](value) for value in read_valid_entries(tables, table).values()]
    return {row.id: row for row in rows}


@dataclass
class _RepairResult:
    findings: list[IndexFinding] = field(default_factory=list)
    quarantined_ids: list[str] = field(default_factory=list)  # to be moved into quarantine
    orphans: list[Path] = field(default_factory=list)  # to be deleted


class _Repairer:
    """One transaction's work."""

    def __init__(self, tables: Tables, home: Home, disk_files: _DiskFiles, *, is_saving: bool) -> None:
        self._tables, self._home, self._disk_files = tables, home, disk_files
        self._old_rows = _ReadableRows.from_tables(tables)
        self._plans = self._old_rows.saves if is_saving else []
        self._draft, self._tree, self._result = DraftTables(), RebuiltTree(), _RepairResult()
        self._quarantine_reasons: dict[str, str] = {}  # what was set aside, and why
        self._quarantined = self._find_quarantined()
        writing = {file_id for plan in self._plans for file_id in plan.file_ids}
        self._excluded_ids = self._quarantined.keys() | writing | self._old_rows.pending_deletions.keys()
        self._files = self._find_present_files()

    def run(self) -> _RepairResult:
        self._copy_bookkeeping()
        for file in [file for file in self._files.values() if file.reason]:
            self._reject_file(file, file.reason, file.detail)
        self._rebuild_segments([file for file in self._files.values() if file.meta and file.meta.kind == "segment"])
        self._rebuild_checkpoints(
            [file for file in self._files.values() if file.meta and file.meta.kind == "checkpoint"]
        )
        for lost in sorted(self._old_rows.known_ids - self._files.keys() - self._excluded_ids):
            self._add_finding("dropped", lost, "its file is gone")
        self._rebuild_sessions()
        self._copy_usage()
        for table, count in self._draft.apply_to(self._tables).items():
            self._add_finding("entries", "", f"{count} of {table} were put right")
        self._tables.mark_complete()
        return self._result

    def _add_finding(self, what: str, file_id: str, detail: str) -> None:
        self._result.findings.append(IndexFinding(what=what, id=file_id, detail=detail))

    # ---- what is to be placed, and what is not

    def _find_quarantined(self) -> dict[str, QuarantineRow]:
        """The rows of quarantine whose files are there, or on their way."""

        def is_present(file_id: str) -> bool:
            on_its_way = file_id not in self._old_rows.known_ids and self._home.segment_file(file_id).exists()
            return on_its_way or index_files.quarantine_path(self._home, file_id).exists()

        return {file_id: row for file_id, row in self._old_rows.quarantined.items() if is_present(file_id)}

    def _find_present_files(self) -> dict[str, FileInspection]:
        """The files that the tree is made of: none that is being written, set aside or deleted, nor has gone since."""
        since = (self._old_rows.known_ids - self._disk_files.files.keys()) - self._excluded_ids
        files = self._disk_files.files | {file_id: inspect_file(self._home, file_id, deep=False) for file_id in since}
        return {
            file_id: file
            for file_id, file in files.items()
            if file_id not in self._excluded_ids and self._home.segment_file(file_id).exists()
        }

    def _copy_bookkeeping(self) -> None:
        """Bookkeeping that stands for itself."""
        draft = self._draft
        for plan in self._plans:
            draft.insert_save_plan(plan)
        for row in self._quarantined.values():
            size = index_files.read_quarantined_size(self._home, row.id) or 0
            draft.insert_quarantined(msgspec.structs.replace(row, bytes_on_disk=size))
        for file_id, size in self._old_rows.pending_deletions.items():
            if file_id not in self._quarantined:
                draft.mark_deleted(file_id, size)
        for key, value in read_valid_entries(self._tables, "requests").items():
            draft.put("requests", key, value)
        for key, value in read_valid_entries(self._tables, "turns").items():
            turn = DECODERS["turns"](value)
            if not any(draft.get("calls", call) for call in call_keys(turn)):
                insert_turn(draft, key, turn)
        # A purged file that is leased still lies in quarantine: the sweep after its release deletes it.
        orphans = [path for file_id, path in self._disk_files.quarantined if file_id not in self._excluded_ids]
        if not self._plans:
            orphans += self._disk_files.unidentified
        self._result.orphans += [path for path in orphans if path.exists()]
        for path in self._result.orphans:
            self._add_finding("deleted", "", str(path.relative_to(self._home.root)))

    def _reject_file(self, file: FileInspection, reason: str, detail: str) -> None:
        """Set aside what once was stored, or may be whole, with the reason; delete what nobody knows."""
        unread = reason.rpartition(": ")[2] == "io"
        if file.id not in self._old_rows.known_ids and not unread:
            self._delete_file(file, f"{reason}: {detail}")
            return
        segment, checkpoint = self._old_rows.segments.get(file.id), self._old_rows.checkpoints.get(file.id)
        at = checkpoint.position if checkpoint else 0
        self._draft.insert_quarantined(
            QuarantineRow(
                id=file.id,
                kind="checkpoint" if checkpoint else "segment",
                model=segment.model if segment else "",
                start=segment.start if segment else at,
                end=segment.end if segment else at,
                bytes_on_disk=file.bytes_on_disk,
                reason=reason,
                at=time.time(),
            )
        )
        self._quarantine_reasons[file.id] = reason
        self._result.quarantined_ids.append(file.id)
        self._add_finding("quarantined", file.id, f"{reason}: {detail}")

    def _delete_file(self, file: FileInspection, why: str) -> None:
        self._draft.mark_deleted(file.id, file.bytes_on_disk)
        self._add_finding("deleted", file.id, why)

    # ---- the tree

    def _rebuild_segments(self, files: Iterable[FileInspection]) -> None:
        known = self._old_rows.segments
        for file in self._sort_files(files):
            assert file.meta is not None
            parent = known[file.id].parent if file.id in known else file.meta.parent
            if not (why := self._tree.add_segment(file)):
                self._insert_segment(file)
            elif parent in self._quarantine_reasons:
                self._reject_file(
                    file, f"builds on {parent}: {self._quarantine_reasons[parent].rpartition(': ')[2]}", why
                )
            elif parent and parent not in self._tree.segments:
                self._delete_file(file, why)
            else:
                self._reject_file(file, "foreign", why)

    def _sort_files(self, files: Iterable[FileInspection]) -> Iterator[FileInspection]:
        """Of those that start at one place, first who names its parent: who has lost it takes what is left."""
        ordered = sorted(files, key=lambda file: _precedence(file, self._old_rows.segments))
        for _, alike in groupby(ordered, key=lambda file: file.meta and file.meta.start):
            yield from sorted(alike, key=lambda file: not self._tree.has_named_parent(file))

    def _insert_segment(self, file: FileInspection) -> None:
        assert file.meta is not None
        rebuilt, old, meta = self._tree.segments[file.id], self._old_rows.segments.get(file.id), file.meta
        row = SegmentRow(
            id=file.id,
            parent=rebuilt.parent,
            root=file.root,
            model=old.model if old else meta.model,
            start=meta.start,
            end=meta.end,
            bytes_on_disk=file.bytes_on_disk,
            checksum=file.checksum,
            created=old.created if old else file.written_at,
            session=old.session if old else "",
            prefill_s=old.prefill_s if old else self._old_rows.prefill_s_per_token * (meta.end - meta.start),
            pinned=old.pinned if old else False,
        )
        self._draft.insert_segment(row, file.tokens, rebuilt.hashes)
        if old is None:
            self._add_finding("adopted", file.id, f"tokens [{meta.start}, {meta.end})")

    def _rebuild_checkpoints(self, files: list[FileInspection]) -> None:
        """Each where the tokens before it are those that it was computed after."""
        places = self._tree.find_places((file.root, file.meta.position) for file in files if file.meta)
        for file in sorted(files, key=lambda file: _precedence(file, self._old_rows.checkpoints)):
            assert file.meta is not None
            old, at = self._old_rows.checkpoints.get(file.id), file.meta.position
            segment = places.get((file.root, at, file.meta.prefix), "")
            if segment and not self._draft.checkpoint_at(segment, at):
                self._insert_checkpoint(file, segment)
            elif old and old.segment in self._quarantine_reasons:
                self._reject_file(
                    file, f"builds on {old.segment}: {self._quarantine_reasons[old.segment].rpartition(': ')[2]}", ""
                )
            elif old and old.segment in self._tree.segments and not segment:
                self._reject_file(file, "foreign", "was computed after other tokens than are stored before it")
            else:
                self._delete_file(file, "another one is stored there" if segment else "its rows are not stored")

    def _insert_checkpoint(self, file: FileInspection, segment: str) -> None:
        assert file.meta is not None
        old = self._old_rows.checkpoints.get(file.id)
        row = CheckpointRow(
            id=file.id,
            segment=segment,
            position=file.meta.position,
            bytes_on_disk=file.bytes_on_disk,
            checksum=file.checksum,
            created=old.created if old else file.written_at,
        )
        self._draft.insert_checkpoint(row)
        if old is None:
            self._add_finding("adopted", file.id, f"state at {row.position}")

    # ---- conversations and bookkeeping

    def _rebuild_sessions(self) -> None:
        ends = set()
        for row in self._old_rows.sessions.values():
            if (mended := self._rebuild_session(row)) is None:
                self._add_finding("session", row.id, "nothing of it is stored any more")
                continue
            if mended.tokens < row.tokens:
                self._add_finding("session", row.id, f"cut back from {row.tokens} to {mended.tokens} tokens")
            self._draft.put_session(mended)
            ends.add(mended.leaf)
        for leaf in self._tree.leaves():
            if leaf.id not in ends and leaf.id not in self._old_rows.segments:
                self._insert_session(leaf)

    def _rebuild_session(self, old: SessionRow) -> SessionRow | None:
        """It ends where what is stored of it does; None where that is nothing."""
        leaf, tokens = self._find_stored_end(old.leaf, old.tokens)
        if leaf is None or leaf.root != old.root:
            return None
        turn_end = old.turn_end or tokens
        turn = self._tree.find_on_path(leaf.id, turn_end) if turn_end <= tokens else None
        return msgspec.structs.replace(
            old,
            leaf=leaf.id,
            tokens=tokens,
            turn_end=turn_end,
            turn_segment=turn.id if turn else "",
            turn_digest=turn.prefix_at(turn_end).tokens_digest if turn else old.turn_digest,
        )

    def _find_stored_end(self, segment_id: str, tokens: int) -> tuple[RebuiltSegment | None, int]:
        """The deepest segment of a session's path that is stored, and how many of its tokens that leaves."""
        below = 1 << 32
        while segment_id not in self._tree.segments:
            row = self._old_rows.segments.get(segment_id)
            if row is None or row.start >= below:
                return None, 0
            segment_id, below, tokens = row.parent, row.start, min(tokens, row.start)
        leaf = self._tree.segments[segment_id]
        return leaf, tokens if leaf.start < tokens <= leaf.end else leaf.end

    def _insert_session(self, leaf: RebuiltSegment) -> None:
        """A conversation for what was adopted: who ever goes on with it finds it, and people see it."""
        row = self._draft.segment(leaf.id)
        assert row is not None
        session = SessionRow(
            id=secrets.token_hex(6),
            root=leaf.root,
            model=row.model,
            leaf=leaf.id,
            tokens=leaf.end,
            turn_end=leaf.end,
            turn_digest=leaf.prefix_at(leaf.end).tokens_digest,
            turn_segment=leaf.id,
            created=row.created,
            last_used=row.created,
        )
        self._draft.put_session(session)
        self._draft.update_segment(msgspec.structs.replace(row, session=session.id))
        self._add_finding("session", session.id, f"begun, of {leaf.end} tokens")

    def _copy_usage(self) -> None:
        for key, value in read_valid_entries(self._tables, "usage").items():
            if self._draft.has_file(key.hex()):
                self._draft.put("usage", key, value)
        for key, value in read_valid_entries(self._tables, "gone").items():
            hangs = key[:1] == b"r" or key[1:17].hex() in self._tree.segments
            if hangs and self._draft.get("children", key) is None:
                self._draft.put("gone", key, value)


def _precedence(file: FileInspection, known: Mapping[str, SegmentRow | CheckpointRow]) -> tuple[int, bool, int, str]:
    """Parents before children; of two for one place, the one that is what was stored, then the longer one."""
    assert file.meta is not None
    row = known.get(file.id)
    return file.meta.start, row is None or row.checksum != file.checksum, -file.meta.end, file.id
