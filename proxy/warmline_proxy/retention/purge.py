"""Purging: what a request means (pure), and doing it, by the proxy's handler or by a cachectl under `home.lock`."""

import time
from collections.abc import Collection, Set
from math import inf

import msgspec

from warmline_proxy.auth.owners import Whose
from warmline_proxy.index.index import Index, IndexReader
from warmline_proxy.index.save import abort
from warmline_proxy.index.tree import drop
from warmline_proxy.index.turns import remove_turns, turns
from warmline_proxy.retention.pin import let_go_of_unclaimed
from warmline_proxy.retention.truncate import Cutter, reach, trim, weighed
from warmline_proxy.store.rows import Cut, PurgeReply, PurgeRequest, SegmentRow, SessionRow, Snapshot, TurnRow
from warmline_proxy.store.tables import Tables


class Selection(msgspec.Struct, kw_only=True):
    """What goes.  `segments` is closed: with a segment, or a part of one, goes all that builds on it."""

    sessions: set[str] = set()
    segments: set[str] = set()
    checkpoints: set[str] = set()
    quarantined: set[str] = set()
    bytes_freed: int = 0  # of whole files
    cuts: dict[str, int] = {}  # segments that stay, and the position from which on others don't need them


def check(request: PurgeRequest) -> None:
    """Raises ValueError unless it names exactly one thing."""
    named = [bool(request.session), bool(request.model), bool(request.key), request.roots is not None]
    if sum([*named, request.older_than_s is not None, request.everything]) != 1:
        raise ValueError("name exactly one of: a session, a model, a key, roots, an age, everything")


def by_roots(request: PurgeRequest, known: Whose) -> PurgeRequest:
    """The same, with roots for a key.  Raises NoSuchKey."""
    return msgspec.structs.replace(request, key="", roots=known.roots(request.key)) if request.key else request


def roots_of(request: PurgeRequest) -> Set[bytes]:
    """Those that it names."""
    return frozenset(map(bytes.fromhex, request.roots or ()))


def select(snapshot: Snapshot, request: PurgeRequest, now: float) -> Selection:
    """Raises ValueError unless the request names exactly one thing; an empty selection where it matches nothing.

    A conversation takes along only what no other one needs, and that to the token.  A key is named `by_roots`.
    """
    check(request)
    assert not request.key, "it must be found out first which roots are its"
    if request.everything:
        return _measured(snapshot, set(snapshot.sessions), set(snapshot.segments), set(snapshot.quarantined))
    if request.model:
        return _of_model(snapshot, request.model)
    if request.roots is not None:
        return _of_roots(snapshot, roots_of(request))
    if request.session:
        return _of_sessions(snapshot, {request.session} & snapshot.sessions.keys())
    return _older_than(snapshot, now - (request.older_than_s or 0.0))


def purge(index: Index, request: PurgeRequest) -> PurgeReply:
    """Rows, files, request records and then every trace in the index file.  Blocks; raises ValueError, IndexFailure."""
    if request.dry_run:
        return preview(index, request)
    with Cutter(index) as cutter:
        while True:
            prepare(index, request, cutter)
            if (reply := remove(index, request, cutter)) is not None:
                break
    return erase(index, reply)


def preview(reader: IndexReader, request: PurgeRequest) -> PurgeReply:
    """What would go.  Raises ValueError, IndexFailure."""
    snapshot = reader.snapshot()
    selection = select(snapshot, request, time.time())
    cuts = [weighed(reader.home, snapshot.segments[segment], until) for segment, until in selection.cuts.items()]
    return _told(selection, cuts, dry_run=True)


def prepare(index: Index, request: PurgeRequest, cutter: Cutter) -> None:
    """Write what is to take the place of segments that are cut.  Blocks, for long; raises ValueError, IndexFailure."""
    index.flush()
    cutter.prepare(select(index.snapshot(), request, time.time()).cuts)


