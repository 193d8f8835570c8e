"""Options and help that the commands of cachectl share."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from warmline_cachectl.completion import complete_session_ids
from warmline_common.storage.home import Home

HomeOption = Annotated[Path, typer.Option("--home", envvar="WARMLINE_HOME", help="The home directory.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
SessionArgument = Annotated[
    str,
    typer.Argument(
        help="A conversation's id, or its beginning.", autocompletion=complete_session_ids, show_default=False
    ),
]
HOME = Path("~/.warmline")

Command = TypeVar("Command", bound=Callable[..., Any])


class CommandApp(typer.Typer):
    """Commands that the help lists under one heading: "Look", "Check" or "Change"."""

    def __init__(self, heading: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self._heading = heading or None

    def add(self, short_help: str, *examples: str, name: str | None = None) -> Callable[[Command], Command]:
        """Decorator of a command.  Each example is a command that runs, with its effect after `  # `."""
        epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples)
        return self.command(name, short_help=short_help, rich_help_panel=self._heading, epilog=epilog)


def make_home(path: Path) -> Home:
    return Home(path.expanduser().absolute())
