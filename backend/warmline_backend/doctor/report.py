"""Reports of an examination: a table for people, JSON for programs."""

import os
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from warmline_backend.doctor.examine import Examination
from warmline_backend.doctor.findings import DoctorFinding, FindingLevel, escape_text, format_bytes
from warmline_backend.doctor.memory import MemoryPlan

LEVEL_STYLES = {FindingLevel.OK: "green", FindingLevel.WARN: "yellow", FindingLevel.FAIL: "bold red"}
VERDICTS = {
    FindingLevel.OK: "It can be served.",
    FindingLevel.WARN: "It can be served; see the warnings.",
    FindingLevel.FAIL: "It can't be served like this; see FAIL above.",
}
PIPED_WIDTH = 120  # where no terminal says how wide it is


def convert_to_json(examination: Examination) -> dict[str, Any]:
    """Examination as plain values; counts are bytes or tokens, as their names say."""
    weights, cache, plan = examination.weights, examination.cache, examination.plan
    return {
        "model": escape_text(examination.settings.model),
        "folder": escape_text(str(examination.folder or "")),
        "verdict": examination.verdict.value,
        "findings": [asdict(finding) for finding in examination.findings],
        "weights": weights
        and {"bytes": weights.weight_bytes, "bytes_by_dtype": weights.dtypes, "quantization": weights.quantization},
        "cache": cache
        and {
            "layers": cache.layers,
            "families": cache.layout.class_names,
            "row_bytes": cache.weight.row_bytes,
            "state_bytes": cache.weight.state_bytes,
            "window_tokens": cache.layout.window,
            "persistent": not cache.layout.problem,
            "why_not": cache.layout.problem,
        },
        "memory": plan
        and {
            "machine": plan.machine.description,
            "machine_bytes": plan.machine.usable_bytes,
            "budget_bytes": plan.budget_bytes,
            "tokens_max": plan.tokens_max,
            "need_bytes": plan.load.need_bytes,
            "load": asdict(plan.load),
            "lengths": [asdict(length) for length in plan.lengths],
        },
        "serve": examination.serve_command,
    }


def print_report(examination: Examination, console: Console | None = None) -> None:
    out = console or make_console()
    print_examination(examination, out)
    if examination.serve_command:
        out.print(Text("  " + escape_text(examination.serve_command)), soft_wrap=True)  # whole: it is to be copied


def make_console() -> Console:
    """Console of stdout, as wide as its terminal."""
    out = Console(highlight=False)
    if out.is_terminal or "COLUMNS" in os.environ:
        return out
    return Console(highlight=False, width=PIPED_WIDTH)


def print_examination(examination: Examination, out: Console) -> None:
    """Print findings, memory and verdict."""
    print_findings(examination, out)
    if examination.plan:
        out.print(Text(f"\nMemory of {examination.plan.machine.description}"))
        out.print(_render_memory(examination.plan))
    out.print(Text("\n" + VERDICTS[examination.verdict], style=LEVEL_STYLES[examination.verdict]))


def print_findings(examination: Examination, out: Console, left_out: str = "") -> None:
    """Print the findings under the model's name; `left_out`: an area whose failures alone are printed."""
    model, folder = escape_text(examination.settings.model), escape_text(str(examination.folder or ""))
    out.print(Text(model + (f"  ({folder})" if folder not in ("", model) else "")), soft_wrap=True)
    shown = [each for each in examination.findings if each.area != left_out or each.level is FindingLevel.FAIL]
    out.print(_render_findings(shown))


def _render_findings(findings: list[DoctorFinding]) -> Table:
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        what = Text(finding.what)
        if finding.todo:
            what.append(f"\n→ {finding.todo}", style="dim")
        table.add_row(Text(f"  {finding.area}"), Text(finding.level.value, style=LEVEL_STYLES[finding.level]), what)
    return table


def _render_memory(plan: MemoryPlan) -> Table:
    titles = ("tokens", "KV", "a prefill step", "with the weights", "on disk", "prefill", "restore", "")
    table = Table(*titles, header_style="", box=None, pad_edge=False)
    for column in table.columns[:-1]:
        column.justify = "right"
    for length in plan.lengths:
        sizes = map(format_bytes, (length.kv_bytes, length.step_bytes, length.total_bytes, length.disk_bytes))
        times = map(format_duration, (length.prefill_s, length.restore_s))
        table.add_row(f"{length.tokens:,}", *sizes, *times, length.verdict)
    return table


def format_duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.1f} min"
