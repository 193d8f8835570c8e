"""Purging: what a request means (pure), and doing it, by the proxy's handler or by a cachectl under `home.lock`."""

import time
from collections.abc import Collection, Set
from math import inf

import msgspec

from warmline_proxy.auth.owners import OwnerLabels
from warmline_proxy.index.index import Index, IndexReader
from warmline_proxy.index.save import abort_save
from warmline_proxy.index.tree import delete_subtree
from warmline_proxy.index.turns import list_turns, remove_turns
from warmline_proxy.retention.pin import unpin_orphaned_segments
from warmline_proxy.retention.truncate import (
    Truncator,
    find_needed_segments,
    preview_truncation,
    truncate_orphaned_tails,
)
from warmline_proxy.store.rows import (
    IndexSnapshot,
    PurgeReply,
    PurgeRequest,
    SegmentRow,
    SessionRow,
    Truncation,
    TurnRow,
)
from warmline_proxy.store.tables import Tables


class PurgeSelection(msgspec.Struct, kw_only=True):
    """What goes.  `segments` is closed: with a segment, or a part of one, goes all that builds on it."""

    sessions: set[str] = set()
    segments: set[str] = set()
    checkpoints: set[str] = set()
    quarantined: set[str] = set()
    bytes_freed: int = 0  # of whole files
    cuts: dict[str, int] = {}  # segments that stay, and the position from which on others don't need them


def check_purge_request(request: PurgeRequest) -> None:
    """Raises ValueError unless it names exactly one thing."""
    named = [bool(request.session), bool(request.model), bool(request.key), request.roots is not None]
    if sum([*named, request.older_than_s is not None, request.everything]) != 1:
        raise ValueError("name exactly one of: a session, a model, a key, roots, an age, everything")


def resolve_key(request: PurgeRequest, owner_labels: OwnerLabels) -> PurgeRequest:
    """The same, with roots for a key.  Raises NoSuchKey."""
    return (
        msgspec.structs.replace(request, key="", roots=owner_labels.find_roots(request.key)) if request.key else request
    )


def parse_roots(request: PurgeRequest) -> Set[bytes]:
    """Those that it names."""
    return frozenset(map(bytes.fromhex, request.roots or ()))


def select_purge(snapshot: IndexSnapshot, request: PurgeRequest, now: float) -> PurgeSelection:
    """Raises ValueError unless the request names exactly one thing; an empty selection where it matches nothing.

    A conversation takes along only what no other one needs, and that to the token.  A key is named `by_roots`.
    """
    check_purge_request(request)
    assert not request.key, "it must be found out first which roots are its"
    if request.everything:
        return _make_selection(snapshot, set(snapshot.sessions), set(snapshot.segments), set(snapshot.quarantined))
    if request.model:
        return _select_model(snapshot, request.model)
    if request.roots is not None:
        return _select_roots(snapshot, parse_roots(request))
    if request.session:
        return _select_sessions(snapshot, {request.session} & snapshot.sessions.keys())
    return _select_older_than(snapshot, now - (request.older_than_s or 0.0))


def purge(index: Index, request: PurgeRequest) -> PurgeReply:
    """Rows, files, request records and then every trace in the index file.  Blocks; raises ValueError, IndexFailure."""
    if request.dry_run:
        return preview_purge(index, request)
    with Truncator(index) as cutter:
        while True:
            prepare_purge(index, request, cutter)
            if (reply := remove_purged_rows(index, request, cutter)) is not None:
                break
    return erase_purged_files(index, reply)


def preview_purge(reader: IndexReader, request: PurgeRequest) -> PurgeReply:
    """What would go.  Raises ValueError, IndexFailure."""
    snapshot = reader.snapshot()
    selection = select_purge(snapshot, request, time.time())
    cuts = [
        preview_truncation(reader.home, snapshot.segments[segment], until) for segment, until in selection.cuts.items()
    ]
    return _make_reply(selection, cuts, dry_run=True)


def prepare_purge(index: Index, request: PurgeRequest, truncator: Truncator) -> None:
    """Write what is to take the place of segments that are cut.  Blocks, for long; raises ValueError, IndexFailure."""
    index.flush()
    truncator.prepare(select_purge(index.snapshot(), request, time.time()).cuts)


def remove_purged_rows(index: Index, request: PurgeRequest, truncator: Truncator) -> PurgeReply | None:
    """Rows and records: nobody starts from it any more.  None, and nothing is done, where it must be prepared again.

    Blocks; raises ValueError, IndexFailure.
    """
    index.flush()
    return index.transact(lambda tables: _select_and_remove(tables, request, truncator), frees_space=True)


