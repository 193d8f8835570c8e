"""View of `top`: one snapshot of a running proxy, as plain values and for people.  Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from warmline_cachectl.views.columns import printable
from warmline_cachectl.views.tables import format_count, format_duration, format_size

View = dict[str, Any]
BAR_CHARS = 16
REQUESTS_MAX = 30  # on one screen
WIDE_CHARS = 100  # from which all columns have room


def build_snapshot(status: View, records: Iterable[View], before: View | None = None) -> View:
    """`status` and `records` as the proxy tells them; `before` is the last snapshot, for what went on since."""
    engine, totals = status.get("engine"), status["totals"]
    earlier = {row["id"]: row for row in before["requests"]} if before else {}
    since_s = status["at"] - before["at"] if before else 0.0
    records = list(records)
    prompt, cached = (sum(record[name] for record in records) for name in ("prompt_tokens", "cached_tokens"))
    return {
        "at": status["at"],
        "model": engine["model"] if engine else "",
        "backend": status["backend"] or "up",
        "persistence": status["persistence"],
        "running": status["running"],
        "queued": status["queued"],
        "settling": status["settling"],
        "connections": status["connections"],
        "requests": [_build_request(row, earlier.get(row["id"]), since_s) for row in status["live"]],
        "engine": {
            "prefill_tokens_per_s": engine["prefill_rates"][-1]["tokens_per_s"] if engine["prefill_rates"] else 0.0,
            "decode_tokens_per_s": engine["decode_tokens_per_s"],
            "slowest_recent_step_s": engine["slowest_recent_step_s"],
        }
        if engine
        else None,
        "memory": {
            "residents": len(status["residents"]),
            "unsaved": status["unsaved"],
            "bytes_used": engine["resident_bytes"] + engine["running_bytes"] if engine else 0,
            "bytes_budget": engine["memory_budget_bytes"] if engine else 0,
        },
        "disk": {
            "sessions": totals["sessions"],
            "segments": totals["segments"],
            "bytes_used": bytes_used(totals),
            "bytes_budget": status["disk_budget_bytes"],
        },
        "reuse": {
            "requests": len(records),
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "share": cached / prompt if prompt else 0.0,
        },
    }


def bytes_used(totals: Mapping[str, int]) -> int:
    """Bytes that count against the budget, from totals that came as JSON."""
    names = ("segments", "checkpoints", "quarantined", "writing", "doomed", "index")
    return sum(totals[f"bytes_{name}"] for name in names)


def _build_request(row: View, before: View | None, since_s: float) -> View:
    names = ("id", "client_model", "client_session", "phase", "source", "age_s", "queue_s", "ttft_s")
    tokens = ("prompt_tokens", "reused_tokens", "prefilled_tokens", "spoken")
    shown = {name: row[name] for name in (*names, *tokens)}
    wanted = row["prompt_tokens"]
    return shown | {
        "progress": min(1.0, row["prefilled_tokens"] / wanted) if wanted else 0.0,
        "tokens_per_s": _compute_tokens_per_s(row, before, since_s),
    }


def _compute_tokens_per_s(row: View, before: View | None, since_s: float) -> float:
    """Tokens prefilled or spoken a second: since the last look, or where there was none since its start."""
    answering = row["phase"] == "answering"
    if before is not None and since_s > 0 and before["phase"] == row["phase"]:
        name = "spoken" if answering else "prefilled_tokens"
        return float(max(0, row[name] - before[name]) / since_s)
    if answering:
        spent_s = row["age_s"] - row["ttft_s"]
        return float(row["spoken"] / spent_s) if spent_s > 0 else 0.0
    spent_s = row["age_s"] - row["queue_s"] - row["restore_s"]
    return float(max(0, row["prefilled_tokens"] - row["reused_tokens"]) / spent_s) if spent_s > 0 else 0.0


# --- for people ---


def render_screen(view: View, width: int) -> RenderableType:
    """For a terminal so many characters wide."""
    rows = view["requests"]
    return Group(_render_header(view), _render_requests(rows, width >= WIDE_CHARS) if rows else Text("no requests"))


def _render_header(view: View) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    memory, disk, reuse, engine = view["memory"], view["disk"], view["reuse"], view["engine"]
    backend = view["backend"] if not view["model"] else f"{view['model']}, {view['backend']}"
    requests = f"{view['running']} running, {view['queued']} waiting, {view['settling']} being saved"
    grid.add_row("backend", "", printable(backend))
    grid.add_row("requests", "", requests)
    if engine:
        speeds = f"prefill {engine['prefill_tokens_per_s']:,.0f}, decode {engine['decode_tokens_per_s']:,.1f} tokens/s"
        grid.add_row("engine", "", speeds)
    unsaved = f", {memory['unsaved']} unsaved" if memory["unsaved"] else ""
    grid.add_row(
        "memory",
        _render_usage_bar(memory),
        f"{_format_usage(memory)}, {format_count(memory['residents'], 'resident')}{unsaved}",
    )
    grid.add_row(
        "disk", _render_usage_bar(disk), f"{_format_usage(disk)}, {format_count(disk['sessions'], 'conversation')}"
    )
    told = f"{reuse['share']:.0%} of the prompts of the last {format_count(reuse['requests'], 'request')}"
    grid.add_row("reused", _render_bar(reuse["share"]), told)
    if view["persistence"] != "ok":
        grid.add_row("saving", "", printable(view["persistence"]))
    return grid


def _format_usage(row: View) -> str:
    return f"{format_size(row['bytes_used'])} of {format_size(row['bytes_budget'])}"


def _render_usage_bar(row: View) -> ProgressBar:
    return _render_bar(row["bytes_used"] / row["bytes_budget"] if row["bytes_budget"] else 0.0)


def _render_bar(share: float, width: int = BAR_CHARS) -> ProgressBar:
    return ProgressBar(total=1.0, completed=min(1.0, share), width=width)


def _render_requests(rows: list[View], wide: bool) -> Table:
    table = Table(expand=True)
    for name in ("request", "phase", *(["from"] if wide else []), "prefill"):
        table.add_column(name, no_wrap=True)
    for name in ("prompt", "tok/s", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("session", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows[:REQUESTS_MAX]:
        table.add_row(
            printable(row["id"][:8]),
            row["phase"],
            *([row["source"]] if wide else []),
            _render_bar(row["progress"], BAR_CHARS if wide else BAR_CHARS // 2),
            f"{row['prompt_tokens']:,}",
            f"{row['tokens_per_s']:,.0f}" if row["tokens_per_s"] else "",
            format_duration(row["age_s"]),
            printable(row["client_session"] or row["client_model"]),
        )
    if len(rows) > REQUESTS_MAX:
        table.caption = f"and {len(rows) - REQUESTS_MAX} more"
    return table
