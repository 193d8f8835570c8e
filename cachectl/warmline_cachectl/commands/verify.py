"""The verbs that check what is stored, and mend it."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from warmline_cachectl import client
from warmline_cachectl.completion import complete_session_ids
from warmline_cachectl.options import (
    CHECK_GROUP,
    EXIT_FOUND,
    EXIT_USAGE,
    HOME,
    HomeOption,
    JsonOption,
    QuietOption,
    exit_on_error,
    fail,
    format_examples,
    make_home,
    open_index,
    resolve_session_id,
)
from warmline_cachectl.views import tables
from warmline_cachectl.views import values as views
from warmline_cachectl.views.output import show, show_progress, show_spinner
from warmline_cachectl.views.tables import format_count
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.store.rows import IndexFinding, ReplayRequest

app = typer.Typer()


@app.command(
    short_help="Check the index and its files, and repair them.",
    rich_help_panel=CHECK_GROUP,
    epilog=format_examples("cachectl verify", "cachectl verify --deep", "cachectl verify --repair"),
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
        bool, typer.Option("--replay", help="Have the running pair compute what is stored again, cold, and compare.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Mend what can be mended, say what was done, then check all (--deep).")
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
    did: list[IndexFinding] = []
    if repair:
        with exit_on_error(), show_spinner("mending", quiet):
            did, deep = client.repair(make_home(home)).did, True
    with open_index(home) as reader:
        client.check_readable(reader.home)
        totals = reader.totals()
        with show_progress("checking", totals.bytes_segments + totals.bytes_checkpoints, quiet or not deep) as progress:
            found = verify_index(reader, deep, progress)
    checked = f"{format_count(totals.segments, 'segment')} and {format_count(totals.checkpoints, 'checkpoint')} checked"
    summary = f"{checked}: {format_count(len(found), 'finding')}"
    view = {
        "findings": [msgspec.structs.asdict(finding) for finding in found],
        "segments": totals.segments,
        "checkpoints": totals.checkpoints,
        "deep": deep,
    }
    if repair:
        view["did"] = [msgspec.structs.asdict(each) for each in did]
    repairs = tables.render_findings(did, format_count(len(did), "repair"), title="done") if repair else ()
    show(view, [*repairs, *tables.render_findings(found, summary)], as_json)
    if found:
        raise typer.Exit(EXIT_FOUND)


def _replay(session: str, home: Path, as_json: bool, quiet: bool) -> None:
    with open_index(home) as reader:
        wanted = resolve_session_id(reader.snapshot(), session)
    with exit_on_error(), show_spinner("computing again", quiet):
        reply = client.replay(make_home(home), ReplayRequest(session=wanted))
    view = {"replays": [msgspec.structs.asdict(each) for each in reply.replays]}
    show(view, tables.render_replays(reply.replays), as_json)
    if any(each.outcome in views.REPLAY_FAILURES for each in reply.replays):
        raise typer.Exit(EXIT_FOUND)