def remove_sampled_turns(index: Index, calls: Collection[tuple[bytes, str]]) -> None:
    """What requests have sampled, each by its namespace and first call.  Blocks; raises IndexFailure."""
    if not calls:
        return
    index.flush()

    def change(tables: Tables) -> None:
        wanted = set(calls)
        remove_turns(tables, (pair for pair in list_turns(tables) if (pair[1].root, pair[1].calls[0]) in wanted))

    index.transact(change, frees_space=True)


def erase_purged_files(index: Index, reply: PurgeReply) -> PurgeReply:
    """Files whose rows are gone, then every trace in the index file.  Blocks; raises IndexFailure.

    What could not be cut is tried once more: there may be room for it now.
    """
    index.sweep()
    if again := {cut.segment for cut in reply.cuts if cut.why_not}:
        cuts = {cut.segment: cut for cut in [*reply.cuts, *truncate_orphaned_tails(index, again)]}
        freed = sum(cuts[segment].bytes_count for segment in again if not cuts[segment].why_not)
        reply = msgspec.structs.replace(reply, cuts=list(cuts.values()), bytes_freed=reply.bytes_freed + freed)
        index.sweep()
    index.compact()
    index.renew_reserve()
    return reply


def _make_reply(selection: PurgeSelection, cuts: list[Truncation], dry_run: bool) -> PurgeReply:
    return PurgeReply(
        sessions=sorted(selection.sessions),
        segments=sorted(selection.segments),
        checkpoints=sorted(selection.checkpoints),
        quarantined=sorted(selection.quarantined),
        bytes_freed=selection.bytes_freed + sum(cut.bytes_count for cut in cuts if not cut.why_not),
        dry_run=dry_run,
        cuts=cuts,
    )


def _select_and_remove(tables: Tables, request: PurgeRequest, truncator: Truncator) -> PurgeReply | None:
    snapshot, now = tables.snapshot(), time.time()
    selection = select_purge(snapshot, request, now)
    if not truncator.is_ready(tables, selection.cuts):
        return None
    kept, roots = snapshot.sessions.keys() - selection.sessions, parse_roots(request)
    tables.mark_purged()
    _remove_selected(tables, selection)
    _clear_session_labels(tables, snapshot, selection)
    cuts = truncator.apply(tables, selection.cuts, owner=next(iter(selection.sessions), ""))
    unpin_orphaned_segments(tables)
    _remove_records(tables, snapshot, selection, request, now)
    for plan in tables.save_plans():
        if request.everything or request.model == plan.model != "" or plan.root in roots:
            abort_save(tables, plan)
    remove_turns(
        tables, (pair for pair in list_turns(tables) if _is_turn_purged(pair[1], kept, selection, request, roots, now))
    )
    return _make_reply(selection, cuts, dry_run=False)


def _is_turn_purged(
    turn: TurnRow,
    remaining_sessions: Collection[str],
    selection: PurgeSelection,
    request: PurgeRequest,
    roots: Set[bytes],
    now: float,
) -> bool:
    """What a model sampled is gone with its conversation: the first turn of one that goes on is not old.

    What belongs to no conversation yet may belong to the one that goes.
    """
    if request.older_than_s is not None and turn.at < now - request.older_than_s:
        return turn.session not in remaining_sessions
    of_session = turn.session in selection.sessions or (bool(request.session) and not turn.session)
    return request.everything or of_session or request.model == turn.model != "" or turn.root in roots


def _select_model(snapshot: IndexSnapshot, model: str) -> PurgeSelection:
    segments = {row.id for row in snapshot.segments.values() if row.model == model}
    sessions = {row.id for row in snapshot.sessions.values() if row.model == model}
    quarantined = {row.id for row in snapshot.quarantined.values() if row.model == model}
    return _make_selection(snapshot, sessions, segments, quarantined)


def _select_roots(snapshot: IndexSnapshot, roots: Set[bytes]) -> PurgeSelection:
    """With all that was set aside: whose that was can no longer be told for sure."""
    segments = {row.id for row in snapshot.segments.values() if row.root in roots}
    sessions = {row.id for row in snapshot.sessions.values() if row.root in roots}
    return _make_selection(snapshot, sessions, segments, set(snapshot.quarantined))


def _select_older_than(snapshot: IndexSnapshot, before: float) -> PurgeSelection:
    """Conversations, and what belongs to none, last used before then."""
    old = {row.id for row in snapshot.sessions.values() if row.last_used < before}
    selection = _select_sessions(snapshot, old)
    kept = set(find_needed_segments(snapshot, snapshot.sessions.keys() - old))
    young = {row.id for row in snapshot.segments.values() if _last_used(snapshot, row.id) >= before}
    kept |= {link.id for segment_id in young - selection.segments for link in snapshot.segment_path(segment_id)}
    quarantined = {row.id for row in snapshot.quarantined.values() if row.at < before}
    segments = selection.segments | (snapshot.segments.keys() - kept)
    return _make_selection(snapshot, old, segments, quarantined, selection.cuts)


