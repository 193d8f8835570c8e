"""Purges: selection of rows (pure) and their removal, in the proxy or in cachectl under `home.lock`."""

import time
from collections.abc import Callable, Collection, Set
from contextlib import closing
from dataclasses import dataclass
from math import inf
from typing import Self

import msgspec

from warmline_common.protocol.tokens import TOKEN_BYTES, namespace
from warmline_proxy.auth.owners import OwnerLabels
from warmline_proxy.index.index import Index, IndexReader
from warmline_proxy.index.lookup import path_tokens
from warmline_proxy.index.responses import delete_response, is_of_conversation, list_responses, remove_response
from warmline_proxy.index.save import abort_save
from warmline_proxy.index.tree import delete_quarantined, delete_subtree
from warmline_proxy.index.turns import list_turns, remove_turns
from warmline_proxy.retention import truncate
from warmline_proxy.retention.pin import unpin_orphaned_segments
from warmline_proxy.retention.truncate import Truncator, find_needed_segments
from warmline_proxy.store import rows
from warmline_proxy.store.rows import (
    IndexSnapshot,
    PurgeReply,
    PurgeRequest,
    ResponseRow,
    SegmentRow,
    SessionRow,
    TurnRow,
)
from warmline_proxy.store.tables import Tables

RemovableRow = SessionRow | SegmentRow | rows.QuarantineRow


class PurgeSelection(msgspec.Struct, kw_only=True):
    """Ids of the rows to remove.  `segments` has all descendants of each of its segments and of each cut."""

    sessions: set[str] = set()
    segments: set[str] = set()
    checkpoints: set[str] = set()
    quarantined: set[str] = set()
    bytes_freed: int = 0  # of whole files
    cuts: dict[str, int] = {}  # segments that are shortened, and their new ends


def check_purge_request(request: PurgeRequest) -> None:
    """Raise ValueError unless the request names exactly one thing."""
    named = [bool(request.session), bool(request.model), bool(request.key), request.roots is not None]
    if sum([*named, request.older_than_s is not None, request.everything]) != 1:
        raise ValueError("name exactly one of: a session, a model, a key, roots, an age, everything")


def resolve_key(request: PurgeRequest, owner_labels: OwnerLabels) -> PurgeRequest:
    """Replace a key by its roots.  Raises KeyNotFoundError for an unknown key."""
    if not request.key:
        return request
    return msgspec.structs.replace(request, key="", roots=owner_labels.find_roots(request.key))


def parse_roots(request: PurgeRequest) -> Set[bytes]:
    """Roots of the request, as bytes."""
    return frozenset(map(bytes.fromhex, request.roots or ()))


def select_purge(snapshot: IndexSnapshot, request: PurgeRequest, now: float) -> PurgeSelection:
    """Select the rows of a request whose key is resolved; empty where it matches nothing.  Raises ValueError.

    A conversation takes along only the tokens that no other conversation needs.
    """
    check_purge_request(request)
    assert not request.key, "resolve_key comes first"
    if request.everything:
        return _select_where(snapshot, lambda row: True)
    if request.model:
        return _select_where(snapshot, lambda row: row.model == request.model)
    if request.roots is not None:  # with all quarantined files, which don't say to which root they belonged
        roots = parse_roots(request)
        return _select_where(snapshot, lambda row: isinstance(row, rows.QuarantineRow) or row.root in roots)
    if request.session:
        return _select_sessions(snapshot, {request.session} & snapshot.sessions.keys())
    return _select_older_than(snapshot, now - (request.older_than_s or 0.0))


def purge(index: Index, request: PurgeRequest) -> PurgeReply:
    """Remove rows, records, files, and all bytes of them in the index.  Blocks; raises ValueError, IndexStoreError."""
    if request.dry_run:
        return preview_purge(index, request)
    with closing(Truncator(index)) as truncator:
        while True:
            prepare_purge(index, request, truncator)
            if (reply := remove_purged_rows(index, request, truncator)) is not None:
                break
    return erase_purged_files(index, reply)


