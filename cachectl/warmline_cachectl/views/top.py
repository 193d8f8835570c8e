"""View of `top`: one snapshot of a running proxy, as plain values and for people.  Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from warmline_cachectl.views.columns import printable
from warmline_cachectl.views.tables import format_count, format_duration, format_size
from warmline_proxy.store.rows import count_reached_tokens

View = dict[str, Any]
BAR_CHARS = 16
REQUESTS_MAX = 30  # on one screen
WIDE_CHARS = 100  # from which all columns have room


def build_snapshot(status: View, records: Sequence[View], before: View | None = None) -> View:
    """Snapshot from the proxy's `status` and `records`; speeds are since `before`, the last snapshot."""
    engine, totals = status.get("engine"), status["totals"]
    earlier = {row["id"]: row for row in before["requests"]} if before else {}
    since_s = status["at"] - before["at"] if before else 0.0
    cached = sum(record["cached_tokens"] for record in records)
    prompt = sum(_count_reached(record) for record in records)
    rates = engine["prefill_rates"] if engine else []
    models = status.get("models", [])  # none where one model is served
    return {
        "at": status["at"],
        "model": engine["model"] if engine else "",
        "backend": status["backend"] or "up",
        "models": [{name: model[name] for name in ("name", "stage", "running", "waiting")} for model in models],
        **{name: status[name] for name in ("persistence", "running", "queued", "settling", "connections")},
        "requests": [_build_request(row, earlier.get(row["id"]), since_s) for row in status["live"]],
        "engine": engine
        and {
            "prefill_tokens_per_s": rates[-1]["tokens_per_s"] if rates else 0.0,
            **{name: engine[name] for name in ("decode_tokens_per_s", "slowest_recent_step_s")},
        },
        "memory": {
            "residents": len(status["residents"]),
            "unsaved": status["unsaved"],
            **(_sum_memory(models) if models else _measure_memory(engine)),
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


def _sum_memory(models: Sequence[View]) -> View:
    """Conversations in the memory of all models, without those that are computed."""
    used, budget = (sum(model[name] for model in models) for name in ("resident_bytes", "kv_bytes"))
    return {"bytes_used": used, "bytes_budget": budget}


def _measure_memory(engine: View | None) -> View:
    if engine is None:
        return {"bytes_used": 0, "bytes_budget": 0}
    used = engine["resident_bytes"] + engine["running_bytes"]
    return {"bytes_used": used, "bytes_budget": engine["memory_budget_bytes"]}


def _count_reached(record: View) -> int:
    counts = (record[f"{kind}_tokens"] for kind in ("prompt", "cached", "prefilled"))
    return count_reached_tokens(record["outcome"], *counts)


def bytes_used(totals: Mapping[str, int]) -> int:
    """Bytes that count against the budget, from totals that came as JSON."""
    names = ("segments", "checkpoints", "quarantined", "writing", "doomed", "index")
    return sum(totals[f"bytes_{name}"] for name in names)


def _build_request(row: View, before: View | None, since_s: float) -> View:
    names = ("id", "client_model", "client_session", "title", "phase", "source")
    times = ("age_s", "queue_s", "ttft_s", "expected_ttft_s")
    tokens = ("prompt_tokens", "reused_tokens", "prefilled_tokens", "spoken")
    shown = {name: row[name] for name in (*names, *times, *tokens)}
    prompt = row["prompt_tokens"]
    return shown | {
        "progress": min(1.0, row["prefilled_tokens"] / prompt) if prompt else 0.0,
        "tokens_per_s": _compute_tokens_per_s(row, before, since_s),
    }


def _compute_tokens_per_s(row: View, before: View | None, since_s: float) -> float:
    """Tokens prefilled or spoken a second, since the last snapshot, or else since the request's start."""
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
    """Screen for a terminal of `width` characters."""
    rows, is_wide, has_models = view["requests"], width >= WIDE_CHARS, bool(view["models"])
    requests = _render_requests(rows, is_wide, has_models) if rows else Text("no requests")
    return Group(_render_header(view), requests)


def _render_header(view: View) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    memory, disk, reuse, engine = view["memory"], view["disk"], view["reuse"], view["engine"]
    model = "" if view["models"] else view["model"]
    grid.add_row("backend", "", printable(", ".join(filter(None, (model, view["backend"])))))
    if view["models"]:
        stages = ", ".join(f"{model['name']}: {model['stage']}" for model in view["models"])
        grid.add_row("models", "", printable(stages))
    requests = f"{view['running']} running, {view['queued']} waiting, {view['settling']} being saved"
    grid.add_row("requests", "", requests)
    if engine:
        speeds = f"prefill {engine['prefill_tokens_per_s']:,.0f}, decode {engine['decode_tokens_per_s']:,.1f} tokens/s"
        grid.add_row("engine", "", printable(f"{view['model']}: {speeds}") if view["models"] else speeds)
    unsaved = f", {memory['unsaved']} unsaved" if memory["unsaved"] else ""
    _add_usage(grid, "memory", memory, format_count(memory["residents"], "resident") + unsaved)
    _add_usage(grid, "disk", disk, format_count(disk["sessions"], "conversation"))
    share = f"{reuse['share']:.0%} of the prompts of the last {format_count(reuse['requests'], 'request')}"
    grid.add_row("reused", _render_bar(reuse["share"]), share)
    if view["persistence"] != "ok":
        grid.add_row("saving", "", printable(view["persistence"]))
    return grid


def _add_usage(grid: Table, name: str, usage: View, counts: str) -> None:
    used, budget = usage["bytes_used"], usage["bytes_budget"]
    bar = _render_bar(used / budget if budget else 0.0)
    grid.add_row(name, bar, f"{format_size(used)} of {format_size(budget)}, {counts}")


def _render_bar(share: float, width: int = BAR_CHARS) -> ProgressBar:
    return ProgressBar(total=1.0, completed=min(1.0, share), width=width)


def _render_requests(rows: list[View], wide: bool, has_models: bool) -> Table:
    table = Table(expand=True)
    for name in ("request", *(["model"] if has_models else []), "phase", *(["from"] if wide else []), "prefill"):
        table.add_column(name, no_wrap=True)
    for name in ("prompt", "tok/s", "age", *(["first token"] if wide else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("conversation", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows[:REQUESTS_MAX]:
        table.add_row(
            printable(row["id"][:8]),
            *([printable(row["client_model"] or "-")] if has_models else []),
            row["phase"],
            *([row["source"]] if wide else []),
            _render_bar(row["progress"], BAR_CHARS if wide else BAR_CHARS // 2),
            f"{row['prompt_tokens']:,}",
            f"{row['tokens_per_s']:,.0f}" if row["tokens_per_s"] else "",
            format_duration(row["age_s"]),
            *([_format_first_token(row)] if wide else []),
            printable(row["title"] or row["client_session"] or "-"),
        )
    if len(rows) > REQUESTS_MAX:
        table.caption = f"and {len(rows) - REQUESTS_MAX} more"
    return table


def _format_first_token(row: View) -> str:
    """Seconds from its arrival to its first token, or those expected."""
    if row["ttft_s"]:
        return format_duration(row["ttft_s"])
    return f"~{format_duration(row['expected_ttft_s'])}" if row["expected_ttft_s"] else ""
