"""Commands that only read: the same output whether the proxy runs or not."""

import time
from pathlib import Path
from typing import Annotated

import typer

from warmline_cachectl import client
from warmline_cachectl.completion import complete_ids, complete_models
from warmline_cachectl.errors import EXIT_USAGE, fail
from warmline_cachectl.lookup import open_index, resolve_id, resolve_session_id, select_model
from warmline_cachectl.options import HOME, CommandApp, HomeOption, JsonOption, SessionArgument
from warmline_cachectl.views import tables
from warmline_cachectl.views import tree as tree_view
from warmline_cachectl.views import values as views
from warmline_cachectl.views.output import show
from warmline_cachectl.views.tree import Forest
from warmline_common.settings.parsers import make_integer_parser, make_option_parser
from warmline_common.storage.home import Home
from warmline_common.storage.segment_file import SegmentFileError, read_header

DEPTH_MAX = 1_000_000

app = CommandApp("Look")

_parse_depth = make_option_parser(make_integer_parser(0, DEPTH_MAX), typer.BadParameter)


@app.add(
    "List the conversations, or one's segments.",
    "cachectl ls",
    "cachectl ls SESSION  # its segments",
    "cachectl ls --model MODEL  # one model's conversations",
    name="ls",
)
def list_(
    session: SessionArgument = "",
    model: Annotated[
        str, typer.Option(help="Conversations of one model.", autocompletion=complete_models, show_default=False)
    ] = "",
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """List conversations, last used first; or the segments of one of them.

    `key` names the owner, where there are keys; it is the argument of purge --key.
    """
    if session and model:
        fail("name SESSION or --model, not both", EXIT_USAGE)
    forest = _read_forest(home, model)
    if session:
        view = views.build_segments(forest, resolve_session_id(forest.snapshot, session))
        return show(view, tables.render_segments(view), as_json)
    view = views.build_listing(forest, time.time())
    show(view, tables.render_listing(view), as_json)


@app.add(
    "Show all conversations, or one in detail.",
    "cachectl inspect",
    "cachectl inspect SESSION  # with its path",
    "cachectl inspect SEGMENT",
)
def inspect(
    item: Annotated[
        str,
        typer.Argument(
            help="A session, segment or checkpoint id, or its beginning.",
            autocompletion=complete_ids,
            show_default=False,
        ),
    ] = "",
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Show all conversations; or one with its path of segments; or one file's row.

    `alone` is what no other conversation shares, `files` are segments + checkpoints, `hits` those of its requests that
    reused a block (64 tokens) or more.
    """
    forest = _read_forest(home)
    if not item:
        view = views.build_conversations(forest, time.time())
        return show(view, tables.render_conversations(view), as_json)
    kind, row_id = resolve_id(forest.snapshot, item)
    if kind == "session":
        view = views.build_conversation(forest, row_id, time.time())
        return show(view, tables.render_conversation(view), as_json)
    view = views.build_file(forest, kind, row_id)
    view[kind]["bytes_uncompressed"] = _find_uncompressed_bytes(Home(home), row_id)
    show(view, tables.render_fields(view), as_json)


def _find_uncompressed_bytes(home: Home, file_id: str) -> int | None:
    """Size of a file if it were not compressed; None where its header can't be read."""
    try:
        return read_header(home.segment_file(file_id)).decoded_bytes
    except SegmentFileError:
        return None


@app.add(
    "Show how conversations share stored prefixes.", "cachectl tree", "cachectl tree --depth 2", "cachectl tree --json"
)
def tree(
    depth: Annotated[int, typer.Option("--depth", min=0, parser=_parse_depth, help="How many forks deep; 0: all.")] = 0,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Show a radix tree for each model and key: conversations with a common prefix share segments, and end at a ●.

    A line is a run of tokens up to the next fork, with its last segment's id. Where there are too many lines, the
    heaviest are shown; --json has all.
    """
    view = tree_view.build_tree(_read_forest(home), depth)
    show(view, tree_view.render_tree(view), as_json)


@app.add("Show totals, hits and misses.", "cachectl stats", "cachectl stats --json")
def stats(home: HomeOption = HOME, as_json: JsonOption = False) -> None:
    """Show what is on disk, and how the last requests went: up to 1,000 of them."""
    with open_index(home) as reader:
        view = views.build_stats(reader.totals(), reader.requests(), reader.snapshot())
    show(view, tables.render_stats(view), as_json)


def _read_forest(home: Path, model: str = "") -> Forest:
    with open_index(home) as reader:
        snapshot = select_model(reader.snapshot(), model)
        return Forest.from_snapshot(snapshot, client.read_owner_labels_if_readable(reader.home, snapshot))
