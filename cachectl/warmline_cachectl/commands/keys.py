"""`cachectl key`: the keys that clients show, and the admin key.  A proxy that runs hears of changes at once.

Exit codes: 0 fine, 1 there is no such key, 2 usage, 3 refused (the name is taken, or the file can't be used).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from warmline_cachectl import client
from warmline_cachectl.options import (
    CHANGE_GROUP,
    EXIT_FOUND,
    EXIT_REFUSED,
    EXIT_USAGE,
    HOME,
    HomeOption,
    JsonOption,
    exit_on_error,
    fail,
    format_examples,
    make_home,
)
from warmline_cachectl.views import tables
from warmline_cachectl.views.output import show as show_view
from warmline_common.storage.home import Home
from warmline_proxy.auth import key_store as keys_file
from warmline_proxy.auth.key_store import ADMIN_KIND, KeyEntry
from warmline_proxy.auth.owners import REMOVED_LABEL
from warmline_proxy.index.index import IndexStoreError
from warmline_proxy.store.rows import PurgeRequest

ROOT_CHARS = 8  # as `cachectl tree` shows it
ADD_KEY_HINT = "make one with `cachectl key add NAME`, or start with `warmline serve --lan`"

NameArgument = Annotated[str, typer.Argument(help="Whose key; without it the only one, or the one called default.")]

app = typer.Typer(no_args_is_help=True, help="Show, make, renew and remove the keys that clients need.")
group = typer.Typer()
group.add_typer(app, name="key", rich_help_panel=CHANGE_GROUP, short_help="Show, make, renew and remove clients' keys.")


@app.command(
    short_help="Print a key, and nothing else.",
    epilog=format_examples(
        "cachectl key show  # the only client's key, or the one called default",
        "cachectl key show admin  # what /admin asks for on other machines; made on first use",
    ),
)
def show(name: NameArgument = "", home: HomeOption = HOME, as_json: JsonOption = False) -> None:
    """Print a client's key; `admin`: the one that opens /admin and /warmline, made on first use."""
    place = make_home(home)
    with _exit_on_key_error():
        entry = (
            keys_file.ensure_key(place, ADMIN_KIND)
            if name == ADMIN_KIND
            else keys_file.find_key(keys_file.read_keys(place), name)
        )
    _show_key(entry, as_json)


@app.command(
    "list", short_help="List the keys' names.", epilog=format_examples("cachectl key list  # never the keys themselves")
)
def list_(home: HomeOption = HOME, as_json: JsonOption = False) -> None:
    """List the names of all keys, and since when each has its present value."""
    with _exit_on_key_error():
        entries = keys_file.read_keys(make_home(home))
    table = Table("name", "kind", "since")
    for each in entries:
        table.add_row(each.name, each.kind, f"{tables.format_duration(max(0.0, time.time() - each.created))} ago")
    shown = [{"name": each.name, "kind": each.kind, "created": each.created} for each in entries]
    show_view({"keys": shown}, [table] if entries else [f"no keys; {ADD_KEY_HINT}"], as_json)


@app.command(
    short_help="Make a client's key.",
    epilog=format_examples("cachectl key add laptop  # a key with a cache of its own, printed"),
)
def add(
    name: Annotated[str, typer.Argument(help="Whose: a person, a machine, a program.")],
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it.  What is stored under it is reused for no other key, unless share_cache is set."""
    _check_name(name)
    with _exit_on_key_error():
        entry = keys_file.add_key(make_home(home), name)
    _show_key(entry, as_json)


@app.command(
    short_help="Give a key another value.",
    epilog=format_examples("cachectl key rotate laptop  # the old one opens nothing any more, the cache stays warm"),
)
def rotate(name: NameArgument = "", home: HomeOption = HOME, as_json: JsonOption = False) -> None:
    """Give a key another value and print that.  What is stored under it is still its own."""
    with _exit_on_key_error():
        entry = keys_file.rotate_key(make_home(home), name)
    _show_key(entry, as_json)


@app.command(
    short_help="Remove a key.",
    epilog=format_examples(
        "cachectl key remove laptop", "cachectl key remove laptop --purge  # and what is stored under it"
    ),
)
def remove(
    name: Annotated[str, typer.Argument(help="Whose.")],
    purge: Annotated[bool, typer.Option("--purge", help="Remove what is stored under it, too.")] = False,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Remove a key.  What is stored under it is used by nobody any more, and stays until its room is needed."""
    place = make_home(home)
    roots: list[str] = []
    stored: list[str] = []
    with (
        exit_on_error() if purge else suppress(client.CachectlError, IndexStoreError)
    ):  # a key can be removed whatever is stored
        roots, stored = _find_stored_roots(place, name)
    with _exit_on_key_error():
        entry = keys_file.remove_key(place, name)
    view: dict[str, Any] = {"removed": entry.name, "stored": stored, "purged": None}
    told = [f"removed {entry.name}"]
    if purge and roots:  # after the key, so that nothing is stored under it any more
        with exit_on_error():
            reply = client.purge(place, PurgeRequest(roots=roots))
        view |= {"stored": [], "purged": msgspec.to_builtins(reply)}
        told.append(tables.format_purge(reply))
    elif stored:
        told.append(_format_purge_hint(stored))
    show_view(view, told, as_json)


def _find_stored_roots(home: Home, name: str) -> tuple[list[str], list[str]]:
    """The roots that a key's conversations have, in hex, and those of them that something is stored under.

    Raises CannotDo, IndexFailure.
    """
    try:
        with client.open_reader(home) as reader:
            snapshot = reader.snapshot()
            known = client.read_owner_labels_if_readable(home, snapshot)
    except client.HomeNotFoundError:
        return [], []
    roots = [root for root, word in known.words.items() if word == name in known.keys]
    return roots, [root for root in roots if bytes.fromhex(root) in {row.root for row in snapshot.segments.values()}]


def _format_purge_hint(roots: list[str]) -> str:
    one = f" {roots[0][:ROOT_CHARS]}" if len(roots) == 1 else ""
    command = f"cachectl purge --key '{REMOVED_LABEL}{one}'"
    return f"what is stored under it stays until its room is needed; `{command}` removes it"


def _show_key(entry: KeyEntry, as_json: bool) -> None:
    """On a line of its own, as a shell's $( ) wants it."""
    if not as_json:
        print(entry.key)
        return
    view: dict[str, Any] = {"name": entry.name, "kind": entry.kind, "key": entry.key, "created": entry.created}
    show_view(view, [], as_json)


def _check_name(name: str) -> None:
    try:
        keys_file.check_key_name(name)
    except keys_file.KeyStoreError as error:
        fail(str(error), EXIT_USAGE)


@contextmanager
def _exit_on_key_error() -> Iterator[None]:
    try:
        yield
    except keys_file.NoClientKeysError as error:
        fail(f"{error}; {ADD_KEY_HINT}", EXIT_FOUND)
    except keys_file.KeyNotFoundError as error:
        fail(str(error), EXIT_FOUND)
    except keys_file.KeyStoreError as error:
        fail(str(error), EXIT_REFUSED)
