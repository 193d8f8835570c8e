"""The same views for people, no wider than their terminal."""

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from warmline_cachectl.views.columns import Column, fit_table, printable
from warmline_proxy.store.rows import GcReply, IndexFinding, PinReply, PurgeReply, ReplayResult

WIDTH_PIPED = 160  # where no terminal says how wide it is

Renderables = Iterable[Table | str]

STORED_LABELS = {  # what `stats` says of the disk, in its order
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
    "turns": "sampled tool calls",
}
REQUEST_LABELS = {  # and of the last requests
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


def render_conversations(view: dict[str, Any]) -> Renderables:
    pinned, keys = any(row["pinned"] for row in view["sessions"]), any(row["key"] for row in view["sessions"])
    columns = [
        Column("session", kind="id"),
        *([Column("key", 4, "text")] if keys else []),
        Column("model", 3, "text"),
        Column("tokens"),
        Column("size"),
        Column("alone", 7),
        Column("files", 9),
        Column("requests", 6),
        Column("hits", 5),
        Column("age", 8),
        Column("idle"),
        *([Column("pinned", 1, "text")] if pinned else []),
        Column("client", 2, "text"),
    ]
    rows = [
        [
            row["id"],
            *([row["key"]] if keys else []),
            row["model"],
            f"{row['tokens']:,}",
            format_size(row["bytes"]),
            format_size(row["bytes_alone"]),
            f"{row['segments']}+{row['checkpoints']}",
            str(row["requests"]),
            str(row["hits"]),
            format_duration(row["age_s"]),
            format_duration(row["idle_s"]),
            *(["yes" if row["pinned"] else ""] if pinned else []),
            row["client"],
        ]
        for row in view["sessions"]
    ]
    yield from fit_table(columns, rows, make_console().width) if rows else ["no conversations"]
    if view["quarantined"]:
        yield from render_quarantine(view["quarantined"])


def render_quarantine(rows: list[dict[str, Any]]) -> Renderables:
    columns = [
        Column("quarantined", kind="id"),
        Column("kind", 3, "text"),
        Column("model", 2, "text"),
        Column("tokens", 1),
        Column("size", 4),
        Column("reason", kind="text"),
    ]
    cells = [
        [
            row["id"],
            row["kind"],
            row["model"],
            f"{row['start']:,}-{row['end']:,}",
            format_size(row["bytes_on_disk"]),
            row["reason"],
        ]
        for row in rows
    ]
    return fit_table(columns, cells, make_console().width, title="Quarantine")


def render_conversation(view: dict[str, Any]) -> Renderables:
    yield from render_conversations({"sessions": [view["session"]], "quarantined": []})
    pinned = any(row["pinned"] for row in view["path"])
    columns = [
        Column("segment", kind="id"),
        Column("tokens"),
        Column("size"),
        Column("prefill", 4),
        Column("hits", 3),
        Column("shared", 2, "text"),
        *([Column("pinned", 1, "text")] if pinned else []),
        Column("checkpoints at", 1, "text"),
    ]
    rows = [
        [
            row["id"],
            f"{row['start']:,}-{row['end']:,}",
            format_size(row["bytes_on_disk"]),
            f"{row['prefill_s']:.1f} s",
            str(row["hits"]),
            "yes" if row["shared"] else "",
            *(["yes" if row["pinned"] else ""] if pinned else []),
            ", ".join(f"{state['position']:,}" for state in row["checkpoints"]),
        ]
        for row in view["path"]
    ]
    yield from fit_table(columns, rows, make_console().width)


def render_listing(view: dict[str, Any]) -> Renderables:
    keys = any(row["key"] for row in view["sessions"])
    columns = [
        Column("session", kind="id"),
        *([Column("key", 3, "text")] if keys else []),
        Column("tokens"),
        Column("size", 2),
        Column("idle"),
        Column("client", 1, "text"),
    ]
    rows = [
        [
            row["id"],
            *([row["key"]] if keys else []),
            f"{row['tokens']:,}",
            format_size(row["bytes"]),
            format_duration(row["idle_s"]),
            " ".join(filter(None, (row["client"], "(pinned)" if row["pinned"] else ""))),
        ]
        for row in view["sessions"]
    ]
    yield from fit_table(columns, rows, make_console().width) if rows else ["no conversations"]


def render_segments(view: dict[str, Any]) -> Renderables:
    columns = [
        Column("segment", kind="id"),
        Column("tokens"),
        Column("size"),
        Column("checkpoints", 2),
        Column("", 1, "text"),
    ]
    rows = [
        [
            row["id"],
            f"{row['start']:,}-{row['end']:,}",
            format_size(row["bytes"]),
            str(row["checkpoints"]),
            ", ".join(name for name in ("shared", "pinned") if row[name]),
        ]
        for row in view["segments"]
    ]
    return fit_table(columns, rows, make_console().width)


def render_fields(view: dict[str, Any]) -> Renderables:
    """One thing, a line a field."""
    for title, row in view.items():
        yield _make_field_table(
            title.capitalize(), {name.replace("_", " "): _format_value(name, value) for name, value in row.items()}
        )


def render_stats(view: dict[str, Any]) -> Renderables:
    for title, names, row in (
        ("On disk", STORED_LABELS, view["stored"]),
        ("The last requests", REQUEST_LABELS, view["requests"]),
    ):
        yield _make_field_table(
            title, {names[name]: _format_value(name, row[name]) for name in names if row[name] != {}}
        )


def _make_field_table(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(name, printable(text))
    return table


def render_findings(found: list[IndexFinding], summary: str) -> Renderables:
    if found:
        table = Table("what", "id", "detail")
        for finding in found:
            table.add_row(finding.what, finding.id, finding.detail)
        yield table
    yield summary


def render_replays(rows: list[ReplayResult]) -> Renderables:
    columns = [
        Column("session", kind="id"),
        Column("tokens", 3),
        Column("from disk", 1),
        Column("outcome", kind="word"),
        Column("difference", 1),
        Column("tolerance", 4),
        Column("quarantined", 2),
        Column("detail", kind="text"),
    ]
    cells = [
        [
            row.session,
            f"{row.tokens:,}",
            f"{row.reused:,}",
            row.outcome,
            f"{row.difference:.2e}" if is_compared(row) else "",
            (f"{row.tolerance:g}" if row.tolerance else "none") if is_compared(row) else "",
            str(row.quarantined or ""),
            row.detail,
        ]
        for row in rows
    ]
    yield from fit_table(columns, cells, make_console().width) if rows else ["no conversations"]


def is_compared(row: ReplayResult) -> bool:
    return bool(row.reused) and not row.detail


def render_repairs(repairs: list[IndexFinding]) -> Renderables:
    if repairs:
        table = Table("done", "id", "detail")
        for each in repairs:
            table.add_row(each.what, each.id, each.detail)
        yield table
    yield format_count(len(repairs), "repair")


def format_purge(reply: PurgeReply) -> str:
    verb = "would purge" if reply.dry_run else "purged"
    cut = [each for each in reply.cuts if not each.why_not]
    parts = [
        format_count(len(reply.segments), "segment"),
        *([f"a part of {len(cut)} more"] if cut else []),
        format_count(len(reply.checkpoints), "checkpoint"),
        *([f"{len(reply.quarantined)} quarantined"] if reply.quarantined else []),
        format_size(reply.bytes_freed),
    ]
    return f"{verb} {format_count(len(reply.sessions), 'conversation')}: {', '.join(parts)}"


def format_pin(reply: PinReply) -> str:
    what = f"{reply.session} is {'pinned' if reply.pinned else 'no longer pinned'}"
    changed = f"{format_count(len(reply.segments), 'segment')} {'more' if reply.pinned else 'fewer'}"
    return (
        f"{what}: {changed}; {format_size(reply.bytes_pinned)} of at most "
        f"{format_size(reply.bytes_pinned_max)} are pinned now"
    )


def render_gc(reply: GcReply) -> Renderables:
    done = {
        "deleted": [
            (reply.orphans, "file that nobody claimed", "files that nobody claimed"),
            (reply.drafts, "draft", ""),
            (reply.doomed, "file whose row was gone", "files whose rows were gone"),
            (reply.records, "old record", ""),
            (reply.turns, "old sampled turn", ""),
            (reply.notes, "note on what is gone", "notes on what is gone"),
        ],
        "cut": [(len([cut for cut in reply.cuts if not cut.why_not]), "segment", "")],
        "evicted": [(len(reply.evicted), "file", "")],
    }
    for verb, things in done.items():
        if told := [format_count(number, one, many) for number, one, many in things if number]:
            yield f"{verb} {', '.join(told)}"
    yield f"the index: {format_size(reply.bytes_index_before)}, now {format_size(reply.bytes_index_after)}"
    yield f"used on disk: {format_size(reply.bytes_before)}, now {format_size(reply.bytes_after)}"
    if reply.bytes_after > reply.bytes_wanted:
        yield f"more than the {format_size(reply.bytes_wanted)} wanted: the rest is pinned, in use, or the index itself"


def _format_value(name: str, value: Any) -> str:
    if name.startswith("bytes"):
        return format_size(value)
    if name in ("created", "last_used", "at") and isinstance(value, float):
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
