"""Views as tables and lines for people, no wider than their terminal."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.table import Table

from warmline_cachectl.views.columns import Column, fit_table, printable
from warmline_proxy.store.rows import GcReply, IndexFinding, PinReply, PurgeReply, ReplayResult

WIDTH_PIPED = 160  # where no terminal says how wide it is

Renderables = Iterable[Table | str]

STORED_LABELS = {  # of `stats`, in its order
    "sessions": "conversations",
    "segments": "segments",
    "checkpoints": "checkpoints",
    "tokens": "tokens",
    "bytes_used": "used on disk",
    "bytes_segments": "  segments",
    "bytes_checkpoints": "  checkpoints",
    "bytes_quarantined": "  in quarantine",
    "bytes_writing": "  being written",
    "bytes_doomed": "  about to be deleted",
    "bytes_index": "  the index",
    "bytes_pinned": "pinned, of that",
    "quarantined": "files in quarantine",
    "turns": "recorded tool calls",
    "responses": "stored responses",
    "bytes_responses": "  of the index",
}
REQUEST_LABELS = {
    "count": "requests",
    "outcomes": "how they ended",
    "sources": "where they started",
    "prompt_tokens": "prompt tokens",
    "cached_tokens": "  reused",
    "prefilled_tokens": "  computed",
    "generated_tokens": "generated tokens",
    "saved_tokens": "tokens saved to disk",
    "cached_share": "share of prompts reused",
    "ttft_median_s": "median time to first token",
    "audits": "audits",
    "collapsed_answers": "answers that collapsed",
    "why_not_warmer": "why not warmer",
}


def make_console() -> Console:
    """Console without markup and emoji: clients' names of conversations are plain text."""
    out = Console(highlight=False, markup=False, emoji=False)
    if not (out.is_terminal or "COLUMNS" in os.environ):
        out.width = WIDTH_PIPED
    return out


def format_size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def format_count(number: int, singular: str, plural: str = "") -> str:
    """ "1 finding", "2 findings"."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def format_files(segments: int, checkpoints: int) -> str:
    return f"{format_count(segments, 'segment')} and {format_count(checkpoints, 'checkpoint')}"


def format_age(at: float) -> str:
    """Time since `at`, in Unix seconds."""
    return f"{format_duration(max(0.0, time.time() - at))} ago"


def _format_span(row: dict[str, Any]) -> str:
    return f"{row['start']:,}-{row['end']:,}"


def _format_label(row: dict[str, Any]) -> str:
    """Title of a conversation, or else the client's name for it."""
    return str(row["title"] or row["client"])


def _format_yes(flag: bool) -> str:
    return "yes" if flag else ""


def _format_if_compared(row: ReplayResult, text: str) -> str:
    return text if row.reused and not row.detail else ""


