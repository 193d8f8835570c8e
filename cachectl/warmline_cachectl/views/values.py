"""Views as plain values, which --json prints: pure functions over a snapshot of the index."""

import re
from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import Any

import msgspec

from warmline_cachectl.views.tree import Forest
from warmline_proxy.explain.causes import NEW_TEXT, find_cause
from warmline_proxy.retention.pin import count_bytes
from warmline_proxy.store.rows import IndexSnapshot, RequestRecord, SegmentRow, SessionRow, Totals

View = dict[str, Any]


def build_conversations(forest: Forest, now: float) -> View:
    """All conversations, last used first, and the quarantined files.

    `bytes_alone` and `bytes_shared` are those of conversations, shared files counted once; `bytes_unlisted` are those
    of files that belong to no conversation.
    """
    rows = sorted(forest.snapshot.sessions.values(), key=lambda row: -row.last_used)
    sizes = Counter[str]()
    for segment in forest.snapshot.segments.values():
        users = forest.session_counts[segment.id]
        sizes["shared" if users > 1 else "alone" if users else "unlisted"] += forest.total_bytes(segment)
    return {
        "sessions": [_session_row(forest, row, now) for row in rows],
        **{f"bytes_{kind}": sizes[kind] for kind in ("alone", "shared", "unlisted")},
        "quarantined": [msgspec.to_builtins(row) for row in forest.snapshot.quarantined.values()],
    }


def build_conversation(forest: Forest, session_id: str, now: float) -> View:
    """A conversation with its path of segments, root first."""
    row = forest.snapshot.sessions[session_id]
    links = forest.snapshot.segment_path(row.leaf)
    return {
        "session": _session_row(forest, row, now),
        "path": [_segment_row(forest, link) | {"shared": forest.session_counts[link.id] > 1} for link in links],
    }


def build_file(forest: Forest, kind: str, file_id: str) -> View:
    """Row of a segment, checkpoint or quarantined file."""
    snapshot = forest.snapshot
    if kind == "checkpoint":
        return {kind: _to_builtins(snapshot.checkpoints[file_id])}
    if kind == "quarantined":
        return {kind: _to_builtins(snapshot.quarantined[file_id])}
    row, sessions = snapshot.segments[file_id], snapshot.sessions.values()
    users = [each.id for each in sessions if file_id in {link.id for link in snapshot.segment_path(each.leaf)}]
    relations = {
        "key": forest.owner_labels.find_label(row.root),
        "children": sorted(child.id for child in forest.children.get(file_id, ())),
        "sessions": sorted(users),
    }
    return {kind: _segment_row(forest, row) | relations}


def build_listing(forest: Forest, now: float) -> View:
    """Short rows of the conversations, last used first, and the sums of all."""
    names = ["id", "key", "model", "tokens", "bytes", "bytes_alone", "bytes_shared"]
    names += ["pinned", "last_used", "idle_s", "title", "client"]
    view = build_conversations(forest, now)
    del view["quarantined"]
    return {**view, "sessions": [{name: row[name] for name in names} for row in view["sessions"]]}


def build_segments(forest: Forest, session_id: str) -> View:
    """Short rows of a conversation's segments, root first."""
    links = forest.snapshot.segment_path(forest.snapshot.sessions[session_id].leaf)
    return {
        "session": session_id,
        "segments": [
            {
                "id": link.id,
                "start": link.start,
                "end": link.end,
                "bytes": forest.total_bytes(link),
                "checkpoints": len(forest.checkpoints.get(link.id, ())),
                "shared": forest.session_counts[link.id] > 1,
                "pinned": link.pinned,
            }
            for link in links
        ],
    }


def build_stats(totals: Totals, requests: list[RequestRecord], snapshot: IndexSnapshot) -> View:
    """Statistics of the disk and of the last requests."""
    answered = [record for record in requests if record.outcome != "error"]
    names = [f"{kind}_tokens" for kind in ("prompt", "cached", "prefilled", "generated", "saved")]
    tokens = {name: sum(getattr(record, name) for record in requests) for name in names}
    prompt = tokens["prompt_tokens"] = sum(record.reached_tokens for record in requests)
    pinned = {row.id for row in snapshot.segments.values() if row.pinned}
    return {
        "stored": _to_builtins(totals)
        | {"bytes_used": totals.bytes_used, "bytes_pinned": count_bytes(snapshot, pinned)},
        "requests": {
            "count": len(requests),
            "outcomes": _count_values(record.outcome for record in requests),
            "sources": _count_values(record.source for record in answered),
            **tokens,
            "cached_share": tokens["cached_tokens"] / prompt if prompt else 0.0,
            "ttft_median_s": median(record.ttft_s for record in answered) if answered else 0.0,
            "audits": _count_values(record.audit for record in requests if record.audit),
            "collapsed_answers": _count_values(record.guard for record in requests if record.guard),
            "why_not_warmer": _count_values(normalize_reason(record) for record in requests if _is_miss(record)),
        },
    }


def _is_miss(record: RequestRecord) -> bool:
    """True where more might have been reused: text that was never sent before can't be."""
    return bool(record.why_not_warmer) and find_cause(record.why_not_warmer, record.parting) != NEW_TEXT


def _count_values(values: Iterable[str]) -> dict[str, int]:
    """Count of each value, the commonest first."""
    return dict(Counter(values).most_common())


def _session_row(forest: Forest, row: SessionRow, now: float) -> View:
    links = forest.snapshot.segment_path(row.leaf)
    weights = {link.id: forest.total_bytes(link) for link in links}
    left_at = zip(links, [link.start for link in links[1:]] + [link.end for link in links[-1:]], strict=True)
    passed = [
        state.id for link, upto in left_at for state in forest.checkpoints.get(link.id, ()) if state.position <= upto
    ]
    return {
        "id": row.id,
        "key": forest.owner_labels.find_label(row.root),
        "model": row.model,
        "title": row.title,
        "client": row.client,
        "tokens": row.tokens,
        "bytes": sum(weights.values()),
        "bytes_alone": sum(size for link, size in weights.items() if forest.session_counts[link] == 1),
        "bytes_shared": sum(size for link, size in weights.items() if forest.session_counts[link] > 1),
        "segments": len(links),
        "checkpoints": len(passed),
        "requests": row.requests,
        "hits": row.hits,
        "created": row.created,
        "last_used": row.last_used,
        "age_s": max(0.0, now - row.created),
        "idle_s": max(0.0, now - row.last_used),
        "leaf": row.leaf,
        "pinned": row.pinned,
    }


def _segment_row(forest: Forest, row: SegmentRow) -> View:
    usage = forest.snapshot.usage[row.id]
    return _to_builtins(row) | {
        "hits": usage.hits,
        "last_used": max(row.created, usage.last_used),
        "checkpoints": [_to_builtins(state) for state in forest.checkpoints.get(row.id, ())],
    }


def _to_builtins(row: msgspec.Struct) -> View:
    return {
        name: value.hex() if isinstance(value, bytes) else value for name, value in msgspec.structs.asdict(row).items()
    }


def normalize_reason(record: RequestRecord) -> str:
    """Reason why a request was not warmer, with N for numbers and ID for ids, so that reasons can be counted."""
    without_ids = re.sub(r"\b[0-9a-f]{8}([0-9a-f]{24})?\b", "ID", record.why_not_warmer)
    return re.sub(r"\b\d+\b", "N", without_ids)
