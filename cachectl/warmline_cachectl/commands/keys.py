"""`cachectl key`: clients' keys and the admin key.  A running proxy applies changes at once.

Exit codes: 0 success, 1 no such key, 2 usage, 3 refused (the name is taken, or the file can't be used).
"""

from contextlib import suppress
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from warmline_cachectl import client
from warmline_cachectl.errors import ADD_KEY_HINT, EXIT_USAGE, exit_on_error, fail
from warmline_cachectl.options import HOME, CommandApp, HomeOption, JsonOption, SharedOptionsGroup, make_home
from warmline_cachectl.views import tables
from warmline_cachectl.views.output import show as show_view
from warmline_common.protocol.tokens import namespace
from warmline_common.settings.hints import add_home
from warmline_common.storage.home import Home
from warmline_proxy.auth import key_store
from warmline_proxy.auth.key_store import ADMIN_KIND, KeyEntry
from warmline_proxy.auth.owners import REMOVED_LABEL
from warmline_proxy.index.index import IndexStoreError
from warmline_proxy.store.rows import PurgeRequest

ROOT_CHARS = 8  # as `cachectl tree` shows it

NameArgument = Annotated[str, typer.Argument(help="Whose key; without it the only one, or the one called default.")]

app = CommandApp(
    cls=SharedOptionsGroup, no_args_is_help=True, help="Show, make, renew and remove the keys that clients need."
)
group = typer.Typer()
group.add_typer(app, name="key", rich_help_panel="Change", short_help="Show, make, renew and remove clients' keys.")


@app.add(
    "Print a key, and nothing else.",
    "cachectl key show  # the only client's key, or the one called default",
    "cachectl key show admin  # what /admin asks for on other machines; made on first use",
)
def show(name: NameArgument = "", home: HomeOption = HOME, as_json: JsonOption = False) -> None:
    """Print a client's key; `admin`: the one that opens /admin and /warmline, made on first use."""
    place = make_home(home)
    with exit_on_error():
        if name == ADMIN_KIND:
            entry = key_store.ensure_key(place, ADMIN_KIND)
        else:
            entry = key_store.find_key(key_store.read_keys(place), name)
    _show_key(entry, as_json)


@app.add("List the keys' names.", "cachectl key list  # never the keys themselves", name="list")
def list_(home: HomeOption = HOME, as_json: JsonOption = False) -> None:
    """List the names of all keys, and since when each has its present value."""
    place = make_home(home)
    with exit_on_error():
        entries = key_store.read_keys(place)
    table = Table("name", "kind", "since")
    for each in entries:
        table.add_row(each.name, each.kind, tables.format_age(each.created))
    shown = [{"name": each.name, "kind": each.kind, "created": each.created} for each in entries]
    show_view({"keys": shown}, [table] if entries else [add_home(f"no keys; {ADD_KEY_HINT}", place.root)], as_json)


@app.add("Make a client's key.", "cachectl key add laptop  # a key with a cache of its own, printed")
def add(
    name: Annotated[str, typer.Argument(help="Whose: a person, a machine, a program.")],
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it.  Its stored data is reused for no other key, unless share_cache is set."""
    try:
        key_store.check_key_name(name)
    except key_store.KeyStoreError as error:
        fail(str(error), EXIT_USAGE)
    with exit_on_error():
        entry = key_store.add_key(make_home(home), name)
    _show_key(entry, as_json)


@app.add(
    "Give a key another value.",
    "cachectl key rotate laptop  # the old one opens nothing any more, the cache stays warm",
)
def rotate(name: NameArgument = "", home: HomeOption = HOME, as_json: JsonOption = False) -> None:
    """Give a key another value and print that.  The key keeps its stored data."""
    with exit_on_error():
        entry = key_store.rotate_key(make_home(home), name)
    _show_key(entry, as_json)


@app.add("Remove a key.", "cachectl key remove laptop", "cachectl key remove laptop --purge  # and its stored data")
def remove(
    name: Annotated[str, typer.Argument(help="Whose.")],
    purge: Annotated[bool, typer.Option("--purge", help="Remove its stored data, too.")] = False,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Remove a key.  Its stored data is not used any more, and stays until the space is needed."""
    place = make_home(home)
    roots, stored = list[str](), list[str]()
    # without --purge a key can be removed whatever is stored
    with exit_on_error() if purge else suppress(client.CachectlError, IndexStoreError):
        roots, stored = _find_stored_roots(place, name)
    with exit_on_error():
        entry = key_store.remove_key(place, name)
    view: dict[str, Any] = {"removed": entry.name, "stored": stored, "purged": None}
    lines = [f"removed {entry.name}"]
    if purge and roots:  # after the key, so that nothing is stored under it any more
        with exit_on_error():
            reply = client.purge(place, PurgeRequest(roots=roots))
        view |= {"stored": [], "purged": msgspec.to_builtins(reply)}
        lines.append(tables.format_purge(reply))
    elif stored:
        lines.append(add_home(_format_purge_hint(stored), place.root))
    show_view(view, lines, as_json)


def _find_stored_roots(home: Home, name: str) -> tuple[list[str], list[str]]:
    """(roots of a key's conversations in hex, those with stored data).  Raises CachectlError, IndexStoreError."""
    try:
        with client.open_reader(home) as reader:
            snapshot, fingerprints = reader.snapshot(), reader.response_fingerprints()
            labels = client.read_owner_labels_if_readable(home, snapshot)
    except client.HomeNotFoundError:
        return [], []
    tenants = [entry.tenant for entry in key_store.read_client_keys(home) if entry.name == name]
    own = {namespace(fingerprint, tenant).hex() for fingerprint in fingerprints.values() for tenant in tenants}
    own |= {root for root, word in labels.words.items() if word == name in labels.keys}
    stored = {row.root.hex() for row in snapshot.segments.values()} | {root.hex() for root in fingerprints}
    return sorted(own), sorted(own & stored)


def _format_purge_hint(roots: list[str]) -> str:
    one = f" {roots[0][:ROOT_CHARS]}" if len(roots) == 1 else ""
    command = f"cachectl purge --key '{REMOVED_LABEL}{one}'"
    return f"its stored data stays until the space is needed; `{command}` removes it"


def _show_key(entry: KeyEntry, as_json: bool) -> None:
    """Print a key on a line of its own, for a shell's $( )."""
    if as_json:
        show_view({"name": entry.name, "kind": entry.kind, "key": entry.key, "created": entry.created}, [], as_json)
    else:
        print(entry.key)
