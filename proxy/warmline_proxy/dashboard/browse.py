"""Paged queries of the dashboard over stored conversations and answered requests.

The index is summarized on a thread, once per change; after bookkeeping alone (hits, times), every few seconds.
"""

import asyncio
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import msgspec
from aiohttp import web

from warmline_common.protocol.messages import convert
from warmline_proxy.admin.owners import OwnerResolver
from warmline_proxy.auth.owners import OwnerLabels
from warmline_proxy.dashboard.aggregates import ConversationSummary, IndexSummary, SegmentRun, summarize_index
from warmline_proxy.dashboard.history import RequestHistory, build_history
from warmline_proxy.errors import bad_request
from warmline_proxy.http.bodies import json_response
from warmline_proxy.index.index import Index
from warmline_proxy.store.rows import RequestRecord, SessionRow

PAGE_MAX = 200
NUMBER_DIGITS_MAX = 9
PAGE_DEFAULT = 50
OFFSET_MAX = 100_000_000
NODE_SESSIONS_MAX = 5  # per node
BOOKKEEPING_AGE_S = 5.0
RECORDS_MAX = 1000


class RequestSummary(msgspec.Struct, kw_only=True):
    """A record without private or long fields, which only the explanation has."""

    id: str
    at: float
    endpoint: str
    client_model: str
    session: str
    title: str = ""  # of the stored conversation
    client: str = ""  # the client's name of it
    created: float = 0.0  # of the stored conversation
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
    expected_ttft_s: float
    total_s: float
    decode_tokens_per_s: float
    error: str
    dispatches: int
    audit: str
    guard: str
    cause: str = ""  # likeliest cause of the miss, if known


class ActivityReply(msgspec.Struct, kw_only=True):
    """GET /warmline/activity?offset&count."""

    history: RequestHistory  # of all records
    requests: list[RequestSummary]  # newest first
    offset: int
    total: int


class RequestsReply(msgspec.Struct, kw_only=True):
    """GET /warmline/requests?count=N."""

    requests: list[RequestRecord]  # newest first


class SessionSummary(msgspec.Struct, kw_only=True):
    id: str
    title: str
    client: str  # the client's name
    model: str
    key: str  # owner label
    tokens: int
    bytes: int  # all files of its path
    bytes_alone: int  # files of no other conversation
    segments: int
    requests: int
    hits: int
    created: float
    last_used: float
    pinned: bool
    pinned_all: bool  # segments stored since pinning included


class SessionsReply(msgspec.Struct, kw_only=True):
    """GET /warmline/sessions?offset&count&sort&q."""

    sessions: list[SessionSummary]
    offset: int
    matching: int
    total: int


class NodeSession(msgspec.Struct, kw_only=True):
    """A conversation that ends at a node."""

    id: str
    title: str
    client: str
    created: float


class TreeNode(msgspec.Struct, kw_only=True):
    """A `SegmentRun` in JSON."""

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
    ending: list[NodeSession]  # last used first, at most NODE_SESSIONS_MAX
    sessions_ending: int
    sessions_below: int  # ending in the subtree
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
    """GET /warmline/path?session or ?segment: nodes from the namespace to its end."""

    nodes: list[TreeNode]
    tokens: int


RUN_FIELDS = (
    *("id", "root", "model", "start", "end", "hits", "last_used", "pinned", "checkpoints"),
    *("sessions_below", "segments_below", "bytes_below"),
)
SESSION_ROW_FIELDS = ("id", "title", "client", "model", "tokens", "requests", "hits", "created", "last_used", "pinned")
SORT_KEYS: dict[str, Callable[[ConversationSummary], Any]] = {
    "title": lambda each: (each.row.label.casefold(), each.row.created),
    "client": lambda each: (each.row.client.casefold(), each.row.created),
    "model": lambda each: each.row.model.casefold(),
    "tokens": attrgetter("row.tokens"),
    "bytes": attrgetter("bytes_path"),
    "bytes_alone": attrgetter("bytes_alone"),
    **{name: attrgetter(f"row.{name}") for name in ("requests", "hits", "created", "last_used")},
}
SORT_CHOICES = (*SORT_KEYS, *(f"-{name}" for name in SORT_KEYS))


