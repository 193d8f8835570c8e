"""Purging: what a request means (pure), and doing it, by the proxy's handler or by a cachectl under `home.lock`."""

import time
from collections.abc import Collection, Iterable, Set
from math import inf

import msgspec

from warmline_proxy.index import Index
from warmline_proxy.index_save import abort
from warmline_proxy.index_tables import Tables
from warmline_proxy.index_tree import drop
from warmline_proxy.index_turns import remove_turns, turns
from warmline_proxy.pin import let_go_of_unclaimed
from warmline_proxy.rows import PurgeReply, PurgeRequest, SegmentRow, SessionRow, Snapshot, TurnRow


class Selection(msgspec.Struct, kw_only=True):
    """What goes.  `segments` is closed: with a segment goes all that builds on it."""

    sessions: set[str] = set()
    segments: set[str] = set()
    checkpoints: set[str] = set()
    quarantined: set[str] = set()
    bytes_freed: int = 0


def check(request: PurgeRequest) -> None:
    """Raises ValueError unless it names exactly one thing."""
    given = [bool(request.session), bool(request.model), request.older_than_s is not None, request.everything]
    if sum(given) != 1:
        raise ValueError("name exactly one of: a session, a model, an age, everything")


def select(snapshot: Snapshot, request: PurgeRequest, now: float) -> Selection:
    """Raises ValueError unless the request names exactly one thing; an empty selection where it matches nothing.

    A conversation takes along only what no other one needs.
    """
    check(request)
    if request.everything:
        return _measured(snapshot, set(snapshot.sessions), set(snapshot.segments), set(snapshot.quarantined))
    if request.model:
        return _of_model(snapshot, request.model)
    if request.session:
        return _of_sessions(snapshot, {request.session} & snapshot.sessions.keys())
    return _older_than(snapshot, now - (request.older_than_s or 0.0))


def purge(index: Index, request: PurgeRequest) -> PurgeReply:
    """Rows, files, request records and then every trace in the index file.  Blocks; raises ValueError, IndexFailure."""
    if request.dry_run:
        return told(select(index.snapshot(), request, time.time()), dry_run=True)
    reply = remove(index, request)
    erase(index)
    return reply


def remove(index: Index, request: PurgeRequest) -> PurgeReply:
    """Rows and records: nobody starts from it any more.  Blocks; raises ValueError, IndexFailure."""
    index.flush()
    return told(index.change(lambda tables: _select_and_remove(tables, request), frees=True), dry_run=False)


def erase(index: Index) -> None:
    """Files whose rows are gone, then every trace in the index file.  Blocks; raises IndexFailure."""
    index.sweep()
    index.compact()
    index.renew_spare()


def told(selection: Selection, dry_run: bool) -> PurgeReply:
    """The answer that names it."""
    return PurgeReply(
        sessions=sorted(selection.sessions),
        segments=sorted(selection.segments),
        checkpoints=sorted(selection.checkpoints),
        quarantined=sorted(selection.quarantined),
        bytes_freed=selection.bytes_freed,
        dry_run=dry_run,
    )


def _select_and_remove(tables: Tables, request: PurgeRequest) -> Selection:
    snapshot, now = tables.snapshot(), time.time()
    selection = select(snapshot, request, now)
    kept = snapshot.sessions.keys() - selection.sessions
    _remove(tables, selection)
    let_go_of_unclaimed(tables)
    _remove_records(tables, snapshot, selection, request, now)
    for plan in tables.saves():
        if request.everything or request.model == plan.model != "":
            abort(tables, plan)
    remove_turns(tables, (pair for pair in turns(tables) if _goes(pair[1], kept, selection, request, now)))
    return selection


def _goes(turn: TurnRow, kept: Collection[str], selection: Selection, request: PurgeRequest, now: float) -> bool:
    """What a model sampled is gone with its conversation: the first turn of one that goes on is not old.

    What belongs to no conversation yet may belong to the one that goes.
    """
    if request.older_than_s is not None and turn.at < now - request.older_than_s:
        return turn.session not in kept
    of_session = turn.session in selection.sessions or (bool(request.session) and not turn.session)
    return request.everything or of_session or request.model == turn.model != ""


def _of_model(snapshot: Snapshot, model: str) -> Selection:
    segments = {row.id for row in snapshot.segments.values() if row.model == model}
    sessions = {row.id for row in snapshot.sessions.values() if row.model == model}
    quarantined = {row.id for row in snapshot.quarantined.values() if row.model == model}
    return _measured(snapshot, sessions, segments, quarantined)


