"""What cachectl shows, as plain values (what --json prints): pure functions over a snapshot of the index."""

import re
from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

import msgspec

from warmline_proxy.rows import CheckpointRow, RequestRecord, SegmentRow, SessionRow, Snapshot, Totals

View = dict[str, Any]
REPLAYED_WRONG = ("differs", "unstable", "damaged")
ID_PREFIX_MIN = 4


class Ambiguous(Exception):
    """More than one thing begins with what was typed."""


def resolve(snapshot: Snapshot, typed: str) -> tuple[str, str]:
    """(kind, full id) of what an id or a unique beginning of one names; ("", "") where there is none."""
    kinds: dict[str, Mapping[str, object]] = {
        "session": snapshot.sessions,
        "segment": snapshot.segments,
        "checkpoint": snapshot.checkpoints,
        "quarantined": snapshot.quarantined,
    }
    exact = [(kind, typed) for kind, rows in kinds.items() if typed in rows]
    if exact or len(typed) < ID_PREFIX_MIN:
        return exact[0] if exact else ("", "")
    found = [(kind, row_id) for kind, rows in kinds.items() for row_id in rows if row_id.startswith(typed)]
    if len(found) > 1:
        raise Ambiguous(f"{typed} may be any of {', '.join(row_id for _, row_id in found[:5])}")
    return found[0] if found else ("", "")


def conversations(snapshot: Snapshot, now: float) -> View:
    """All of them, last used first, and what is in quarantine."""
    users = Counter(link.id for row in snapshot.sessions.values() for link in snapshot.path(row.leaf))
    rows = sorted(snapshot.sessions.values(), key=lambda row: -row.last_used)
    return {
        "sessions": [_session(snapshot, row, users, now) for row in rows],
        "quarantined": [msgspec.to_builtins(row) for row in snapshot.quarantined.values()],
    }


def conversation(snapshot: Snapshot, session_id: str, now: float) -> View:
    """One with its path, root first."""
    row = snapshot.sessions[session_id]
    users = Counter(link.id for other in snapshot.sessions.values() for link in snapshot.path(other.leaf))
    links = snapshot.path(row.leaf)
    return {
        "session": _session(snapshot, row, users, now),
        "path": [_segment(snapshot, link) | {"shared": users[link.id] > 1} for link in links],
    }


def segment(snapshot: Snapshot, segment_id: str) -> View:
    row = snapshot.segments[segment_id]
    return {
        "segment": _segment(snapshot, row)
        | {
            "children": sorted(other.id for other in snapshot.segments.values() if other.parent == segment_id),
            "sessions": sorted(
                session.id
                for session in snapshot.sessions.values()
                if segment_id in {link.id for link in snapshot.path(session.leaf)}
            ),
        }
    }


def checkpoint(snapshot: Snapshot, checkpoint_id: str) -> View:
    return {"checkpoint": _plain(snapshot.checkpoints[checkpoint_id])}


def quarantined(snapshot: Snapshot, file_id: str) -> View:
    return {"quarantined": _plain(snapshot.quarantined[file_id])}


def stats(totals: Totals, requests: list[RequestRecord]) -> View:
    """What is on disk, and how the last requests went."""
    answered = [record for record in requests if record.outcome != "error"]
    prompt = sum(record.prompt_tokens for record in requests)
    cached = sum(record.cached_tokens for record in requests)
    return {
        "stored": _plain(totals) | {"bytes_used": totals.bytes_used},
        "requests": {
            "count": len(requests),
            "outcomes": dict(Counter(record.outcome for record in requests)),
            "sources": dict(Counter(record.source for record in answered)),
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "prefilled_tokens": sum(record.prefilled_tokens for record in requests),
            "generated_tokens": sum(record.generated_tokens for record in requests),
            "saved_tokens": sum(record.saved_tokens for record in requests),
            "cached_share": cached / prompt if prompt else 0.0,
            "ttft_median_s": median(record.ttft_s for record in answered) if answered else 0.0,
            "audits": dict(Counter(record.audit for record in requests if record.audit)),
            "collapsed_answers": dict(Counter(record.guard for record in requests if record.guard)),
            "why_not_warmer": dict(Counter(_reason(record) for record in requests if record.why_not_warmer)),
        },
    }


def _session(snapshot: Snapshot, row: SessionRow, users: Counter[str], now: float) -> View:
    links = snapshot.path(row.leaf)
    states = {link.id: _checkpoints(snapshot, link) for link in links}
    weights = {link.id: link.bytes_on_disk + sum(state.bytes_on_disk for state in states[link.id]) for link in links}
    return {
        "id": row.id,
        "model": row.model,
        "client": row.client,
        "tokens": row.tokens,
        "bytes": sum(weights.values()),
        "bytes_alone": sum(size for link, size in weights.items() if users[link] == 1),  # what no other one shares
        "segments": len(links),
        "checkpoints": sum(state.position <= upto for link, upto in _left_at(links) for state in states[link.id]),
        "requests": row.requests,
        "hits": row.hits,
        "created": row.created,
        "last_used": row.last_used,
        "age_s": max(0.0, now - row.created),
        "idle_s": max(0.0, now - row.last_used),
        "leaf": row.leaf,
    }


def _left_at(links: list[SegmentRow]) -> list[tuple[SegmentRow, int]]:
    """Each with where the next one leaves it."""
    return list(zip(links, [link.start for link in links[1:]] + [link.end for link in links[-1:]], strict=True))


def _checkpoints(snapshot: Snapshot, row: SegmentRow) -> list[CheckpointRow]:
    found = (state for state in snapshot.checkpoints.values() if state.segment == row.id)
    return sorted(found, key=lambda state: state.position)


def _segment(snapshot: Snapshot, row: SegmentRow) -> View:
    usage = snapshot.usage[row.id]
    return _plain(row) | {
        "hits": usage.hits,
        "last_used": max(row.created, usage.last_used),
        "checkpoints": [_plain(state) for state in _checkpoints(snapshot, row)],
    }


def _plain(row: msgspec.Struct) -> View:
    return {
        name: value.hex() if isinstance(value, bytes) else value for name, value in msgspec.structs.asdict(row).items()
    }


def _reason(record: RequestRecord) -> str:
    """With N for every number and ID for every file, so that reasons can be counted."""
    without_ids = re.sub(r"\b[0-9a-f]{8}([0-9a-f]{24})?\b", "ID", record.why_not_warmer)
    return re.sub(r"\b\d+\b", "N", without_ids)
