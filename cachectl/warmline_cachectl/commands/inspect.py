"""The verbs that look: they change nothing, and give the same answers whether the proxy runs or not."""

import time
from pathlib import Path
from typing import Annotated

import typer

from warmline_cachectl import client
from warmline_cachectl.completion import any_ids, session_ids
from warmline_cachectl.options import HOME, LOOKING, HomeOption, JsonOption, examples, reading, resolved, session_id
from warmline_cachectl.views import tables
from warmline_cachectl.views import tree as tree_view
from warmline_cachectl.views import values as views
from warmline_cachectl.views.forest import Forest
from warmline_cachectl.views.output import show

SessionArgument = Annotated[
    str, typer.Argument(help="A conversation's id, or its beginning.", autocompletion=session_ids, show_default=False)
]

app = typer.Typer()


@app.command(
    "ls",
    short_help="List the conversations, or one's segments.",
    rich_help_panel=LOOKING,
    epilog=examples("cachectl ls", "cachectl ls SESSION  # its segments", "cachectl ls --json"),
)
def list_(session: SessionArgument = "", home: HomeOption = HOME, as_json: JsonOption = False) -> None:
    """The conversations shortly, last used first; or the segments that one of them stands on.

    `key` says whose they are, where there are keys: purge --key takes what stands there.
    """
    forest = _forest(home)
    if session:
        view = views.segments_of(forest, session_id(forest.snapshot, session))
        return show(view, tables.segments(view), as_json)
    view = views.listing(forest, time.time())
    show(view, tables.listing(view), as_json)


@app.command(
    short_help="Show all conversations, or one in detail.",
    rich_help_panel=LOOKING,
    epilog=examples("cachectl inspect", "cachectl inspect SESSION  # with its path", "cachectl inspect SEGMENT"),
)
def inspect(
    item: Annotated[
        str,
        typer.Argument(
            help="A session, segment or checkpoint id, or its beginning.", autocompletion=any_ids, show_default=False
        ),
    ] = "",
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """All conversations; or one with its path of segments; or one file's row.

    `alone` is what no other conversation shares, `files` are segments + checkpoints, `hits` those of its requests that
    reused a block (64 tokens) or more.
    """
    forest = _forest(home)
    if not item:
        view = views.conversations(forest, time.time())
        return show(view, tables.conversations(view), as_json)
    kind, row_id = resolved(forest.snapshot, item)
    if kind == "session":
        view = views.conversation(forest, row_id, time.time())
        return show(view, tables.conversation(view), as_json)
    one = {"segment": views.segment, "checkpoint": views.checkpoint, "quarantined": views.quarantined}[kind]
    view = one(forest, row_id)
    show(view, tables.fields(view), as_json)


@app.command(
    short_help="Show how conversations share what is stored.",
    rich_help_panel=LOOKING,
    epilog=examples("cachectl tree", "cachectl tree --depth 2", "cachectl tree --json"),
)
def tree(
    depth: Annotated[int, typer.Option("--depth", min=0, help="How many forks deep; 0: all.")] = 0,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """A radix tree for each model and key: conversations that begin alike share segments, and end at a ●.

    A line is a run of tokens up to the next fork, with its last segment's id. Where there are too many lines, the
    heaviest are shown; --json has all.
    """
    view = tree_view.tree(_forest(home), depth)
    show(view, tree_view.shown(view), as_json)


@app.command(
    short_help="Show totals, hits and misses.",
    rich_help_panel=LOOKING,
    epilog=examples("cachectl stats", "cachectl stats --json"),
)
def stats(home: HomeOption = HOME, as_json: JsonOption = False) -> None:
    """What is on disk, and how the last requests went: up to 1,000 of them."""
    with reading(home) as reader:
        view = views.stats(reader.totals(), reader.requests(), reader.snapshot())
    show(view, tables.stats(view), as_json)


def _forest(home: Path) -> Forest:
    with reading(home) as reader:
        snapshot = reader.snapshot()
        return Forest.of(snapshot, client.whose_as_far_as_known(reader.home, snapshot))