def _last_used(snapshot: IndexSnapshot, segment_id: str) -> float:
    return max(snapshot.segments[segment_id].created, snapshot.usage[segment_id].last_used)


def _select_sessions(snapshot: IndexSnapshot, sessions: set[str]) -> PurgeSelection:
    """Their paths, abandoned branches of those, and what else they wrote, but for what other conversations stand on."""
    needed, own = (
        find_needed_segments(snapshot, snapshot.sessions.keys() - sessions),
        find_needed_segments(snapshot, sessions),
    )
    wrote = {row.id for row in snapshot.segments.values() if row.session in sessions}
    cuts = {
        segment: until
        for segment, until in needed.items()
        if until < (snapshot.segments[segment].end if segment in wrote else own.get(segment, 0))
    }
    beyond = {row.id for row in snapshot.segments.values() if row.start > cuts.get(row.parent, inf)}
    models = {snapshot.sessions[session].model for session in sessions} | {""}
    # Whose rows a file has that was set aside can no longer be told for sure.
    quarantined = {row.id for row in snapshot.quarantined.values() if sessions and row.model in models}
    return _make_selection(snapshot, sessions, (own.keys() | wrote | beyond) - needed.keys(), quarantined, cuts)


def _make_selection(
    snapshot: IndexSnapshot,
    sessions: set[str],
    segments: Set[str],
    quarantined: set[str],
    cuts: dict[str, int] | None = None,
) -> PurgeSelection:
    gone, cuts = _add_descendants(snapshot, segments), cuts or {}
    checkpoints = {
        row.id
        for row in snapshot.checkpoints.values()
        if row.segment in gone or row.position > cuts.get(row.segment, inf)
    }
    lost = {row.id for row in snapshot.sessions.values() if gone.issuperset(find_needed_segments(snapshot, [row.id]))}
    sizes = [
        *(snapshot.segments[file_id].bytes_on_disk for file_id in gone),
        *(snapshot.checkpoints[file_id].bytes_on_disk for file_id in checkpoints),
        *(snapshot.quarantined[file_id].bytes_on_disk for file_id in quarantined),
    ]
    return PurgeSelection(
        sessions=sessions | lost,
        segments=gone,
        checkpoints=checkpoints,
        quarantined=quarantined,
        bytes_freed=sum(sizes),
        cuts=cuts,
    )


def _add_descendants(snapshot: IndexSnapshot, segments: Set[str]) -> set[str]:
    gone = set(segments)
    for row in sorted(snapshot.segments.values(), key=lambda row: row.start):  # a parent starts before its children
        if row.parent in gone:
            gone.add(row.id)
    return gone


def _remove_selected(tables: Tables, selection: PurgeSelection) -> None:
    for session in selection.sessions:
        tables.remove_session(session)
    for file_id in (*selection.segments, *selection.checkpoints):
        delete_subtree(tables, file_id, "")
    for row in tables.quarantined():
        if row.id in selection.quarantined:
            tables.remove_quarantined(row)
            tables.mark_deleted(row.id, row.bytes_on_disk)
    for key, _ in list(tables.items("gone")):
        tables.delete("gone", key)  # each holds a token


def _clear_session_labels(tables: Tables, snapshot: IndexSnapshot, selection: PurgeSelection) -> None:
    """What they wrote and others stand on has no name of theirs any more."""
    for row in snapshot.segments.values():
        if row.session in selection.sessions and row.id not in selection.segments:
            tables.update_segment(msgspec.structs.replace(row, session=""))


def _remove_records(
    tables: Tables, snapshot: IndexSnapshot, selection: PurgeSelection, request: PurgeRequest, now: float
) -> None:
    """Of requests, those of what goes, whether or not anything was stored of them."""
    rows: list[SegmentRow | SessionRow] = [*snapshot.segments.values(), *snapshot.sessions.values()]
    roots = {row.root for row in rows if row.model == request.model != ""} | parse_roots(request)
    kept = snapshot.sessions.keys() - selection.sessions
    before = -inf if request.older_than_s is None else now - request.older_than_s
    for key, record in tables.requests():
        of_it = record.session in selection.sessions or record.root in roots
        if request.everything or of_it or (record.at < before and record.session not in kept):
            tables.delete("requests", key)
        elif record.parting is not None:  # it tells what others' prompts said, too
            tables.put_request(key, msgspec.structs.replace(record, parting=None))