def remove(index: Index, request: PurgeRequest, cutter: Cutter) -> PurgeReply | None:
    """Rows and records: nobody starts from it any more.  None, and nothing is done, where it must be prepared again.

    Blocks; raises ValueError, IndexFailure.
    """
    index.flush()
    return index.change(lambda tables: _select_and_remove(tables, request, cutter), frees=True)


def remove_turns_of(index: Index, calls: Collection[tuple[bytes, str]]) -> None:
    """What requests have sampled, each by its namespace and first call.  Blocks; raises IndexFailure."""
    if not calls:
        return
    index.flush()

    def change(tables: Tables) -> None:
        wanted = set(calls)
        remove_turns(tables, (pair for pair in turns(tables) if (pair[1].root, pair[1].calls[0]) in wanted))

    index.change(change, frees=True)


def erase(index: Index, reply: PurgeReply) -> PurgeReply:
    """Files whose rows are gone, then every trace in the index file.  Blocks; raises IndexFailure.

    What could not be cut is tried once more: there may be room for it now.
    """
    index.sweep()
    if again := {cut.segment for cut in reply.cuts if cut.why_not}:
        cuts = {cut.segment: cut for cut in [*reply.cuts, *trim(index, again)]}
        freed = sum(cuts[segment].bytes_count for segment in again if not cuts[segment].why_not)
        reply = msgspec.structs.replace(reply, cuts=list(cuts.values()), bytes_freed=reply.bytes_freed + freed)
        index.sweep()
    index.compact()
    index.renew_spare()
    return reply


def _told(selection: Selection, cuts: list[Cut], dry_run: bool) -> PurgeReply:
    return PurgeReply(
        sessions=sorted(selection.sessions),
        segments=sorted(selection.segments),
        checkpoints=sorted(selection.checkpoints),
        quarantined=sorted(selection.quarantined),
        bytes_freed=selection.bytes_freed + sum(cut.bytes_count for cut in cuts if not cut.why_not),
        dry_run=dry_run,
        cuts=cuts,
    )


def _select_and_remove(tables: Tables, request: PurgeRequest, cutter: Cutter) -> PurgeReply | None:
    snapshot, now = tables.snapshot(), time.time()
    selection = select(snapshot, request, now)
    if not cutter.is_ready(tables, selection.cuts):
        return None
    kept, roots = snapshot.sessions.keys() - selection.sessions, roots_of(request)
    tables.leaves_traces()
    _remove(tables, selection)
    _disown(tables, snapshot, selection)
    cuts = cutter.put(tables, selection.cuts, owner=next(iter(selection.sessions), ""))
    let_go_of_unclaimed(tables)
    _remove_records(tables, snapshot, selection, request, now)
    for plan in tables.saves():
        if request.everything or request.model == plan.model != "" or plan.root in roots:
            abort(tables, plan)
    remove_turns(tables, (pair for pair in turns(tables) if _goes(pair[1], kept, selection, request, roots, now)))
    return _told(selection, cuts, dry_run=False)


def _goes(
    turn: TurnRow,
    kept: Collection[str],
    selection: Selection,
    request: PurgeRequest,
    roots: Set[bytes],
    now: float,
) -> bool:
    """What a model sampled is gone with its conversation: the first turn of one that goes on is not old.

    What belongs to no conversation yet may belong to the one that goes.
    """
    if request.older_than_s is not None and turn.at < now - request.older_than_s:
        return turn.session not in kept
    of_session = turn.session in selection.sessions or (bool(request.session) and not turn.session)
    return request.everything or of_session or request.model == turn.model != "" or turn.root in roots


def _of_model(snapshot: Snapshot, model: str) -> Selection:
    segments = {row.id for row in snapshot.segments.values() if row.model == model}
    sessions = {row.id for row in snapshot.sessions.values() if row.model == model}
    quarantined = {row.id for row in snapshot.quarantined.values() if row.model == model}
    return _measured(snapshot, sessions, segments, quarantined)


