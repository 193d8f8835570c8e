"""The same views for people, no wider than their terminal."""

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from warmline_cachectl.views.columns import Column, fitted, printable
from warmline_proxy.store.rows import Finding, GcReply, PinReply, PurgeReply, Replay

WIDTH_PIPED = 160  # where no terminal says how wide it is

Parts = Iterable[Table | str]

STORED = {  # what `stats` says of the disk, in its order
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
REQUESTS = {  # and of the last requests
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


def console() -> Console:
    """What clients called their conversations is text: no markup, no emoji."""
    out = Console(highlight=False, markup=False, emoji=False)
    if not (out.is_terminal or "COLUMNS" in os.environ):
        out.width = WIDTH_PIPED
    return out


def size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def span(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def count(number: int, one: str, many: str = "") -> str:
    """ "1 finding", "2 findings"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def conversations(view: dict[str, Any]) -> Parts:
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
            size(row["bytes"]),
            size(row["bytes_alone"]),
            f"{row['segments']}+{row['checkpoints']}",
            str(row["requests"]),
            str(row["hits"]),
            span(row["age_s"]),
            span(row["idle_s"]),
            *(["yes" if row["pinned"] else ""] if pinned else []),
            row["client"],
        ]
        for row in view["sessions"]
    ]
    yield from fitted(columns, rows, console().width) if rows else ["no conversations"]
    if view["quarantined"]:
        yield from quarantine(view["quarantined"])


def quarantine(rows: list[dict[str, Any]]) -> Parts:
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
            size(row["bytes_on_disk"]),
            row["reason"],
        ]
        for row in rows
    ]
    return fitted(columns, cells, console().width, title="Quarantine")


def conversation(view: dict[str, Any]) -> Parts:
    yield from conversations({"sessions": [view["session"]], "quarantined": []})
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
            size(row["bytes_on_disk"]),
            f"{row['prefill_s']:.1f} s",
            str(row["hits"]),
            "yes" if row["shared"] else "",
            *(["yes" if row["pinned"] else ""] if pinned else []),
            ", ".join(f"{state['position']:,}" for state in row["checkpoints"]),
        ]
        for row in view["path"]
    ]
    yield from fitted(columns, rows, console().width)


def listing(view: dict[str, Any]) -> Parts:
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
            size(row["bytes"]),
            span(row["idle_s"]),
            " ".join(filter(None, (row["client"], "(pinned)" if row["pinned"] else ""))),
        ]
        for row in view["sessions"]
    ]
    yield from fitted(columns, rows, console().width) if rows else ["no conversations"]


def segments(view: dict[str, Any]) -> Parts:
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
            size(row["bytes"]),
            str(row["checkpoints"]),
            ", ".join(name for name in ("shared", "pinned") if row[name]),
        ]
        for row in view["segments"]
    ]
    return fitted(columns, rows, console().width)


def fields(view: dict[str, Any]) -> Parts:
    """One thing, a line a field."""
    for title, row in view.items():
        yield _lines(title.capitalize(), {name.replace("_", " "): _text(name, value) for name, value in row.items()})


def stats(view: dict[str, Any]) -> Parts:
    for title, names, row in (
        ("On disk", STORED, view["stored"]),
        ("The last requests", REQUESTS, view["requests"]),
    ):
        yield _lines(title, {names[name]: _text(name, row[name]) for name in names if row[name] != {}})


def _lines(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(name, printable(text))
    return table


def findings(found: list[Finding], summary: str) -> Parts:
    if found:
        table = Table("what", "id", "detail")
        for finding in found:
            table.add_row(finding.what, finding.id, finding.detail)
        yield table
    yield summary


def replays(rows: list[Replay]) -> Parts:
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
    yield from fitted(columns, cells, console().width) if rows else ["no conversations"]


def is_compared(row: Replay) -> bool:
    return bool(row.reused) and not row.detail


def repaired(did: list[Finding]) -> Parts:
    if did:
        table = Table("done", "id", "detail")
        for each in did:
            table.add_row(each.what, each.id, each.detail)
        yield table
    yield count(len(did), "repair")


def purged(reply: PurgeReply) -> str:
    verb = "would purge" if reply.dry_run else "purged"
    cut = [each for each in reply.cuts if not each.why_not]
    parts = [
        count(len(reply.segments), "segment"),
        *([f"a part of {len(cut)} more"] if cut else []),
        count(len(reply.checkpoints), "checkpoint"),
        *([f"{len(reply.quarantined)} quarantined"] if reply.quarantined else []),
        size(reply.bytes_freed),
    ]
    return f"{verb} {count(len(reply.sessions), 'conversation')}: {', '.join(parts)}"


def pinned(reply: PinReply) -> str:
    what = f"{reply.session} is {'pinned' if reply.pinned else 'no longer pinned'}"
    changed = f"{count(len(reply.segments), 'segment')} {'more' if reply.pinned else 'fewer'}"
    return f"{what}: {changed}; {size(reply.bytes_pinned)} of at most {size(reply.bytes_pinned_max)} are pinned now"


def collected(reply: GcReply) -> Parts:
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
        if told := [count(number, one, many) for number, one, many in things if number]:
            yield f"{verb} {', '.join(told)}"
    yield f"the index: {size(reply.bytes_index_before)}, now {size(reply.bytes_index_after)}"
    yield f"used on disk: {size(reply.bytes_before)}, now {size(reply.bytes_after)}"
    if reply.bytes_after > reply.bytes_wanted:
        yield f"more than the {size(reply.bytes_wanted)} wanted: the rest is pinned, in use, or the index itself"


def _text(name: str, value: Any) -> str:
    if name.startswith("bytes"):
        return size(value)
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
