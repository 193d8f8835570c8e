"""Options and help that the commands of cachectl share."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from warmline_cachectl.completion import complete_session_ids
from warmline_cachectl.errors import set_command_home
from warmline_common.storage.home import Home

HomeOption = Annotated[
    Path, typer.Option("--home", envvar="WARMLINE_HOME", help="The home directory.", callback=set_command_home)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
SessionArgument = Annotated[
    str,
    typer.Argument(
        metavar="SESSION",
        help="A conversation's id, or its beginning.",
        autocompletion=complete_session_ids,
        show_default=False,
    ),
]
HOME = Path("~/.warmline")

Command = TypeVar("Command", bound=Callable[..., Any])


def move_shared_options(arguments: list[str]) -> list[str]:
    """Move `--home` and `--json` from before a command's name to behind it, where the command takes them."""
    before = 0
    while before < len(arguments):
        if arguments[before] == "--home":
            before += 2
        elif arguments[before] == "--json" or arguments[before].startswith("--home="):
            before += 1
        else:
            break
    return [*arguments[before : before + 1], *arguments[:before], *arguments[before + 1 :]]


class SharedOptionsGroup(TyperGroup):
    """Group of commands that lets the options that they share stand before the command's name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, move_shared_options(args))


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
