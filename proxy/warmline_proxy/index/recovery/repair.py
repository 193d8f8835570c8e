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
from warmline_proxy.index.recovery.file_headers import Surveyed, survey
from warmline_proxy.index.recovery.rebuild import Grown, Tree
from warmline_proxy.index.recovery.rebuild_draft import Draft
from warmline_proxy.index.turns import insert_turn, keys_of
from warmline_proxy.store import files as index_files
from warmline_proxy.store.row_checks import readable
from warmline_proxy.store.rows import (
    CheckpointRow,
    Finding,
    QuarantineRow,
    RepairReply,
    SavePlan,
    SegmentRow,
    SessionRow,
)
from warmline_proxy.store.tables import DECODERS, Tables

PREFILL_S_A_TOKEN = 1e-3  # where no row is left to tell what prefill costs


def repair(index: Index, *, deep: bool, saving: bool) -> RepairReply:
    """Mend what can be mended.  Blocks; raises IndexFailure, OSError.

    `deep`: files are read whole, as `verify --deep` does; else their headers and tokens, and restores find the rest.
    `saving`: a proxy runs, so that what its saves are writing must be left alone.
    """
    home = index.home
    closed = index_files.make_private(home)
    modes = [Finding(what="mode", id="", detail=str(path.relative_to(home.root))) for path in closed]
    found = _Found.of(home, deep)
    mended = index.change(lambda tables: _Mending(tables, home, found, saving=saving).mend())
    index_files.set_aside(home, mended.aside)
    for path in mended.strays:
        disk.delete(path)
    index.weigh_quarantined()
    index.sweep()
    tidied = [Finding(what="deleted", id="", detail=str(path.relative_to(home.root))) for path in index.tidy()]
    return RepairReply(did=modes + mended.did + tidied)


@dataclass(frozen=True)
class _Found:
    """What lay on the disk before the transaction."""

    files: dict[str, Surveyed]
    unnamed: list[Path]  # in the place of files, but none
    aside: list[tuple[str, Path]]

    @classmethod
    def of(cls, home: Home, deep: bool) -> "_Found":
        stored = list(index_files.stored(home))
        return cls(
            {file_id: survey(home, file_id, deep=deep) for file_id, _ in stored if file_id},
            [path for file_id, path in stored if not file_id],
            list(index_files.aside(home)),
        )


@dataclass(frozen=True)
class _Salvage:
    """The rows that can still be read."""

    segments: dict[str, SegmentRow]
    checkpoints: dict[str, CheckpointRow]
    sessions: dict[str, SessionRow]
    quarantined: dict[str, QuarantineRow]
    saves: list[SavePlan]
    doomed: dict[str, int]
    known: set[str]  # ids that have a row of whatever quality

    @classmethod
    def of(cls, tables: Tables) -> "_Salvage":
        rows = {table: _rows(tables, table) for table in ("segments", "checkpoints", "sessions", "quarantine", "saves")}
        return cls(
            segments=rows["segments"],
            checkpoints=rows["checkpoints"],
            sessions=rows["sessions"],
            quarantined=rows["quarantine"],
            saves=list(rows["saves"].values()),
            doomed={key.hex(): int.from_bytes(size, "big") for key, size in readable(tables, "doomed").items()},
            known={key.hex() for table in ("segments", "checkpoints") for key, _ in tables.items(table)},
        )

    @property
    def prefill_s_a_token(self) -> float:
        tokens = sum(row.end - row.start for row in self.segments.values())
        return sum(row.prefill_s for row in self.segments.values()) / tokens if tokens else PREFILL_S_A_TOKEN


def _rows(tables: Tables, table: str) -> dict[str, Any]:
    rows = [DECODERS[table](value) for value in readable(tables, table).values()]
    return {row.id: row for row in rows}


@dataclass
class _Mended:
    did: list[Finding] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)  # to be moved into quarantine
    strays: list[Path] = field(default_factory=list)  # to be deleted


