"""Command that checks what is stored, and repairs it."""

from pathlib import Path
from typing import Annotated

import typer

from warmline_cachectl import client
from warmline_cachectl.completion import complete_session_ids
from warmline_cachectl.errors import EXIT_FOUND, EXIT_USAGE, exit_on_error, fail
from warmline_cachectl.lookup import open_index, resolve_session_id
from warmline_cachectl.options import HOME, CommandApp, HomeOption, JsonOption, QuietOption, make_home
from warmline_cachectl.views import tables
from warmline_cachectl.views.output import show, show_progress, show_spinner
from warmline_cachectl.views.tables import format_count
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.store.rows import IndexFinding, ReplayRequest

REPLAY_FAILURES = ("differs", "unstable", "damaged")  # outcomes

app = CommandApp("Check")


@app.add(
    "Check the index and its files, and repair them.",
    "cachectl verify",
    "cachectl verify --deep",
    "cachectl verify --repair",
)
def verify(
    session: Annotated[
        str,
        typer.Argument(
            help="With --replay: one conversation, by id or its beginning.",
            autocompletion=complete_session_ids,
            show_default=False,
        ),
    ] = "",
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte of every file.")] = False,
    replay: Annotated[
        bool, typer.Option("--replay", help="Have the running pair compute stored KV again, cold, and compare.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Repair the index, report the changes, then check everything (--deep).")
    ] = False,
    quiet: QuietOption = False,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Check the index and its files; exit code 1 where something is (or is left) wrong."""
    if replay and repair:
        fail("one at a time: --repair, then --replay", EXIT_USAGE)
    if replay:
        return _replay(session, home, as_json, quiet)
    if session:
        fail("one conversation alone can only be replayed: add --replay", EXIT_USAGE)
    repairs: list[IndexFinding] = []
    if repair:
        with exit_on_error(), show_spinner("mending", quiet):
            repairs, deep = client.repair(make_home(home)).did, True
    with open_index(home) as reader:
        totals = reader.totals()
        with show_progress("checking", totals.bytes_segments + totals.bytes_checkpoints, quiet or not deep) as progress:
            findings = verify_index(reader, deep, progress)
    files = tables.format_files(totals.segments, totals.checkpoints)
    lines = tables.render_findings(findings, f"{files} checked: {format_count(len(findings), 'finding')}")
    view = {"findings": findings, "segments": totals.segments, "checkpoints": totals.checkpoints, "deep": deep}
    if repair:
        view["did"] = repairs
        lines = [*tables.render_findings(repairs, format_count(len(repairs), "repair"), title="done"), *lines]
    show(view, lines, as_json)
    if findings:
        raise typer.Exit(EXIT_FOUND)


def _replay(session: str, home: Path, as_json: bool, quiet: bool) -> None:
    with open_index(home) as reader:
        request = ReplayRequest(session=resolve_session_id(reader.snapshot(), session))
    with exit_on_error(), show_spinner("computing again", quiet):
        replays = client.replay(make_home(home), request).replays
    show({"replays": replays}, tables.render_replays(replays), as_json)
    if any(each.outcome in REPLAY_FAILURES for each in replays):
        raise typer.Exit(EXIT_FOUND)
