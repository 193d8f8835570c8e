"""Repair: rebuilds the index from the files and the rows that can still be read.

Files are the truth for tokens, places and sizes; rows only add names, times and usage, which no file has.  Needs
`home.lock`.  After any damage, `verify --deep` finds nothing, and every match is a true prefix.
"""

import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import msgspec

from warmline_common.storage import disk
from warmline_common.storage.home import Home
from warmline_proxy.index.index import Index
from warmline_proxy.index.recovery.file_headers import InvalidFile, ValidFile, inspect_file
from warmline_proxy.index.recovery.rebuild import RebuiltSegment, RebuiltTree
from warmline_proxy.index.recovery.rebuild_draft import DraftTables
from warmline_proxy.index.recovery.stored_responses import copy_responses
from warmline_proxy.index.turns import call_keys, insert_turn
from warmline_proxy.store import files as stored_files
from warmline_proxy.store import rows
from warmline_proxy.store.errors import IndexDamagedError
from warmline_proxy.store.row_checks import read_valid_entries
from warmline_proxy.store.tables import DECODERS, Tables

PREFILL_S_PER_TOKEN = 1e-3  # where no row has a cost of prefill


def repair(index: Index, *, deep: bool, is_saving: bool) -> rows.RepairReply:
    """Repair all that can be repaired.  Blocks; raises IndexStoreError, OSError.

    `deep`: files are read whole, as `verify --deep` does; else their headers and tokens, and restores find the rest.
    `is_saving`: a proxy runs, so that the files of its saves must be left alone.
    """
    home = index.home
    findings = _list_paths(home, "mode", stored_files.make_private(home))
    disk_files = _DiskFiles.from_home(home, deep)

    def rebuild() -> _Repairer:
        return index.transact(lambda tables: _Repairer(tables, home, disk_files, is_saving=is_saving).run())

    try:
        index.require_sound_pages()
        repairer = rebuild()
    except IndexDamagedError as error:
        index.replace_with_empty(error)
        repairer = rebuild()
    stored_files.move_to_quarantine(home, repairer.quarantined_ids)
    for path in repairer.orphans:
        disk.delete(path)
    index.update_quarantine_sizes()
    index.sweep()
    return rows.RepairReply(did=findings + repairer.findings + _list_paths(home, "deleted", index.delete_superseded()))


def _list_paths(home: Home, what: str, paths: Iterable[Path]) -> list[rows.IndexFinding]:
    return [rows.IndexFinding(what=what, id="", detail=str(path.relative_to(home.root))) for path in paths]


@dataclass(frozen=True)
class _DiskFiles:
    """Files on the disk before the transaction."""

    files: dict[str, ValidFile | InvalidFile]
    unidentified: list[Path]  # among them, but of other names
    quarantined: list[tuple[str, Path]]

    @classmethod
    def from_home(cls, home: Home, deep: bool) -> "_DiskFiles":
        stored = list(stored_files.list_stored(home))
        return cls(
            {file_id: inspect_file(home, file_id, deep=deep) for file_id, _ in stored if file_id},
            [path for file_id, path in stored if not file_id],
            list(stored_files.list_quarantined(home)),
        )


@dataclass(frozen=True)
class _ReadableRows:
    """The rows that can still be read."""

    segments: dict[str, rows.SegmentRow]
    checkpoints: dict[str, rows.CheckpointRow]
    sessions: dict[str, rows.SessionRow]
    quarantined: dict[str, rows.QuarantineRow]
    saves: list[rows.SavePlan]
    pending_deletions: dict[str, int]
    known_ids: set[str]  # with a row, readable or not

    @classmethod
    def from_tables(cls, tables: Tables) -> "_ReadableRows":
        pending_deletions = read_valid_entries(tables, "doomed").items()
        return cls(
            segments=_read_rows(tables, "segments"),
            checkpoints=_read_rows(tables, "checkpoints"),
            sessions=_read_rows(tables, "sessions"),
            quarantined=_read_rows(tables, "quarantine"),
            saves=list(_read_rows(tables, "saves").values()),
            pending_deletions={key.hex(): int.from_bytes(size, "big") for key, size in pending_deletions},
            known_ids={key.hex() for table in ("segments", "checkpoints") for key, _ in tables.items(table)},
        )

    @property
    def prefill_s_per_token(self) -> float:
        tokens = sum(row.end - row.start for row in self.segments.values())
        return sum(row.prefill_s for row in self.segments.values()) / tokens if tokens else PREFILL_S_PER_TOKEN


