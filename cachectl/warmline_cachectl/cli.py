"""`cachectl`: look at what is stored, check it, change it; the verbs are in rooms of their own, one line each here."""

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from warmline_cachectl.commands import archive as moving_cli
from warmline_cachectl.commands import doctor as doctor_cli
from warmline_cachectl.commands import explain as explain_cli
from warmline_cachectl.commands import inspect as looking_cli
from warmline_cachectl.commands import keys as keys_cli
from warmline_cachectl.commands import modify as changing_cli
from warmline_cachectl.commands import top as top_cli
from warmline_cachectl.commands import verify as checking_cli
from warmline_cachectl.options import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_REFUSED, fail
from warmline_common.process.version import version


class CommandGroup(TyperGroup):
    """Help that lists the verbs by what they are for (their `rich_help_panel`), in plain text.

    What can't be printed ends the command with a code of its own: 1 would say that something was found.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                if sys.stdout is not None:  # it may be closed
                    sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else what is left is tried at the end
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        except SystemExit:  # so does rich tell of the same
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        except typer.Abort:  # where it asked
            fail("nothing was changed", EXIT_INTERRUPTED)
        except OSError as error:
            fail(str(error), EXIT_REFUSED)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            groups.setdefault(str(getattr(command, "rich_help_panel", None) or "Commands"), []).append(
                (name, command.get_short_help_str(formatter.width))
            )
        for group, rows in groups.items():
            with formatter.section(group):
                formatter.write_dl(rows, col_max=12)


app = typer.Typer(
    cls=CommandGroup,
    help="Looks at what Warmline has stored, checks it, changes it; whether the proxy runs or not.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(looking_cli.app)
app.add_typer(explain_cli.app)
app.add_typer(top_cli.app)
app.add_typer(checking_cli.app)
app.add_typer(doctor_cli.app)
app.add_typer(changing_cli.app)
app.add_typer(moving_cli.app)
app.add_typer(keys_cli.group)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"cachectl {version()}")
        raise typer.Exit


@app.callback()
def _main(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...