def preview_purge(reader: IndexReader, request: PurgeRequest) -> PurgeReply:
    """Reply of a dry run.  Raises ValueError, IndexStoreError."""
    with reader.read_transaction() as tables:
        scope = _PurgeScope.select(tables, request)
    snapshot, selection = scope.snapshot, scope.selection
    cuts = ((snapshot.segments[segment], until) for segment, until in selection.cuts.items())
    previews = [truncate.preview_truncation(reader.home, *cut) for cut in cuts]
    responses = sum(map(scope.has_response, reader.responses()))
    return _make_reply(selection, previews, responses, dry_run=True)


def prepare_purge(index: Index, request: PurgeRequest, truncator: Truncator) -> None:
    """Write the shortened copies of segments to be cut.  Blocks, for long; raises ValueError, IndexStoreError."""
    index.flush()
    truncator.prepare(select_purge(index.snapshot(), request, time.time()).cuts)


def remove_purged_rows(index: Index, request: PurgeRequest, truncator: Truncator) -> PurgeReply | None:
    """Remove rows and records, so that no request can start from them; None, with nothing done: prepare again.

    Blocks; raises ValueError, IndexStoreError.
    """

    def change(tables: Tables) -> PurgeReply | None:
        scope = _PurgeScope.select(tables, request)
        if not truncator.is_ready(tables, scope.selection.cuts):
            return None
        cuts, responses = _Removal(tables, scope).run(truncator)
        return _make_reply(scope.selection, cuts, responses, dry_run=False)

    index.flush()
    with index.read_transaction() as tables:
        scope = _PurgeScope.select(tables, request)
    index.drop_unwritten_responses(scope.has_response)
    return index.transact(change, frees_space=True, may_delete_first=True)


def remove_sampled_turns(index: Index, calls: Collection[tuple[bytes, str]]) -> None:
    """Remove sampled turns by (root, first call).  Blocks; raises IndexStoreError."""

    def change(tables: Tables) -> None:
        _remove_turns(tables, lambda row: (row.root, row.calls[0]) in calls)

    if calls:
        index.flush()
        index.transact(change, frees_space=True)


def remove_responses(index: Index, keys: Collection[tuple[str, str]]) -> int:
    """Remove stored responses by (owner, id); how many.  Blocks; raises IndexStoreError."""
    if not keys:
        return 0
    index.flush()
    dropped = index.drop_unwritten_responses(lambda row: (row.owner, row.id) in keys)
    deleted = index.transact(lambda tables: [delete_response(tables, *key) for key in keys], frees_space=True)
    return dropped + sum(deleted)


def erase_purged_files(index: Index, reply: PurgeReply) -> PurgeReply:
    """Delete files without rows, then all deleted bytes in the index file.  Blocks; raises IndexStoreError.

    Failed cuts are tried once more: there may be room for their copies now.
    """
    index.sweep()
    if failed := {cut.segment for cut in reply.cuts if cut.why_not}:
        cuts = {cut.segment: cut for cut in [*reply.cuts, *truncate.truncate_orphaned_tails(index, failed)]}
        freed = sum(cuts[segment].bytes_count for segment in failed if not cuts[segment].why_not)
        reply = msgspec.structs.replace(reply, cuts=list(cuts.values()), bytes_freed=reply.bytes_freed + freed)
        index.sweep()
    index.compact()
    index.renew_reserve()
    return reply


def _make_reply(selection: PurgeSelection, cuts: list[rows.Truncation], responses: int, dry_run: bool) -> PurgeReply:
    return PurgeReply(
        sessions=sorted(selection.sessions),
        segments=sorted(selection.segments),
        checkpoints=sorted(selection.checkpoints),
        quarantined=sorted(selection.quarantined),
        bytes_freed=selection.bytes_freed + sum(cut.bytes_count for cut in cuts if not cut.why_not),
        dry_run=dry_run,
        cuts=cuts,
        responses=responses,
    )


def _select_where(snapshot: IndexSnapshot, matches: Callable[[RemovableRow], bool]) -> PurgeSelection:
    tables = (snapshot.sessions, snapshot.segments, snapshot.quarantined)
    sessions, segments, quarantined = ({row.id for row in table.values() if matches(row)} for table in tables)
    return _make_selection(snapshot, sessions, segments, quarantined, {})


