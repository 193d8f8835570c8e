"""The verbs that look: they change nothing."""

import time
from typing import Annotated

import typer

from warmline_cachectl import tables, views
from warmline_cachectl.options import HOME, LOOKING, HomeOption, JsonOption, reading, resolved
from warmline_cachectl.showing import show

app = typer.Typer()


@app.command(short_help="Show all conversations, or one in detail.", rich_help_panel=LOOKING)
def inspect(
    item: Annotated[str, typer.Argument(help="A session, segment or checkpoint id, or its beginning.")] = "",
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """All conversations; or one with its path of segments; or one file's row."""
    with reading(home) as reader:
        snapshot = reader.snapshot()
    if not item:
        view = views.conversations(snapshot, time.time())
        return show(view, tables.conversations(view), as_json)
    kind, row_id = resolved(snapshot, item)
    if kind == "session":
        view = views.conversation(snapshot, row_id, time.time())
        return show(view, tables.conversation(view), as_json)
    view = {"segment": views.segment, "checkpoint": views.checkpoint, "quarantined": views.quarantined}[kind](
        snapshot, row_id
    )
    show(view, tables.fields(view), as_json)


@app.command(short_help="Show totals, hits and misses.", rich_help_panel=LOOKING)
def stats(home: HomeOption = HOME, as_json: JsonOption = False) -> None:
    """What is on disk, and how the last requests went."""
    with reading(home) as reader:
        view = views.stats(reader.totals(), reader.requests())
    show(view, tables.fields(view), as_json)
