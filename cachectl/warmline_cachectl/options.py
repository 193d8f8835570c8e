"""Options, exit codes, errors and help that all commands of cachectl share.

Exit codes: 0 success, 1 findings or nothing matched, 2 usage or no home, 3 refused (in use, the proxy refused, or not
all could be done), 130 interrupted, 141 closed output.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from warmline_cachectl import client
from warmline_cachectl.views import values as views
from warmline_cachectl.views.columns import printable
from warmline_common.storage.home import Home
from warmline_proxy.index.index import IndexReader, IndexStoreError
from warmline_proxy.store.rows import IndexSnapshot

EXIT_OK, EXIT_FOUND, EXIT_USAGE, EXIT_REFUSED = 0, 1, 2, 3
EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 130, 141  # as shells say it of SIGINT and SIGPIPE

LOOK_GROUP, CHECK_GROUP, CHANGE_GROUP = "Look", "Check", "Change"  # the groups of the help

HomeOption = Annotated[Path, typer.Option("--home", envvar="WARMLINE_HOME", help="The home directory.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
HOME = Path("~/.warmline")


def format_examples(*lines: str) -> str:
    """An epilog for a verb's help; each line is a command that runs, with what it does after `  # `."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def make_home(path: Path) -> Home:
    return Home(path.expanduser().absolute())


@contextmanager
def open_index(path: Path) -> Iterator[IndexReader]:
    """The index of the home at `path`; errors become a line and an exit code, as in `failing`."""
    with exit_on_error(), client.open_reader(make_home(path)) as reader:
        yield reader


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Errors that have a reason for people become a line and an exit code."""
    try:
        yield
    except BrokenPipeError:  # whoever read the output: `cli` says so
        raise
    except client.HomeNotFoundError as error:
        fail(str(error), EXIT_USAGE)
    except (client.CachectlError, IndexStoreError, OSError) as error:
        fail(str(error), EXIT_REFUSED)


def fail(message: str, code: int) -> NoReturn:
    print(f"cachectl: {printable(message)}", file=sys.stderr)  # it may name what an archive calls its model
    raise typer.Exit(code)


def resolve_id(snapshot: IndexSnapshot, typed: str) -> tuple[str, str]:
    """("session", "segment", "checkpoint" or "quarantined", full id) of an id or its beginning, or the command ends."""
    try:
        kind, row_id = views.find_id(snapshot, typed)
    except views.AmbiguousIdError as error:
        fail(str(error), EXIT_USAGE)
    if not kind:
        fail(views.describe_unknown_id(snapshot, typed), EXIT_USAGE if len(typed) < views.ID_PREFIX_MIN else EXIT_FOUND)
    return kind, row_id


def resolve_session_id(snapshot: IndexSnapshot, typed: str) -> str:
    """The full id of a session; "" for "".  Ends the command where it is none."""
    if not typed:
        return ""
    kind, row_id = resolve_id(snapshot, typed)
    if kind != "session":
        fail(f"{typed} is a {kind}, not a session", EXIT_USAGE)
    return row_id