class BrowseRoutes:
    """Handlers and their cached summary.  Event loop thread."""

    def __init__(self, index: Index, owner_resolver: OwnerResolver) -> None:
        self._index, self._owner_resolver = index, owner_resolver
        self._build_lock = asyncio.Lock()
        self._cache: _SummaryCache | None = None

    async def get_requests(self, request: web.Request) -> web.Response:
        count = _parse_number(request, "count", RECORDS_MAX, RECORDS_MAX)
        records = await asyncio.to_thread(self._index.requests, count)
        return json_response(RequestsReply(requests=[_strip_divergence_text(record) for record in records]))

    async def get_activity(self, request: web.Request) -> web.Response:
        offset, count = _parse_page(request)
        owner_labels = await self._owner_resolver.resolve_owners()
        return json_response(await asyncio.to_thread(self._build_activity, offset, count, owner_labels))

    def _build_activity(self, offset: int, count: int, owner_labels: OwnerLabels) -> ActivityReply:
        records = self._index.requests()
        page = records[offset : offset + count]
        session_by_id = {each: self._index.session(each) for each in {record.session for record in page} if each}
        history = build_history(records, time.time())
        requests = [_build_request_summary(each, session_by_id.get(each.session), owner_labels) for each in page]
        return ActivityReply(history=history, requests=requests, offset=offset, total=len(records))

    async def get_sessions(self, request: web.Request) -> web.Response:
        offset, count = _parse_page(request)
        if (sort := request.query.get("sort", "-last_used")) not in SORT_CHOICES:
            choices = ", ".join(SORT_CHOICES)
            raise bad_request(f"sort must be one of {choices}, not {sort[:40]!r}.", param="sort")
        search_text = request.query.get("q", "").strip().casefold()
        cache = await self._load_summary()
        return json_response(await asyncio.to_thread(_build_sessions_reply, cache, offset, count, sort, search_text))

    async def get_tree(self, request: web.Request) -> web.Response:
        offset, count = _parse_page(request)
        node_id = request.query.get("parent") or request.query.get("root") or ""
        cache = await self._load_summary()
        return json_response(await asyncio.to_thread(_build_tree_reply, cache, node_id, offset, count))

    async def get_path(self, request: web.Request) -> web.Response:
        session, segment = request.query.get("session", ""), request.query.get("segment", "")
        if bool(session) == bool(segment):
            raise bad_request("Name either a session or a segment.", param="session")
        cache = await self._load_summary()
        conversation = cache.summary.conversations.get(session)
        run = cache.summary.run_by_segment.get(conversation.row.leaf if conversation else segment)
        if run is None:
            raise bad_request(f"{(session or segment)[:40]!r} is not stored.", status=404, code="not_stored")
        nodes = [_build_node(cache, step) for step in run.path_from_root()]
        return json_response(PathReply(nodes=nodes, tokens=conversation.row.tokens if conversation else run.end))

    async def _load_summary(self) -> "_SummaryCache":
        """The cached summary while fresh, else a new summary, built once for concurrent callers."""
        async with self._build_lock:
            if self._cache is None or not self._cache.is_fresh(self._index):
                self._cache = await asyncio.to_thread(_SummaryCache, self._index)
            self._cache.owner_labels = await self._owner_resolver.resolve_owners()
            return self._cache


class _SummaryCache:
    """Index summary with the index's counters at its start.  Built on a thread."""

    def __init__(self, index: Index) -> None:
        self.change_count, self.flush_count, self.built_at = index.change_count, index.flush_count, time.monotonic()
        self.summary: IndexSummary = summarize_index(index.snapshot())
        self.owner_labels = OwnerLabels()  # resolved at each use

    def is_fresh(self, index: Index) -> bool:
        if index.change_count != self.change_count:
            return False
        return index.flush_count == self.flush_count or time.monotonic() - self.built_at < BOOKKEEPING_AGE_S