MODEL_COLUMN = Column("model", lambda row: row["model"], 3, "text")
LISTING_COLUMNS = (
    Column("session", lambda row: row["id"], kind="id"),
    Column("key", lambda row: row["key"], 4, "text", is_optional=True),
    Column("tokens", lambda row: f"{row['tokens']:,}"),
    Column("alone", lambda row: format_size(row["bytes_alone"]), 2),
    Column("shared", lambda row: format_size(row["bytes_shared"]), 3),
    Column("idle", lambda row: format_duration(row["idle_s"])),
    Column("title", lambda row: " ".join(filter(None, (_format_label(row), row["pinned"] and "(pinned)"))), 1, "text"),
)
CONVERSATION_COLUMNS = (
    Column("session", lambda row: row["id"], kind="id"),
    Column("key", lambda row: row["key"], 4, "text", is_optional=True),
    MODEL_COLUMN,
    Column("tokens", lambda row: f"{row['tokens']:,}"),
    Column("size", lambda row: format_size(row["bytes"])),
    Column("alone", lambda row: format_size(row["bytes_alone"]), 7),
    Column("files", lambda row: f"{row['segments']}+{row['checkpoints']}", 9),
    Column("requests", lambda row: str(row["requests"]), 6),
    Column("hits", lambda row: str(row["hits"]), 5),
    Column("age", lambda row: format_duration(row["age_s"]), 8),
    Column("idle", lambda row: format_duration(row["idle_s"])),
    Column("pinned", lambda row: _format_yes(row["pinned"]), 1, "text", is_optional=True),
    Column("title", lambda row: _format_label(row), 2, "text"),
)
SEGMENT_COLUMNS = (
    Column("segment", lambda row: row["id"], kind="id"),
    Column("tokens", _format_span),
    Column("size", lambda row: format_size(row["bytes"])),
    Column("checkpoints", lambda row: str(row["checkpoints"]), 2),
    Column("", lambda row: ", ".join(name for name in ("shared", "pinned") if row[name]), 1, "text"),
)
PATH_COLUMNS = (
    Column("segment", lambda row: row["id"], kind="id"),
    Column("tokens", _format_span),
    Column("size", lambda row: format_size(row["bytes_on_disk"])),
    Column("prefill", lambda row: f"{row['prefill_s']:.1f} s", 4),
    Column("hits", lambda row: str(row["hits"]), 3),
    Column("shared", lambda row: _format_yes(row["shared"]), 2, "text"),
    Column("pinned", lambda row: _format_yes(row["pinned"]), 1, "text", is_optional=True),
    Column("checkpoints at", lambda row: ", ".join(f"{each['position']:,}" for each in row["checkpoints"]), 1, "text"),
)
QUARANTINE_COLUMNS = (
    Column("quarantined", lambda row: row["id"], kind="id"),
    Column("kind", lambda row: row["kind"], 3, "text"),
    Column("model", lambda row: row["model"], 2, "text"),
    Column("tokens", _format_span, 1),
    Column("size", lambda row: format_size(row["bytes_on_disk"]), 4),
    Column("reason", lambda row: row["reason"], kind="text"),
)
REPLAY_COLUMNS = (
    Column("session", lambda row: row.session, kind="id"),
    Column("tokens", lambda row: f"{row.tokens:,}", 3),
    Column("from disk", lambda row: f"{row.reused:,}", 1),
    Column("outcome", lambda row: row.outcome, kind="word"),
    Column("difference", lambda row: _format_if_compared(row, f"{row.difference:.2e}"), 1),
    Column("tolerance", lambda row: _format_if_compared(row, f"{row.tolerance:g}" if row.tolerance else "none"), 4),
    Column("quarantined", lambda row: str(row.quarantined or ""), 2, is_optional=True),
    Column("detail", lambda row: row.detail, kind="text", is_optional=True),
)


def render_conversations(view: dict[str, Any]) -> Renderables:
    yield from render_listing(view, CONVERSATION_COLUMNS)
    if view["quarantined"]:
        yield from fit_table(QUARANTINE_COLUMNS, view["quarantined"], make_console().width, title="Quarantine")


def render_conversation(view: dict[str, Any]) -> Renderables:
    yield from _render_sessions(CONVERSATION_COLUMNS, [view["session"]])
    yield from fit_table(PATH_COLUMNS, view["path"], make_console().width)


def render_listing(view: dict[str, Any], columns: Sequence[Column] = LISTING_COLUMNS) -> Renderables:
    """Table of conversations, and their sum: files that several of them share are in it once."""
    if MODEL_COLUMN not in columns and len({row["model"] for row in view["sessions"]}) > 1:
        columns = (*columns[:2], MODEL_COLUMN, *columns[2:])
    yield from _render_sessions(columns, view["sessions"])
    alone, shared, unlisted = (view[f"bytes_{kind}"] for kind in ("alone", "shared", "unlisted"))
    if view["sessions"]:
        others = f" + {format_size(unlisted)} of no conversation" if unlisted else ""
        total = format_size(alone + shared + unlisted)
        yield f"{format_size(alone)} alone + {format_size(shared)} shared by several{others} = {total}"


def render_segments(view: dict[str, Any]) -> Renderables:
    return fit_table(SEGMENT_COLUMNS, view["segments"], make_console().width)


def render_replays(rows: list[ReplayResult]) -> Renderables:
    yield from _render_sessions(REPLAY_COLUMNS, rows)
    yield from dict.fromkeys(row.detail for row in rows if row.detail)  # whole: they may have been cut above