class _Mending:
    """One transaction's work."""

    def __init__(self, tables: Tables, home: Home, found: _Found, *, saving: bool) -> None:
        self._tables, self._home, self._found = tables, home, found
        self._old = _Salvage.of(tables)
        self._plans = self._old.saves if saving else []
        self._draft, self._tree, self._done = Draft(), Tree(), _Mended()
        self._bad: dict[str, str] = {}  # what was set aside, and why
        self._quarantined = self._still_aside()
        writing = {file_id for plan in self._plans for file_id in plan.file_ids}
        self._set_apart = self._quarantined.keys() | writing | self._old.doomed.keys()
        self._files = self._present()

    def mend(self) -> _Mended:
        self._carry_over()
        for file in [file for file in self._files.values() if file.reason]:
            self._refuse(file, file.reason, file.detail)
        self._segments([file for file in self._files.values() if file.meta and file.meta.kind == "segment"])
        self._checkpoints([file for file in self._files.values() if file.meta and file.meta.kind == "checkpoint"])
        for lost in sorted(self._old.known - self._files.keys() - self._set_apart):
            self._say("dropped", lost, "its file is gone")
        self._sessions()
        self._usage()
        for table, count in self._draft.take_over(self._tables).items():
            self._say("entries", "", f"{count} of {table} were put right")
        self._tables.is_made_anew()
        return self._done

    def _say(self, what: str, file_id: str, detail: str) -> None:
        self._done.did.append(Finding(what=what, id=file_id, detail=detail))

    # ---- what is to be placed, and what is not

    def _still_aside(self) -> dict[str, QuarantineRow]:
        """The rows of quarantine whose files are there, or on their way."""

        def is_there(file_id: str) -> bool:
            on_its_way = file_id not in self._old.known and self._home.segment_file(file_id).exists()
            return on_its_way or index_files.quarantine_file(self._home, file_id).exists()

        return {file_id: row for file_id, row in self._old.quarantined.items() if is_there(file_id)}

    def _present(self) -> dict[str, Surveyed]:
        """The files that the tree is made of: none that is being written, set aside or deleted, nor has gone since."""
        since = (self._old.known - self._found.files.keys()) - self._set_apart
        files = self._found.files | {file_id: survey(self._home, file_id, deep=False) for file_id in since}
        return {
            file_id: file
            for file_id, file in files.items()
            if file_id not in self._set_apart and self._home.segment_file(file_id).exists()
        }

    def _carry_over(self) -> None:
        """Bookkeeping that stands for itself."""
        draft = self._draft
        for plan in self._plans:
            draft.insert_save(plan)
        for row in self._quarantined.values():
            size = index_files.size_aside(self._home, row.id) or 0
            draft.insert_quarantined(msgspec.structs.replace(row, bytes_on_disk=size))
        for file_id, size in self._old.doomed.items():
            if file_id not in self._quarantined:
                draft.doom(file_id, size)
        for key, value in readable(self._tables, "requests").items():
            draft.put("requests", key, value)
        for key, value in readable(self._tables, "turns").items():
            turn = DECODERS["turns"](value)
            if not any(draft.get("calls", call) for call in keys_of(turn)):
                insert_turn(draft, key, turn)
        self._done.strays += [path for file_id, path in self._found.aside if file_id not in self._quarantined]
        if not self._plans:
            self._done.strays += self._found.unnamed
        for path in self._done.strays:
            self._say("deleted", "", str(path.relative_to(self._home.root)))

    def _refuse(self, file: Surveyed, reason: str, detail: str) -> None:
        """Set aside what once was stored, or may be whole, with the reason; delete what nobody knows."""
        unread = reason.rpartition(": ")[2] == "io"
        if file.id not in self._old.known and not unread:
            self._delete(file, f"{reason}: {detail}")
            return
        segment, checkpoint = self._old.segments.get(file.id), self._old.checkpoints.get(file.id)
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
        self._bad[file.id] = reason
        self._done.aside.append(file.id)
        self._say("quarantined", file.id, f"{reason}: {detail}")

    def _delete(self, file: Surveyed, why: str) -> None:
        self._draft.doom(file.id, file.bytes_on_disk)
        self._say("deleted", file.id, why)

    # ---- the tree

    def _segments(self, files: Iterable[Surveyed]) -> None:
        known = self._old.segments
        for file in self._in_order(files):
            assert file.meta is not None
            parent = known[file.id].parent if file.id in known else file.meta.parent
            if not (why := self._tree.grow(file)):
                self._insert_segment(file)
            elif parent in self._bad:
                self._refuse(file, f"builds on {parent}: {self._bad[parent].rpartition(': ')[2]}", why)
            elif parent and parent not in self._tree.segments:
                self._delete(file, why)
            else:
                self._refuse(file, "foreign", why)

    def _in_order(self, files: Iterable[Surveyed]) -> Iterator[Surveyed]:
        """Of those that start at one place, first who names its parent: who has lost it takes what is left."""
        ordered = sorted(files, key=lambda file: _precedence(file, self._old.segments))
        for _, alike in groupby(ordered, key=lambda file: file.meta and file.meta.start):
            yield from sorted(alike, key=lambda file: not self._tree.has_named(file))

    def _insert_segment(self, file: Surveyed) -> None:
        assert file.meta is not None
        grown, old, meta = self._tree.segments[file.id], self._old.segments.get(file.id), file.meta
        row = SegmentRow(
            id=file.id,
            parent=grown.parent,
            root=file.root,
            model=old.model if old else meta.model,
            start=meta.start,
            end=meta.end,
            bytes_on_disk=file.bytes_on_disk,
            checksum=file.checksum,
            created=old.created if old else file.written,
            session=old.session if old else "",
            prefill_s=old.prefill_s if old else self._old.prefill_s_a_token * (meta.end - meta.start),
            pinned=old.pinned if old else False,
        )
        self._draft.insert_segment(row, file.tokens, grown.hashes)
        if old is None:
            self._say("adopted", file.id, f"tokens [{meta.start}, {meta.end})")

    def _checkpoints(self, files: list[Surveyed]) -> None:
        """Each where the tokens before it are those that it was computed after."""
        places = self._tree.places((file.root, file.meta.position) for file in files if file.meta)
        for file in sorted(files, key=lambda file: _precedence(file, self._old.checkpoints)):
            assert file.meta is not None
            old, at = self._old.checkpoints.get(file.id), file.meta.position
            segment = places.get((file.root, at, file.meta.prefix), "")
            if segment and not self._draft.checkpoint_at(segment, at):
                self._insert_checkpoint(file, segment)
            elif old and old.segment in self._bad:
                self._refuse(file, f"builds on {old.segment}: {self._bad[old.segment].rpartition(': ')[2]}", "")
            elif old and old.segment in self._tree.segments and not segment:
                self._refuse(file, "foreign", "was computed after other tokens than are stored before it")
            else:
                self._delete(file, "another one is stored there" if segment else "its rows are not stored")

    def _insert_checkpoint(self, file: Surveyed, segment: str) -> None:
        assert file.meta is not None
        old = self._old.checkpoints.get(file.id)
        row = CheckpointRow(
            id=file.id,
            segment=segment,
            position=file.meta.position,
            bytes_on_disk=file.bytes_on_disk,
            checksum=file.checksum,
            created=old.created if old else file.written,
        )
        self._draft.insert_checkpoint(row)
        if old is None:
            self._say("adopted", file.id, f"state at {row.position}")

    # ---- conversations and bookkeeping

    def _sessions(self) -> None:
        ends = set()
        for row in self._old.sessions.values():
            if (mended := self._mended_session(row)) is None:
                self._say("session", row.id, "nothing of it is stored any more")
                continue
            if mended.tokens < row.tokens:
                self._say("session", row.id, f"cut back from {row.tokens} to {mended.tokens} tokens")
            self._draft.put_session(mended)
            ends.add(mended.leaf)
        for leaf in self._tree.leaves():
            if leaf.id not in ends and leaf.id not in self._old.segments:
                self._begin_session(leaf)

    def _mended_session(self, old: SessionRow) -> SessionRow | None:
        """It ends where what is stored of it does; None where that is nothing."""
        leaf, tokens = self._stored_end(old.leaf, old.tokens)
        if leaf is None or leaf.root != old.root:
            return None
        turn_end = old.turn_end or tokens
        turn = self._tree.on_path(leaf.id, turn_end) if turn_end <= tokens else None
        return msgspec.structs.replace(
            old,
            leaf=leaf.id,
            tokens=tokens,
            turn_end=turn_end,
            turn_segment=turn.id if turn else "",
            turn_digest=turn.until(turn_end).tokens_digest if turn else old.turn_digest,
        )

    def _stored_end(self, segment_id: str, tokens: int) -> tuple[Grown | None, int]:
        """The deepest segment of a session's path that is stored, and how many of its tokens that leaves."""
        below = 1 << 32
        while segment_id not in self._tree.segments:
            row = self._old.segments.get(segment_id)
            if row is None or row.start >= below:
                return None, 0
            segment_id, below, tokens = row.parent, row.start, min(tokens, row.start)
        leaf = self._tree.segments[segment_id]
        return leaf, tokens if leaf.start < tokens <= leaf.end else leaf.end

    def _begin_session(self, leaf: Grown) -> None:
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
            turn_digest=leaf.until(leaf.end).tokens_digest,
            turn_segment=leaf.id,
            created=row.created,
            last_used=row.created,
        )
        self._draft.put_session(session)
        self._draft.update_segment(msgspec.structs.replace(row, session=session.id))
        self._say("session", session.id, f"begun, of {leaf.end} tokens")

    def _usage(self) -> None:
        for key, value in readable(self._tables, "usage").items():
            if self._draft.holds(key.hex()):
                self._draft.put("usage", key, value)
        for key, value in readable(self._tables, "gone").items():
            hangs = key[:1] == b"r" or key[1:17].hex() in self._tree.segments
            if hangs and self._draft.get("children", key) is None:
                self._draft.put("gone", key, value)


def _precedence(file: Surveyed, known: Mapping[str, SegmentRow | CheckpointRow]) -> tuple[int, bool, int, str]:
    """Parents before children; of two for one place, the one that is what was stored, then the longer one."""
    assert file.meta is not None
    row = known.get(file.id)
    return file.meta.start, row is None or row.checksum != file.checksum, -file.meta.end, file.id
