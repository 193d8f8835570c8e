"""What the dashboard asks of what is stored and what was answered, a page at a time however much there is.

The index is added up on a thread, once a change; bookkeeping alone (hits, times of use) is looked at again when it is a
few seconds old.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from warmline_proxy.admin.owners import Attribution
from warmline_proxy.admin.query import number, one_of
from warmline_proxy.admin.routes import Paths
from warmline_proxy.auth.owners import Whose
from warmline_proxy.dashboard.aggregates import Census, Conversation, Run, census
from warmline_proxy.dashboard.history import History, history
from warmline_proxy.errors import bad_request
from warmline_proxy.http.bodies import json_answer
from warmline_proxy.index.index import Index
from warmline_proxy.store.rows import RequestRecord, SessionRow

PAGE_MAX = 200
PAGE_DEFAULT = 50
OFFSET_MAX = 100_000_000
LABELS_MAX = 5  # conversations that a node names
BOOKKEEPING_AGE_S = 5.0


class RequestLine(msgspec.Struct, kw_only=True):
    """A record without what is private or long: what was stored and sent is in the explanation."""

    id: str
    at: float
    endpoint: str
    client_model: str
    session: str
    client: str = ""  # what its client calls the conversation, while that is stored
    created: float = 0.0  # when that was first stored, likewise
    key: str
    outcome: str
    source: str
    why_not_warmer: str
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    saved_tokens: int
    queue_s: float
    restore_s: float
    prefill_s: float
    decode_s: float
    ttft_s: float
    total_s: float
    decode_tokens_per_s: float
    error: str
    dispatches: int
    audit: str
    guard: str
    cause: str = ""  # of the miss: the likeliest one, where that is known


class ActivityReply(msgspec.Struct, kw_only=True):
    """GET /warmline/activity?offset&count."""

    history: History  # of all records
    requests: list[RequestLine]  # newest first
    offset: int
    total: int


class SessionLine(msgspec.Struct, kw_only=True):
    id: str
    client: str  # what its client calls it
    model: str
    key: str  # whose it is, as `whose` says it
    tokens: int
    bytes: int  # of all files on its path
    bytes_alone: int  # of those that no other conversation stands on
    segments: int
    requests: int
    hits: int
    created: float
    last_used: float
    pinned: bool
    pinned_all: bool  # what was stored of it since, too


class SessionsReply(msgspec.Struct, kw_only=True):
    """GET /warmline/sessions?offset&count&sort&q."""

    sessions: list[SessionLine]
    offset: int
    matching: int
    total: int


class Ending(msgspec.Struct, kw_only=True):
    """A conversation that ends at a node."""

    id: str
    client: str
    created: float


class TreeNode(msgspec.Struct, kw_only=True):
    """See census.Run."""

    id: str
    root: str
    model: str
    key: str
    start: int
    end: int
    segments: int  # 0: a namespace
    bytes: int
    hits: int
    last_used: float
    pinned: bool
    checkpoints: int
    ending: list[Ending]  # the last used ones
    sessions_ending: int
    sessions_below: int  # those that end here or below
    segments_below: int
    bytes_below: int
    children: int
    place: int  # among its siblings


class TreeReply(msgspec.Struct, kw_only=True):
    """GET /warmline/tree?root&parent&offset&count: the children of a node, of a namespace, or the namespaces."""

    parent: str
    nodes: list[TreeNode]  # the heaviest first
    offset: int
    total: int


class PathReply(msgspec.Struct, kw_only=True):
    """GET /warmline/path?session or ?segment: from the namespace to where it ends."""

    nodes: list[TreeNode]
    tokens: int


SORTS: dict[str, Callable[[Conversation], Any]] = {
    "client": lambda each: (each.row.client.casefold(), each.row.created),
    "model": lambda each: each.row.model.casefold(),
    "tokens": lambda each: each.row.tokens,
    "bytes": lambda each: each.bytes_path,
    "bytes_alone": lambda each: each.bytes_alone,
    "requests": lambda each: each.row.requests,
    "hits": lambda each: each.row.hits,
    "created": lambda each: each.row.created,
    "last_used": lambda each: each.row.last_used,
}
SORTS_ASKED = (*SORTS, *(f"-{name}" for name in SORTS))


class Browsing:
    """Handlers.  What they keep belongs to the event loop."""

    def __init__(self, index: Index, attribution: Attribution) -> None:
        self._index, self._attribution = index, attribution
        self._building = asyncio.Lock()
        self._kept: _Kept | None = None

    @property
    def paths(self) -> Paths:
        return {
            ("GET", "/warmline/activity"): self.activity,
            ("GET", "/warmline/sessions"): self.sessions,
            ("GET", "/warmline/tree"): self.tree,
            ("GET", "/warmline/path"): self.path,
        }

    async def activity(self, request: web.Request) -> web.Response:
        offset, count = _page(request)
        known = await self._attribution.whose()
        return json_answer(await asyncio.to_thread(self._activity, offset, count, known))

    def _activity(self, offset: int, count: int, known: Whose) -> ActivityReply:
        records = self._index.requests()
        page = records[offset : offset + count]
        named = {each: self._index.session(each) for each in {record.session for record in page} if each}
        return ActivityReply(
            history=history(records, time.time()),
            requests=[_request_line(record, named.get(record.session), known) for record in page],
            offset=offset,
            total=len(records),
        )

    async def sessions(self, request: web.Request) -> web.Response:
        offset, count = _page(request)
        sort = one_of(request, "sort", "-last_used", SORTS_ASKED)
        wanted = request.query.get("q", "").strip().casefold()
        kept = await self._look()
        return json_answer(await asyncio.to_thread(_sessions, kept, offset, count, sort, wanted))

    async def tree(self, request: web.Request) -> web.Response:
        offset, count = _page(request)
        asked = request.query.get("parent") or request.query.get("root") or ""
        kept = await self._look()
        return json_answer(await asyncio.to_thread(_tree, kept, asked, offset, count))

    async def path(self, request: web.Request) -> web.Response:
        session, segment = request.query.get("session", ""), request.query.get("segment", "")
        if bool(session) == bool(segment):
            raise bad_request("Name either a session or a segment.", param="session")
        kept = await self._look()
        found = kept.census.conversations.get(session)
        run = kept.census.run_of.get(found.row.leaf if found else segment)
        if run is None:
            raise bad_request(f"{(session or segment)[:40]!r} is not stored.", status=404, code="not_stored")
        nodes = [_node(kept, step) for step in run.path()]
        return json_answer(PathReply(nodes=nodes, tokens=found.row.tokens if found else run.end))

    async def _look(self) -> "_Kept":
        """What was last added up, where that still holds; one at a time."""
        async with self._building:
            if self._kept is None or not self._kept.holds(self._index):
                self._kept = await asyncio.to_thread(_Kept, self._index)
            self._kept.whose = await self._attribution.whose()
            return self._kept


class _Kept:
    """A census, and of when it is.  Made on a thread."""

    def __init__(self, index: Index) -> None:
        self.changes, self.bookkept, self.at = index.changes, index.bookkept, time.monotonic()
        self.census: Census = census(index.snapshot())
        self.whose = Whose()  # at the last look

    def holds(self, index: Index) -> bool:
        if index.changes != self.changes:
            return False
        return index.bookkept == self.bookkept or time.monotonic() - self.at < BOOKKEEPING_AGE_S


def _page(request: web.Request) -> tuple[int, int]:
    """(offset, count).  Raises ClientError 400."""
    return number(request, "offset", 0, OFFSET_MAX), number(request, "count", PAGE_DEFAULT, PAGE_MAX)


def _request_line(record: RequestRecord, session: SessionRow | None, known: Whose) -> RequestLine:
    line = msgspec.convert(record, RequestLine, from_attributes=True)
    if session:
        line.client, line.created = session.client, session.created
    line.key = known.shown(record)
    line.cause = record.parting.cause if record.parting else ""
    return line


def _sessions(kept: _Kept, offset: int, count: int, sort: str, wanted: str) -> SessionsReply:
    every = kept.census.conversations.values()
    matching = [each for each in every if not wanted or _matches(each, kept, wanted)]
    matching.sort(key=lambda each: each.row.id)
    matching.sort(key=SORTS[sort.removeprefix("-")], reverse=sort.startswith("-"))
    return SessionsReply(
        sessions=[_session_line(each, kept) for each in matching[offset : offset + count]],
        offset=offset,
        matching=len(matching),
        total=len(every),
    )


def _matches(each: Conversation, kept: _Kept, wanted: str) -> bool:
    """In its id, its names, or the name of its key."""
    names = (each.row.id, each.row.client, each.row.model, kept.whose.word(each.row.root))
    return any(wanted in name.casefold() for name in names)


def _session_line(each: Conversation, kept: _Kept) -> SessionLine:
    row = each.row
    return SessionLine(
        id=row.id,
        client=row.client,
        model=row.model,
        key=kept.whose.word(row.root),
        tokens=row.tokens,
        bytes=each.bytes_path,
        bytes_alone=each.bytes_alone,
        segments=each.segments,
        requests=row.requests,
        hits=row.hits,
        created=row.created,
        last_used=row.last_used,
        pinned=row.pinned,
        pinned_all=each.pinned,
    )


def _tree(kept: _Kept, asked: str, offset: int, count: int) -> TreeReply:
    """Raises ClientError 404."""
    above = kept.census.runs.get(asked) or kept.census.run_of.get(asked)
    if asked and above is None:
        raise bad_request(f"{asked[:40]!r} is not stored.", status=404, code="not_stored", param="parent")
    nodes = above.children if above else kept.census.roots
    shown = [_node(kept, run) for run in nodes[offset : offset + count]]
    return TreeReply(parent=above.id if above else "", nodes=shown, offset=offset, total=len(nodes))


def _node(kept: _Kept, run: Run) -> TreeNode:
    return TreeNode(
        id=run.id,
        root=run.root,
        model=run.model,
        key=kept.whose.words.get(run.root, ""),
        start=run.start,
        end=run.end,
        segments=len(run.segments),
        bytes=run.bytes_own,
        hits=run.hits,
        last_used=run.last_used,
        pinned=run.pinned,
        checkpoints=run.checkpoints,
        ending=[Ending(id=row.id, client=row.client, created=row.created) for row in run.ending[:LABELS_MAX]],
        sessions_ending=len(run.ending),
        sessions_below=run.sessions_below,
        segments_below=run.segments_below,
        bytes_below=run.bytes_below,
        children=len(run.children),
        place=run.place,
    )