def _render_sessions(columns: Sequence[Column], rows: Sequence[Any]) -> Renderables:
    return fit_table(columns, rows, make_console().width) if rows else ["no conversations"]


def render_fields(view: dict[str, Any]) -> Renderables:
    """A table for each row of the view, with a line a field."""
    for title, row in view.items():
        yield _make_field_table(title.capitalize(), row, {name: name.replace("_", " ") for name in row})


def render_stats(view: dict[str, Any]) -> Renderables:
    yield _make_field_table("On disk", view["stored"], STORED_LABELS)
    requests = {name: value for name, value in view["requests"].items() if value != {}}
    yield _make_field_table("The last requests", requests, REQUEST_LABELS)


def _make_field_table(title: str, row: Mapping[str, Any], labels: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, label in labels.items():
        if name in row:
            table.add_row(label, printable(_format_value(name, row[name])))
    return table


def render_findings(findings: list[IndexFinding], summary: str, title: str = "what") -> Renderables:
    if findings:
        table = Table(title, "id", "detail")
        for finding in findings:
            table.add_row(finding.what, finding.id, finding.detail)
        yield table
    yield summary


def format_purge(reply: PurgeReply) -> str:
    verb = "would purge" if reply.dry_run else "purged"
    cut = [each for each in reply.cuts if not each.why_not]
    parts = [
        format_count(len(reply.segments), "segment"),
        *([f"a part of {len(cut)} more"] if cut else []),
        format_count(len(reply.checkpoints), "checkpoint"),
        *([f"{len(reply.quarantined)} quarantined"] if reply.quarantined else []),
        *([format_count(reply.responses, "stored response")] if reply.responses else []),
        format_size(reply.bytes_freed),
    ]
    return f"{verb} {format_count(len(reply.sessions), 'conversation')}: {', '.join(parts)}"


def format_pin(reply: PinReply) -> str:
    what = f"{reply.session} is {'pinned' if reply.pinned else 'no longer pinned'}"
    changed = f"{format_count(len(reply.segments), 'segment')} {'more' if reply.pinned else 'fewer'}"
    now = f"{format_size(reply.bytes_pinned)} of at most {format_size(reply.bytes_pinned_max)} are pinned now"
    return f"{what}: {changed}; {now}"


def render_gc(reply: GcReply) -> Renderables:
    done = {
        "deleted": [
            (reply.orphans, "orphaned file", "orphaned files"),
            (reply.drafts, "incomplete file", ""),
            (reply.doomed, "file without a row", "files without rows"),
            (reply.records, "old record", ""),
            (reply.turns, "old recorded tool call", ""),
            (reply.responses, "old response", ""),
            (reply.notes, "stale note", "stale notes"),
        ],
        "cut": [(len([cut for cut in reply.cuts if not cut.why_not]), "segment", "")],
        "evicted": [(len(reply.evicted), "file", "")],
    }
    for verb, things in done.items():
        if counts := [format_count(number, one, many) for number, one, many in things if number]:
            yield f"{verb} {', '.join(counts)}"
    yield f"the index: {format_size(reply.bytes_index_before)}, now {format_size(reply.bytes_index_after)}"
    yield f"used on disk: {format_size(reply.bytes_before)}, now {format_size(reply.bytes_after)}"
    if reply.bytes_after > reply.bytes_wanted:
        yield f"more than the {format_size(reply.bytes_wanted)} wanted: the rest is pinned, in use, or the index itself"


def _format_value(name: str, value: Any) -> str:
    if name.startswith("bytes"):
        return format_size(value)
    if name in ("created", "last_used", "at") and isinstance(value, float):
        with suppress(OverflowError, ValueError, OSError):  # a clock was far off
            return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if name.endswith("_share"):
        return f"{value:.1%}"
    if name.endswith("_s") and isinstance(value, float):
        return f"{value:.3f} s"
    if isinstance(value, dict):
        return "\n".join(f"{key}: {number:,}" for key, number in value.items())
    if isinstance(value, list):
        return ", ".join(str(item["position"]) if isinstance(item, dict) else str(item) for item in value)
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
