"""The same views for people."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from warmline_proxy.rows import Finding, PurgeReply, Replay

WIDTH_PIPED = 160  # where no terminal says how wide it is


def console() -> Console:
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=WIDTH_PIPED)


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


def conversations(view: dict[str, Any]) -> Iterable[Table | str]:
    table = Table("session", "model", "tokens", "size", "alone", "files", "requests", "hits", "age", "idle", "client")
    for row in view["sessions"]:
        table.add_row(
            row["id"],
            row["model"],
            f"{row['tokens']:,}",
            size(row["bytes"]),
            size(row["bytes_alone"]),
            f"{row['segments']}+{row['checkpoints']}",
            str(row["requests"]),
            str(row["hits"]),
            span(row["age_s"]),
            span(row["idle_s"]),
            row["client"],
        )
    yield table if view["sessions"] else "no conversations"
    if view["quarantined"]:
        yield quarantine(view["quarantined"])


def quarantine(rows: list[dict[str, Any]]) -> Table:
    table = Table("quarantined", "kind", "model", "tokens", "size", "reason", title="Quarantine")
    for row in rows:
        place = f"{row['start']:,}-{row['end']:,}"
        table.add_row(row["id"], row["kind"], row["model"], place, size(row["bytes_on_disk"]), row["reason"])
    return table


def conversation(view: dict[str, Any]) -> Iterable[Table | str]:
    yield from conversations({"sessions": [view["session"]], "quarantined": []})
    table = Table("segment", "tokens", "size", "prefill", "hits", "shared", "checkpoints at")
    for row in view["path"]:
        table.add_row(
            row["id"],
            f"{row['start']:,}-{row['end']:,}",
            size(row["bytes_on_disk"]),
            f"{row['prefill_s']:.1f} s",
            str(row["hits"]),
            "yes" if row["shared"] else "",
            ", ".join(f"{state['position']:,}" for state in row["checkpoints"]),
        )
    yield table


def fields(view: dict[str, Any]) -> Iterable[Table | str]:
    """One thing, a line a field."""
    for title, row in view.items():
        table = Table(title=title, show_header=False)
        for name, value in row.items():
            table.add_row(name.replace("_", " "), _text(name, value))
        yield table


def findings(found: list[Finding], summary: str) -> Iterable[Table | str]:
    if found:
        table = Table("what", "id", "detail")
        for finding in found:
            table.add_row(finding.what, finding.id, finding.detail)
        yield table
    yield summary


def replays(rows: list[Replay]) -> Iterable[Table | str]:
    table = Table("session", "tokens", "from disk", "outcome", "difference", "tolerance", "quarantined", "detail")
    for row in rows:
        compared = bool(row.reused) and not row.detail
        table.add_row(
            row.session,
            f"{row.tokens:,}",
            f"{row.reused:,}",
            row.outcome,
            f"{row.difference:.2e}" if compared else "",
            (f"{row.tolerance:g}" if row.tolerance else "none") if compared else "",
            str(row.quarantined or ""),
            row.detail,
        )
    yield table if rows else "no conversations"


def repaired(did: list[Finding]) -> Iterable[Table | str]:
    if did:
        table = Table("done", "id", "detail")
        for each in did:
            table.add_row(each.what, each.id, each.detail)
        yield table
    yield f"{len(did)} repairs"


def purged(reply: PurgeReply) -> str:
    verb = "would purge" if reply.dry_run else "purged"
    quarantined = f", {len(reply.quarantined)} quarantined" if reply.quarantined else ""
    return (
        f"{verb} {len(reply.sessions)} conversations: {len(reply.segments)} segments, "
        f"{len(reply.checkpoints)} checkpoints{quarantined}, {size(reply.bytes_freed)}"
    )


def _text(name: str, value: Any) -> str:
    if name.startswith("bytes"):
        return size(value)
    if isinstance(value, dict):
        return "\n".join(f"{key}: {count:,}" for key, count in sorted(value.items(), key=lambda each: -each[1]))
    if isinstance(value, list):
        return ", ".join(str(item["position"]) if isinstance(item, dict) else str(item) for item in value)
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