def _parse_page(request: web.Request) -> tuple[int, int]:
    """(offset, count).  Raises ClientError 400."""
    return _parse_number(request, "offset", 0, OFFSET_MAX), _parse_number(request, "count", PAGE_DEFAULT, PAGE_MAX)


def _build_request_summary(record: RequestRecord, session: SessionRow | None, owners: OwnerLabels) -> RequestSummary:
    line = convert(record, RequestSummary, from_attributes=True)
    if session:
        line.title, line.client, line.created = session.title, session.client, session.created
    line.key = owners.format_key_name(record)
    line.cause = record.parting.cause if record.parting else ""
    return line


def _build_sessions_reply(cache: _SummaryCache, offset: int, count: int, sort: str, search_text: str) -> SessionsReply:
    conversations = cache.summary.conversations.values()
    matching = [each for each in conversations if not search_text or _matches_search(each, cache, search_text)]
    matching.sort(key=lambda each: each.row.id)
    matching.sort(key=SORT_KEYS[sort.removeprefix("-")], reverse=sort.startswith("-"))
    page = [_build_session_summary(each, cache) for each in matching[offset : offset + count]]
    return SessionsReply(sessions=page, offset=offset, matching=len(matching), total=len(conversations))


def _matches_search(conversation: ConversationSummary, cache: _SummaryCache, search_text: str) -> bool:
    """True if the session's id, its names or its key's name contain the text."""
    row = conversation.row
    names = (row.id, row.title, row.client, row.model, cache.owner_labels.find_label(row.root))
    return any(search_text in name.casefold() for name in names)


def _build_session_summary(conversation: ConversationSummary, cache: _SummaryCache) -> SessionSummary:
    row = conversation.row
    return SessionSummary(
        **{name: getattr(row, name) for name in SESSION_ROW_FIELDS},
        key=cache.owner_labels.find_label(row.root),
        bytes=conversation.bytes_path,
        bytes_alone=conversation.bytes_alone,
        segments=conversation.segments,
        pinned_all=conversation.pinned,
    )


def _build_tree_reply(cache: _SummaryCache, node_id: str, offset: int, count: int) -> TreeReply:
    """Raises ClientError 404."""
    parent = cache.summary.runs.get(node_id) or cache.summary.run_by_segment.get(node_id)
    if node_id and parent is None:
        raise bad_request(f"{node_id[:40]!r} is not stored.", status=404, code="not_stored", param="parent")
    nodes = parent.children if parent else cache.summary.roots
    page = [_build_node(cache, run) for run in nodes[offset : offset + count]]
    return TreeReply(parent=parent.id if parent else "", nodes=page, offset=offset, total=len(nodes))


def _build_node(cache: _SummaryCache, run: SegmentRun) -> TreeNode:
    return TreeNode(
        **{name: getattr(run, name) for name in RUN_FIELDS},
        key=cache.owner_labels.words.get(run.root, ""),
        segments=len(run.segments),
        bytes=run.bytes_own,
        ending=[convert(row, NodeSession, from_attributes=True) for row in run.sessions[:NODE_SESSIONS_MAX]],
        sessions_ending=len(run.sessions),
        children=len(run.children),
        place=run.sibling_index,
    )


def _strip_divergence_text(record: RequestRecord) -> RequestRecord:
    """Copy of a record without prompt text, which only /warmline/explain returns."""
    if record.parting is None:
        return record
    stripped = msgspec.structs.replace(record.parting, stored=b"", prompt=b"", stored_text="", prompt_text="")
    return msgspec.structs.replace(record, parting=stripped)


def _parse_number(request: web.Request, name: str, default: int, maximum: int) -> int:
    """Integer from 0 to `maximum`.  Raises ClientError 400."""
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) <= NUMBER_DIGITS_MAX and int(text) <= maximum):
        raise bad_request(f"{name} must be a whole number from 0 to {maximum}, not {text[:40]!r}.", param=name)
    return int(text)