def _read_rows(tables: Tables, table: str) -> dict[str, Any]:
    found = (DECODERS[table](value) for value in read_valid_entries(tables, table).values())
    return {row.id: row for row in found}


class _Repairer:
    """Work of one transaction."""

    def __init__(self, tables: Tables, home: Home, disk_files: _DiskFiles, *, is_saving: bool) -> None:
        self._tables, self._home, self._disk_files = tables, home, disk_files
        self._old_rows = _ReadableRows.from_tables(tables)
        self._plans = self._old_rows.saves if is_saving else []
        # An index that was lost under a running proxy does not know its saves.
        self._keeps_drafts = bool(self._plans) or (is_saving and tables.is_incomplete())
        self._draft, self._tree = DraftTables(), RebuiltTree()
        self.findings: list[rows.IndexFinding] = []
        self.quarantined_ids: list[str] = []  # files to move into quarantine
        self.orphans: list[Path] = []  # files to delete
        self._quarantine_reasons: dict[str, str] = {}  # by id, of files that this repair quarantines
        self._quarantined = self._find_quarantined()
        writing = {file_id for plan in self._plans for file_id in plan.file_ids}
        self._excluded_ids = self._quarantined.keys() | writing | self._old_rows.pending_deletions.keys()
        self._files = self._find_present_files()

    def run(self) -> Self:
        has_true_digest = self._tables.has_true_digest()
        self._copy_bookkeeping()
        for file in self._files.values():
            if isinstance(file, InvalidFile):
                self._reject_file(file, file.reason, file.detail)
        valid = [file for file in self._files.values() if isinstance(file, ValidFile)]
        self._rebuild_segments([file for file in valid if file.meta.kind == "segment"])
        self._rebuild_checkpoints([file for file in valid if file.meta.kind == "checkpoint"])
        for lost in sorted(self._old_rows.known_ids - self._files.keys() - self._excluded_ids):
            self._add_finding("dropped", lost, "its file is gone")
        self._rebuild_sessions()
        self._copy_usage()
        for table, count in self._draft.apply_to(self._tables).items():
            self._add_finding("entries", "", f"{count} of {table} were put right")
        self._tables.mark_complete()
        if not has_true_digest:
            self._tables.reset_digest()
        if has_true_digest is False and not self.findings:
            self._add_finding("entries", "", "one that no file tells was changed; it stays as it is")
        return self

    def _add_finding(self, what: str, file_id: str, detail: str) -> None:
        self.findings.append(rows.IndexFinding(what=what, id=file_id, detail=detail))

    # ---- files to place, and other files

    def _find_quarantined(self) -> dict[str, rows.QuarantineRow]:
        """The rows of quarantine whose files are there, or on their way."""

        def is_present(file_id: str) -> bool:
            is_on_its_way = file_id not in self._old_rows.known_ids and self._home.segment_file(file_id).exists()
            return is_on_its_way or stored_files.quarantine_path(self._home, file_id).exists()

        return {file_id: row for file_id, row in self._old_rows.quarantined.items() if is_present(file_id)}

    def _find_present_files(self) -> dict[str, ValidFile | InvalidFile]:
        """The files to build the tree of: none that is being written, quarantined or deleted.

        Files saved after the listing are added.
        """
        new_ids = (self._old_rows.known_ids - self._disk_files.files.keys()) - self._excluded_ids
        files = self._disk_files.files | {file_id: inspect_file(self._home, file_id, deep=False) for file_id in new_ids}
        return {
            file_id: file
            for file_id, file in files.items()
            if file_id not in self._excluded_ids and self._home.segment_file(file_id).exists()
        }

    def _copy_bookkeeping(self) -> None:
        """Copy rows that need no tree, and list orphans."""
        draft = self._draft
        for plan in self._plans:
            draft.insert_save_plan(plan)
        for row in self._quarantined.values():
            size = stored_files.read_quarantined_size(self._home, row.id) or 0
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
        copy_responses(self._tables, draft)
        # A purged file that is leased still lies in quarantine: the sweep after its release deletes it.
        orphans = [path for file_id, path in self._disk_files.quarantined if file_id not in self._excluded_ids]
        if not self._keeps_drafts:
            orphans += self._disk_files.unidentified
        self.orphans += [path for path in orphans if path.exists()]
        self.findings += _list_paths(self._home, "deleted", self.orphans)

    def _reject_file(self, file: ValidFile | InvalidFile, reason: str, detail: str) -> None:
        """Quarantine a file that was stored, or may be whole, with the reason; delete one without a row."""
        is_unread = reason.rpartition(": ")[2] == "io"
        if file.id not in self._old_rows.known_ids and not is_unread:
            self._delete_file(file, f"{reason}: {detail}")
            return
        segment, checkpoint = self._old_rows.segments.get(file.id), self._old_rows.checkpoints.get(file.id)
        at = checkpoint.position if checkpoint else 0
        self._draft.insert_quarantined(
            rows.QuarantineRow(
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
        self.quarantined_ids.append(file.id)
        self._add_finding("quarantined", file.id, f"{reason}: {detail}")

    def _reject_child(self, file: ValidFile, parent: str, why: str) -> None:
        self._reject_file(file, f"builds on {parent}: {self._quarantine_reasons[parent].rpartition(': ')[2]}", why)

    def _delete_file(self, file: ValidFile | InvalidFile, why: str) -> None:
        self._draft.mark_deleted(file.id, file.bytes_on_disk)
        self._add_finding("deleted", file.id, why)

    # ---- the tree

    def _rebuild_segments(self, files: Iterable[ValidFile]) -> None:
        old_rows = self._old_rows.segments
        for file in self._sort_files(files):
            parent = old_rows[file.id].parent if file.id in old_rows else file.meta.parent
            if not (why := self._tree.add_segment(file)):
                self._insert_segment(file)
            elif parent in self._quarantine_reasons:
                self._reject_child(file, parent, why)
            elif parent and parent not in self._tree.segments:
                self._delete_file(file, why)
            else:
                self._reject_file(file, "foreign", why)

    def _sort_files(self, files: Iterable[ValidFile]) -> Iterator[ValidFile]:
        """By precedence; of files with one start, those with their named parent come first."""
        ordered = sorted(files, key=lambda file: _precedence(file, self._old_rows.segments.get(file.id)))
        for _, group in groupby(ordered, key=lambda file: file.meta.start):
            yield from sorted(group, key=lambda file: not self._tree.has_named_parent(file))

    def _insert_segment(self, file: ValidFile) -> None:
        rebuilt, old, meta = self._tree.segments[file.id], self._old_rows.segments.get(file.id), file.meta
        row = rows.SegmentRow(
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

    def _rebuild_checkpoints(self, files: list[ValidFile]) -> None:
        """Place each checkpoint where the tokens before it are those that it was computed after."""
        places = self._tree.find_places((file.root, file.meta.position) for file in files)
        for file in sorted(files, key=lambda file: _precedence(file, self._old_rows.checkpoints.get(file.id))):
            old, at = self._old_rows.checkpoints.get(file.id), file.meta.position
            segment = places.get((file.root, at, file.meta.prefix), "")
            if segment and not self._draft.checkpoint_at(segment, at):
                self._insert_checkpoint(file, segment)
            elif old and old.segment in self._quarantine_reasons:
                self._reject_child(file, old.segment, "")
            elif old and old.segment in self._tree.segments and not segment:
                self._reject_file(file, "foreign", "was computed after other tokens than are stored before it")
            else:
                self._delete_file(file, "another one is stored there" if segment else "its rows are not stored")

    def _insert_checkpoint(self, file: ValidFile, segment: str) -> None:
        old = self._old_rows.checkpoints.get(file.id)
        row = rows.CheckpointRow(
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

    def _rebuild_session(self, old: rows.SessionRow) -> rows.SessionRow | None:
        """Session that ends where its stored tokens do; None where nothing of it is stored."""
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
        """The deepest stored segment of a session's path, and how many of its tokens are stored."""
        below = 1 << 32
        while segment_id not in self._tree.segments:
            row = self._old_rows.segments.get(segment_id)
            if row is None or row.start >= below:
                return None, 0
            segment_id, below, tokens = row.parent, row.start, min(tokens, row.start)
        leaf = self._tree.segments[segment_id]
        return leaf, tokens if leaf.start < tokens <= leaf.end else leaf.end

    def _insert_session(self, leaf: RebuiltSegment) -> None:
        """Create a conversation of an adopted leaf, so that a client can go on with it and people see it."""
        row = self._draft.segment(leaf.id)
        assert row is not None
        session = rows.SessionRow(
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
            has_parent = key[:1] == b"r" or key[1:17].hex() in self._tree.segments
            if has_parent and self._draft.get("children", key) is None:
                self._draft.put("gone", key, value)


def _precedence(file: ValidFile, row: rows.SegmentRow | rows.CheckpointRow | None) -> tuple[int, bool, int, str]:
    """Parents before children; of two for one place, first the one with its row's checksum, then the longer one."""
    return file.meta.start, row is None or row.checksum != file.checksum, -file.meta.end, file.id
