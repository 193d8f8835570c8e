"""A proxy's status as `cachectl top` reads it."""

from typing import Any

from rich.console import Console

from warmline_cachectl.views import top as top_view
from warmline_common.process.arguments import GB

TOTALS = {
    "sessions": 12,
    "segments": 40,
    "bytes_segments": 30 * GB,
    "bytes_checkpoints": GB,
    "bytes_quarantined": 0,
    "bytes_writing": 0,
    "bytes_doomed": 0,
    "bytes_index": 0,
}


ENGINE = {
    "model": "glm",
    "prefill_rates": [{"tokens": 0, "tokens_per_s": 100.0}, {"tokens": 8192, "tokens_per_s": 80.0}],
    "decode_tokens_per_s": 21.5,
    "slowest_recent_step_s": 0.9,
    "resident_bytes": 6 * GB,
    "running_bytes": GB,
    "memory_budget_bytes": 20 * GB,
}


RECORDS = [
    {"outcome": "ok", "prompt_tokens": 1000, "cached_tokens": 900, "prefilled_tokens": 100},
    {"outcome": "ok", "prompt_tokens": 1000, "cached_tokens": 0, "prefilled_tokens": 1000},
]


def make_live_row(request: str = "r1", **changes: Any) -> dict[str, Any]:
    row = {
        "id": request,
        "client_model": "any",
        "client_session": "task-17",
        "title": "Fix the parser's test",
        "phase": "prefilling",
        "source": "restored",
        "age_s": 12.0,
        "queue_s": 1.0,
        "restore_s": 1.0,
        "ttft_s": 0.0,
        "expected_ttft_s": 12.0,
        "prompt_tokens": 4000,
        "reused_tokens": 1000,
        "prefilled_tokens": 2000,
        "spoken": 0,
    }
    return row | changes


def make_status(at: float, *rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    status = {
        "at": at,
        "running": len(rows),
        "queued": 2,
        "settling": 1,
        "connections": 3,
        "backend": "",
        "persistence": "ok",
        "residents": [{}, {}],
        "unsaved": 0,
        "totals": TOTALS,
        "disk_budget_bytes": 50 * GB,
        "engine": ENGINE,
        "live": list(rows),
    }
    return status | changes


def render_text(view: dict[str, Any], columns: int = 80) -> str:
    console = Console(width=columns, highlight=False)
    with console.capture() as capture:
        console.print(top_view.render_screen(view, columns))
    return capture.get()
