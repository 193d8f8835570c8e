"""`cachectl doctor`: common problems of a home and of the processes on it, each with its remedy."""

from collections.abc import Mapping
from dataclasses import asdict

import typer
from rich.table import Table

from warmline_cachectl.doctor.checks import OK, Diagnosis, run_checks
from warmline_cachectl.doctor.facts import gather
from warmline_cachectl.errors import EXIT_FOUND, EXIT_USAGE, exit_on_error
from warmline_cachectl.options import HOME, CommandApp, HomeOption, JsonOption, QuietOption, make_home
from warmline_cachectl.views.columns import printable
from warmline_cachectl.views.output import show, show_spinner
from warmline_cachectl.views.tables import format_count

app = CommandApp("Check")


@app.add("Look for common problems.", "cachectl doctor", "cachectl doctor --json")
def doctor(quiet: QuietOption = False, home: HomeOption = HOME, as_json: JsonOption = False) -> None:
    """Check the home, the index, the running pair and this machine; each finding has a remedy.  Exit code 1 on any.

    (`warmline doctor` is about a model: whether it can be served, and how.)
    """
    with exit_on_error(), show_spinner("looking", quiet or as_json):
        facts = gather(make_home(home))
    checks = run_checks(facts)
    found = sum(check.status != OK for check in checks.values())
    show(
        {"checks": [{"name": name, **asdict(check)} for name, check in checks.items()], "findings": found},
        [_render_table(checks), format_count(found, "finding") if found else "all is well"],
        as_json,
    )
    if not facts.has_home:
        raise typer.Exit(EXIT_USAGE)
    if found:
        raise typer.Exit(EXIT_FOUND)


def _render_table(checks: Mapping[str, Diagnosis]) -> Table:
    """Table of checks, with the remedy below each finding: both may be long."""
    table = Table("", "check", "seen")
    for name, check in checks.items():
        mend = f"\n→ {check.mend}" if check.mend else ""
        table.add_row(check.status, name, printable(check.seen + mend))
    return table