def _select_older_than(snapshot: IndexSnapshot, before: float) -> PurgeSelection:
    """Select sessions, and segments of no session, that were last used before this time."""
    old = {row.id for row in snapshot.sessions.values() if row.last_used < before}
    selection = _select_sessions(snapshot, old)
    needed = set(find_needed_segments(snapshot, snapshot.sessions.keys() - old))
    usage = snapshot.usage
    young = {row.id for row in snapshot.segments.values() if max(row.created, usage[row.id].last_used) >= before}
    needed |= {link.id for segment_id in young - selection.segments for link in snapshot.segment_path(segment_id)}
    quarantined = {row.id for row in snapshot.quarantined.values() if row.at < before}
    segments = selection.segments | (snapshot.segments.keys() - needed)
    return _make_selection(snapshot, old, segments, quarantined, selection.cuts)


def _select_sessions(snapshot: IndexSnapshot, sessions: set[str]) -> PurgeSelection:
    """Select the sessions' paths, abandoned branches and other own segments, except where other sessions need them."""
    needed = find_needed_segments(snapshot, snapshot.sessions.keys() - sessions)
    own = find_needed_segments(snapshot, sessions)
    wrote = {row.id for row in snapshot.segments.values() if row.session in sessions}
    cuts = {
        segment: until
        for segment, until in needed.items()
        if until < (snapshot.segments[segment].end if segment in wrote else own.get(segment, 0))
    }
    beyond = {row.id for row in snapshot.segments.values() if row.start > cuts.get(row.parent, inf)}
    models = {snapshot.sessions[session].model for session in sessions} | {""}
    # Quarantined files don't say to which session they belonged: those of the model go.
    quarantined = {row.id for row in snapshot.quarantined.values() if sessions and row.model in models}
    return _make_selection(snapshot, sessions, (own.keys() | wrote | beyond) - needed.keys(), quarantined, cuts)


def _make_selection(
    snapshot: IndexSnapshot, sessions: set[str], segments: Set[str], quarantined: set[str], cuts: dict[str, int]
) -> PurgeSelection:
    """Add the descendants of the segments, their checkpoints, and the sessions of which nothing is left."""
    removed = set(segments)
    for row in sorted(snapshot.segments.values(), key=lambda row: row.start):  # a parent starts before its children
        if row.parent in removed:
            removed.add(row.id)
    states = snapshot.checkpoints.values()
    checkpoints = {row.id for row in states if row.segment in removed or row.position > cuts.get(row.segment, inf)}
    paths = {session: find_needed_segments(snapshot, [session]) for session in snapshot.sessions}
    sizes = [
        *(snapshot.segments[file_id].bytes_on_disk for file_id in removed),
        *(snapshot.checkpoints[file_id].bytes_on_disk for file_id in checkpoints),
        *(snapshot.quarantined[file_id].bytes_on_disk for file_id in quarantined),
    ]
    return PurgeSelection(
        sessions=sessions | {session for session, path in paths.items() if removed.issuperset(path)},
        segments=removed,
        checkpoints=checkpoints,
        quarantined=quarantined,
        bytes_freed=sum(sizes),
        cuts=cuts,
    )


def _remove_turns(tables: Tables, is_purged: Callable[[TurnRow], bool]) -> None:
    remove_turns(tables, ((key, row) for key, row in list_turns(tables) if is_purged(row)))