def _of_roots(snapshot: Snapshot, roots: Set[bytes]) -> Selection:
    """With all that was set aside: whose that was can no longer be told for sure."""
    segments = {row.id for row in snapshot.segments.values() if row.root in roots}
    sessions = {row.id for row in snapshot.sessions.values() if row.root in roots}
    return _measured(snapshot, sessions, segments, set(snapshot.quarantined))


def _older_than(snapshot: Snapshot, before: float) -> Selection:
    """Conversations, and what belongs to none, last used before then."""
    old = {row.id for row in snapshot.sessions.values() if row.last_used < before}
    selection = _of_sessions(snapshot, old)
    kept = set(reach(snapshot, snapshot.sessions.keys() - old))
    young = {row.id for row in snapshot.segments.values() if _last_used(snapshot, row.id) >= before}
    kept |= {link.id for segment_id in young - selection.segments for link in snapshot.path(segment_id)}
    quarantined = {row.id for row in snapshot.quarantined.values() if row.at < before}
    segments = selection.segments | (snapshot.segments.keys() - kept)
    return _measured(snapshot, old, segments, quarantined, selection.cuts)


def _last_used(snapshot: Snapshot, segment_id: str) -> float:
    return max(snapshot.segments[segment_id].created, snapshot.usage[segment_id].last_used)


def _of_sessions(snapshot: Snapshot, sessions: set[str]) -> Selection:
    """Their paths, abandoned branches of those, and what else they wrote, but for what other conversations stand on."""
    needed, own = reach(snapshot, snapshot.sessions.keys() - sessions), reach(snapshot, sessions)
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
    return _measured(snapshot, sessions, (own.keys() | wrote | beyond) - needed.keys(), quarantined, cuts)


def _measured(
    snapshot: Snapshot,
    sessions: set[str],
    segments: Set[str],
    quarantined: set[str],
    cuts: dict[str, int] | None = None,
) -> Selection:
    gone, cuts = _with_descendants(snapshot, segments), cuts or {}
    checkpoints = {
        row.id
        for row in snapshot.checkpoints.values()
        if row.segment in gone or row.position > cuts.get(row.segment, inf)
    }
    lost = {row.id for row in snapshot.sessions.values() if gone.issuperset(reach(snapshot, [row.id]))}
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
        cuts=cuts,
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
    for file_id in (*selection.segments, *selection.checkpoints):
        drop(tables, file_id, "")
    for row in tables.quarantined():
        if row.id in selection.quarantined:
            tables.remove_quarantined(row)
            tables.doom(row.id, row.bytes_on_disk)
    for key, _ in list(tables.items("gone")):
        tables.delete("gone", key)  # each holds a token


def _disown(tables: Tables, snapshot: Snapshot, selection: Selection) -> None:
    """What they wrote and others stand on has no name of theirs any more."""
    for row in snapshot.segments.values():
        if row.session in selection.sessions and row.id not in selection.segments:
            tables.update_segment(msgspec.structs.replace(row, session=""))


def _remove_records(
    tables: Tables, snapshot: Snapshot, selection: Selection, request: PurgeRequest, now: float
) -> None:
    """Of requests, those of what goes, whether or not anything was stored of them."""
    rows: list[SegmentRow | SessionRow] = [*snapshot.segments.values(), *snapshot.sessions.values()]
    roots = {row.root for row in rows if row.model == request.model != ""} | roots_of(request)
    kept = snapshot.sessions.keys() - selection.sessions
    before = -inf if request.older_than_s is None else now - request.older_than_s
    for key, record in tables.requests():
        of_it = record.session in selection.sessions or record.root in roots
        if request.everything or of_it or (record.at < before and record.session not in kept):
            tables.delete("requests", key)
        elif record.parting is not None:  # it tells what others' prompts said, too
            tables.put_request(key, msgspec.structs.replace(record, parting=None))
