"""`cachectl`: inspects, checks and changes what is stored; its commands are in `commands`."""

import sys
from typing import Annotated, Any

import typer

from warmline_cachectl.commands import archive, doctor, explain, inspect, keys, modify, prewarm, top, verify
from warmline_cachectl.errors import EXIT_INTERRUPTED, EXIT_REFUSED, fail, fail_on_os_error
from warmline_cachectl.options import SharedOptionsGroup
from warmline_common.process.exit_codes import run_with_output
from warmline_common.process.version import version


class CommandGroup(SharedOptionsGroup):
    """Group with a plain-text help, by headings (`rich_help_panel`), and exit codes for failed output.

    Output that can't be printed ends the command with a code of its own: 1 would mean findings.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # for `main`
            raise
        except typer.Abort:  # of a question
            fail("nothing was changed", EXIT_INTERRUPTED)
        except OSError as error:
            fail_on_os_error(error, is_output=True)

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
    help="Looks at what Warmline has stored, checks it, changes it; whether the proxy runs or not.\n\n"
    "--home DIR and --json may stand before the command or after it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for commands in (inspect, explain, top, verify, doctor, modify, prewarm, archive):
    app.add_typer(commands.app)
app.add_typer(keys.group)


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


def main() -> None:
    """Run `app`, with a code of its own for output that can't be printed, also that of `--help`."""
    sys.exit(run_with_output(app, "cachectl", EXIT_REFUSED))


if __name__ == "__main__":
    main()