@dataclass(frozen=True)
class _PurgeScope:
    """The rows that a purge removes besides the selected ones."""

    snapshot: IndexSnapshot
    selection: PurgeSelection
    request: PurgeRequest
    now: float
    tokens: dict[str, bytes]  # packed, by session: of those selected for a purge of one session

    @classmethod
    def select(cls, tables: Tables, request: PurgeRequest) -> Self:
        """Raises ValueError."""
        snapshot, now = tables.snapshot(), time.time()
        selection = select_purge(snapshot, request, now)
        named = [snapshot.sessions[session] for session in selection.sessions if request.session]
        tokens = {row.id: path_tokens(tables, row.leaf)[: row.tokens * TOKEN_BYTES] for row in named}
        return cls(snapshot, selection, request, now, tokens)

    @property
    def before(self) -> float:
        return -inf if self.request.older_than_s is None else self.now - self.request.older_than_s

    def is_stored(self, session: str) -> bool:
        """Say whether the session remains."""
        return session in self.snapshot.sessions and session not in self.selection.sessions

    def has_all_of(self, model: str, root: bytes) -> bool:
        """Say whether everything of this model, or under this root, is purged."""
        return self.request.everything or self.request.model == model != "" or root in parse_roots(self.request)

    def has_turn(self, turn: TurnRow) -> bool:
        """Say whether a sampled turn is removed: with its session, or as an old turn of a deleted session.

        A turn without a session yet may belong to the purged session.
        """
        if turn.at < self.before:
            return not self.is_stored(turn.session)
        of_session = turn.session in self.selection.sessions or (bool(self.request.session) and not turn.session)
        return of_session or self.has_all_of(turn.model, turn.root)

    def has_response(self, response: ResponseRow) -> bool:
        """Say whether a stored response is removed: as a turn is, but with its own session or owner alone."""
        if response.at < self.before:
            return not self.is_stored(response.session)
        own_root = namespace(response.fingerprint, response.owner)  # another one where the cache is shared
        is_owned = any(self.has_all_of(response.model, root) for root in (response.root, own_root))
        return is_owned or response.session in self.selection.sessions or self._has_lost_response(response)

    def _has_lost_response(self, response: ResponseRow) -> bool:
        """Say whether a response of no stored session is of a purged one, by its prompt.

        Its request's save was killed, or failed, or its session was evicted before the conversation went on.
        """
        if response.session in self.snapshot.sessions:
            return False
        sessions = self.snapshot.sessions
        return any(is_of_conversation(response, sessions[each], tokens) for each, tokens in self.tokens.items())


@dataclass(frozen=True)
class _Removal:
    """Removal of the selected rows, in one transaction, with records, save plans, sampled turns and responses."""

    tables: Tables
    scope: _PurgeScope

    def run(self, truncator: Truncator) -> tuple[list[rows.Truncation], int]:
        """The cuts, and how many responses were removed."""
        tables, scope = self.tables, self.scope
        tables.mark_purged()
        self._remove_rows()
        cuts = truncator.apply(tables, scope.selection.cuts, owner=next(iter(scope.selection.sessions), ""))
        unpin_orphaned_segments(tables)
        self._remove_records()
        for plan in tables.save_plans():
            if scope.has_all_of(plan.model, plan.root):
                abort_save(tables, plan)
        _remove_turns(tables, scope.has_turn)
        responses = [(key, row) for key, row in list_responses(tables) if scope.has_response(row)]
        for key, row in responses:
            remove_response(tables, key, row)
        return cuts, len(responses)

    def _remove_rows(self) -> None:
        tables, selection = self.tables, self.scope.selection
        for session in selection.sessions:
            tables.remove_session(session)
        for file_id in (*selection.segments, *selection.checkpoints):
            delete_subtree(tables, file_id, "")
        delete_quarantined(tables, selection.quarantined)
        for key, _ in list(tables.items("gone")):
            tables.delete("gone", key)  # each has a token of a prompt
        for segment in self.scope.snapshot.segments.values():  # segments that stay don't name a purged session
            if segment.session in selection.sessions and segment.id not in selection.segments:
                tables.update_segment(msgspec.structs.replace(segment, session=""))

    def _remove_records(self) -> None:
        """Delete the records of purged requests, stored or not."""
        scope, snapshot = self.scope, self.scope.snapshot
        stored: list[SegmentRow | SessionRow] = [*snapshot.segments.values(), *snapshot.sessions.values()]
        roots = {row.root for row in stored if scope.has_all_of(row.model, row.root)} | parse_roots(scope.request)
        for key, record in self.tables.requests():
            is_old = record.at < scope.before and not scope.is_stored(record.session)
            of_session = record.session in scope.selection.sessions
            if scope.request.everything or of_session or record.root in roots or is_old:
                self.tables.delete("requests", key)
            elif record.parting is not None:  # it has text of other prompts
                self.tables.put_request(key, msgspec.structs.replace(record, parting=None))
