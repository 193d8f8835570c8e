"""Views of prompts computed ahead, for people.  Pure."""

from collections.abc import Sequence

from rich.table import Table

from warmline_cachectl.views.columns import Column, fit_table
from warmline_cachectl.views.tables import format_age, format_count, make_console
from warmline_proxy.prewarm.reports import PREWARMING, STORED, PrewarmReport

COLUMNS = (
    Column("prompt", lambda row: row.name, kind="text"),
    Column("state", lambda row: row.state, kind="text"),
    Column("tokens", lambda row: f"{row.tokens:,}" if row.tokens else ""),
    Column("computed", lambda row: f"{row.computed_tokens:,}" if row.computed_tokens else "", 3),
    Column("pinned", lambda row: "yes" if row.pinned else "", 2, "text"),
    Column("when", lambda row: format_age(row.at) if row.at else "", 4),
)


def render_prewarms(reports: Sequence[PrewarmReport]) -> list[Table | str]:
    """Table, and a line for each one that waits or has failed for a reason, or is under way."""
    if not reports:
        return ["no prompts to prewarm: add tables [[prewarm]] to warmline.toml, or name a file"]
    details = [format_prewarm(report) for report in reports if report.detail or _format_progress(report)]
    return [*fit_table(COLUMNS, reports, make_console().width), *details]


def format_prewarm(report: PrewarmReport) -> str:
    """One line about a prompt: its state, and what it took."""
    if report.state == STORED:
        took = f"{report.computed_tokens:,} computed in {report.seconds:.1f} s"
        what = took if report.computed_tokens else "stored already"
        pinned = ", pinned" if report.pinned else ""
        return f"{report.name}: {format_count(report.tokens, 'token')}, {what}{pinned}"
    rest = report.detail or _format_progress(report)
    return f"{report.name}: {report.state}" + (f": {rest}" if rest else "")


def _format_progress(report: PrewarmReport) -> str:
    if report.state != PREWARMING or not report.progress_total:
        return ""
    return f"{report.progress_tokens:,} of {report.progress_total:,} tokens"