def _older_than(snapshot: Snapshot, before: float) -> Selection:
    """Conversations, and what belongs to none, last used before then."""
    old = {row.id for row in snapshot.sessions.values() if row.last_used < before}
    selection = _of_sessions(snapshot, old)
    kept = _needed(snapshot, snapshot.sessions.keys() - old)
    young = {row.id for row in snapshot.segments.values() if _last_used(snapshot, row.id) >= before}
    kept |= {link.id for segment_id in young - selection.segments for link in snapshot.path(segment_id)}
    quarantined = {row.id for row in snapshot.quarantined.values() if row.at < before}
    return _measured(snapshot, old, selection.segments | (snapshot.segments.keys() - kept), quarantined)


def _last_used(snapshot: Snapshot, segment_id: str) -> float:
    return max(snapshot.segments[segment_id].created, snapshot.usage[segment_id].last_used)


def _of_sessions(snapshot: Snapshot, sessions: set[str]) -> Selection:
    """Their paths, abandoned branches of those, and what else they wrote, but for what other conversations stand on."""
    needed = _needed(snapshot, snapshot.sessions.keys() - sessions)
    own = _needed(snapshot, sessions)
    own |= {row.id for row in snapshot.segments.values() if row.session in sessions}
    models = {snapshot.sessions[session].model for session in sessions} | {""}
    # Whose rows a file has that was set aside can no longer be told for sure.
    quarantined = {row.id for row in snapshot.quarantined.values() if sessions and row.model in models}
    return _measured(snapshot, sessions, own - needed, quarantined)


def _needed(snapshot: Snapshot, sessions: Iterable[str]) -> set[str]:
    """What these stand on."""
    return {link.id for session in sessions for link in snapshot.path(snapshot.sessions[session].leaf)}


def _measured(snapshot: Snapshot, sessions: set[str], segments: Set[str], quarantined: set[str]) -> Selection:
    gone = _with_descendants(snapshot, segments)
    checkpoints = {row.id for row in snapshot.checkpoints.values() if row.segment in gone}
    lost = {row.id for row in snapshot.sessions.values() if gone.issuperset(_needed(snapshot, [row.id]))}
    sizes = [
        *(snapshot.segments[file_id].bytes_on_disk for file_id in gone),
        *(snapshot.checkpoints[file_id].bytes_on_disk for file_id in checkpoints),
        *(snapshot.quarantined[file_id].bytes_on_disk for file_id in quarantined),
    ]
    return Selection(
        sessions=sessions | lost,
        segments=gone,
        checkpoints=checkpoints,
        quarantined=quarantined,
        bytes_freed=sum(sizes),
    )


def _with_descendants(snapshot: Snapshot, segments: Set[str]) -> set[str]:
    gone = set(segments)
    for row in sorted(snapshot.segments.values(), key=lambda row: row.start):  # a parent starts before its children
        if row.parent in gone:
            gone.add(row.id)
    return gone


def _remove(tables: Tables, selection: Selection) -> None:
    for session in selection.sessions:
        tables.remove_session(session)
    for segment in selection.segments:
        drop(tables, segment, "")
    for row in tables.quarantined():
        if row.id in selection.quarantined:
            tables.remove_quarantined(row)
            tables.doom(row.id, row.bytes_on_disk)
    for key, _ in list(tables.items("gone")):
        tables.delete("gone", key)  # each holds a token


def _remove_records(
    tables: Tables, snapshot: Snapshot, selection: Selection, request: PurgeRequest, now: float
) -> None:
    """Of requests, those of what goes, whether or not anything was stored of them."""
    rows: list[SegmentRow | SessionRow] = [*snapshot.segments.values(), *snapshot.sessions.values()]
    roots = {row.root for row in rows if row.model == request.model != ""}
    kept = snapshot.sessions.keys() - selection.sessions
    before = -inf if request.older_than_s is None else now - request.older_than_s
    for key, record in tables.requests():
        of_it = record.session in selection.sessions or record.root in roots
        if request.everything or of_it or (record.at < before and record.session not in kept):
            tables.delete("requests", key)
        elif record.parting is not None:  # it tells what others' prompts said, too
            tables.put_request(key, msgspec.structs.replace(record, parting=None))
