"""What all verbs of cachectl have in common: options, exit codes, how they read a home, how they fail, their help.

Exit codes: 0 fine, 1 findings or nothing matched, 2 usage or no home, 3 refused (in use, the proxy said no, or
not all could be done), 130 stopped, 141 nobody read on.
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
from warmline_proxy.index.index import IndexFailure, IndexReader
from warmline_proxy.store.rows import Snapshot

EXIT_OK, EXIT_FOUND, EXIT_USAGE, EXIT_REFUSED = 0, 1, 2, 3
EXIT_STOPPED, EXIT_UNREAD = 130, 141  # as shells say it of SIGINT and SIGPIPE

LOOKING, CHECKING, CHANGING = "Look", "Check", "Change"  # the groups of the help

HomeOption = Annotated[Path, typer.Option("--home", envvar="WARMLINE_HOME", help="The home directory.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
HOME = Path("~/.warmline")


def examples(*lines: str) -> str:
    """An epilog for a verb's help; each line is a command that runs, with what it does after `  # `."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def home_at(path: Path) -> Home:
    return Home(path.expanduser().absolute())


@contextmanager
def reading(path: Path) -> Iterator[IndexReader]:
    """The index of the home at `path`; errors become a line and an exit code, as in `failing`."""
    with failing(), client.open_reader(home_at(path)) as reader:
        yield reader


@contextmanager
def failing() -> Iterator[None]:
    """Errors that have a reason for people become a line and an exit code."""
    try:
        yield
    except BrokenPipeError:  # whoever read the output: `cli` says so
        raise
    except client.NoHome as error:
        fail(str(error), EXIT_USAGE)
    except (client.CannotDo, IndexFailure, OSError) as error:
        fail(str(error), EXIT_REFUSED)


def fail(message: str, code: int) -> NoReturn:
    print(f"cachectl: {printable(message)}", file=sys.stderr)  # it may name what an archive calls its model
    raise typer.Exit(code)


def resolved(snapshot: Snapshot, typed: str) -> tuple[str, str]:
    """("session", "segment", "checkpoint" or "quarantined", full id) of an id or its beginning, or the command ends."""
    try:
        kind, row_id = views.resolve(snapshot, typed)
    except views.Ambiguous as error:
        fail(str(error), EXIT_USAGE)
    if not kind:
        fail(views.unknown(snapshot, typed), EXIT_USAGE if len(typed) < views.ID_PREFIX_MIN else EXIT_FOUND)
    return kind, row_id


def session_id(snapshot: Snapshot, typed: str) -> str:
    """The full id of a session; "" for "".  Ends the command where it is none."""
    if not typed:
        return ""
    kind, row_id = resolved(snapshot, typed)
    if kind != "session":
        fail(f"{typed} is a {kind}, not a session", EXIT_USAGE)
    return row_id
