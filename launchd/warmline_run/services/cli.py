"""`warmline launchd` and `warmline service`: the same verbs, kept by launchd or by systemd."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from warmline_common.process.exit_codes import EXIT_CONFIGURATION
from warmline_common.settings.resolve import ConfigurationError, ResolvedConfig
from warmline_run import supervisor as supervise
from warmline_run.services import actions as verbs
from warmline_run.services import logs
from warmline_run.services import status as standing
from warmline_run.services.actions import EXIT_MANAGER_FAILED, EXIT_NOT_READY, ServicePair
from warmline_run.services.manager import ServiceManager, ServiceManagerError
from warmline_run.services.service import ROLES, check_name
from warmline_run.settings.cli_options import with_settings

WAIT_S = 1800.0  # the weights of the largest models take minutes to read, and at the first start to digest


class Role(StrEnum):
    """As an argument; none means both."""

    proxy = "proxy"
    backend = "backend"


NameOption = Annotated[
    str, typer.Option("--name", metavar="NAME", help="mean a further pair, with a home and ports of its own")
]
WaitOption = Annotated[
    float, typer.Option("--wait-s", min=0, metavar="S", help="seconds to wait for requests to be served; 0: none")
]
RoleArgument = Annotated[Role | None, typer.Argument(help="that one alone; else both", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="for programs instead of people")]


def make_app(make_manager: Callable[[], ServiceManager], display_name: str) -> typer.Typer:
    """The verbs for one service manager, which is made when one of them is used."""
    app = typer.Typer(
        help=f"Keep proxy and backend running as {display_name}.  Exit codes: 0 fine, 1 not ready or not installed, "
        f"2 usage or configuration, 3 the service manager refused.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
    )

    @app.command()
    @with_settings
    def install(
        config: ResolvedConfig,
        name: NameOption = "",
        wait_s: WaitOption = WAIT_S,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="only write the files, or print them")] = False,
        out: Annotated[
            Path | None,
            typer.Option("--out", metavar="DIR", help="for --dry-run; else they are printed"),
        ] = None,
    ) -> None:
        """Install both with these settings, and start them."""
        if out and not dry_run:
            raise ConfigurationError("--out is for --dry-run: agents are installed where they are looked for")
        if dry_run:
            _print_or_write_files(make_manager(), config, name, out)
            return
        with _open_pair(make_manager, name) as pair:
            _exit_unless_zero(verbs.install(pair, config, os.environ, wait_s))

    @app.command()
    def uninstall(name: NameOption = "") -> None:
        """Stop both and remove their files.  What is stored stays."""
        with _open_pair(make_manager, name) as pair:
            _exit_unless_zero(verbs.uninstall(pair))

    _add_status_commands(app, make_manager)
    return app


def _add_status_commands(app: typer.Typer, make_manager: Callable[[], ServiceManager]) -> None:
    @app.command()
    def status(name: NameOption = "", as_json: JsonOption = False) -> None:
        """Show whether the services are installed, running and ready."""
        with _open_pair(make_manager, name) as pair:
            found = standing.read_status(pair)
            shown = json.dumps(found.as_json(), indent=2) if as_json else "\n".join(standing.format_lines(found))
            print(shown, flush=True)
            _exit_unless_zero(0 if found.installed and found.ready else EXIT_NOT_READY)

    @app.command()
    def restart(which: RoleArgument = None, name: NameOption = "", wait_s: WaitOption = WAIT_S) -> None:
        """Start both anew, or one.

        While the proxy alone restarts, the backend keeps its model and its conversations in memory.
        """
        with _open_pair(make_manager, name) as pair:
            _exit_unless_zero(verbs.restart(pair, _select_roles(which), wait_s))

    @app.command("logs")
    def show_logs(
        which: RoleArgument = None,
        name: NameOption = "",
        count: Annotated[int, typer.Option("-n", "--lines", min=0, max=100_000, help="of each file")] = 40,
        follow: Annotated[bool, typer.Option("-f", "--follow", help="and what is added, until Ctrl-C")] = False,
    ) -> None:
        """Show the last lines of their logs."""
        with _open_pair(make_manager, name) as pair:
            _exit_unless_zero(_show_logs(pair, which, count, follow))


@contextmanager
def _open_pair(make_manager: Callable[[], ServiceManager], name: str) -> Iterator[ServicePair]:
    """Turns what goes wrong into one line and an exit code."""
    try:
        check_name(name)
        manager = make_manager()
        manager.check_tool_installed()
        yield ServicePair(manager, name, supervise.print_message)
    except ConfigurationError as error:
        supervise.print_message(str(error))
        raise typer.Exit(EXIT_CONFIGURATION) from None
    except ServiceManagerError as error:
        supervise.print_message(str(error))
        raise typer.Exit(EXIT_MANAGER_FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _exit_unless_zero(code: int) -> None:
    if code:
        raise typer.Exit(code)


def _print_or_write_files(manager: ServiceManager, config: ResolvedConfig, name: str, out: Path | None) -> None:
    if out:
        for path in verbs.write_files(manager, config, os.environ, name, out):
            print(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        for path in verbs.write_files(manager, config, os.environ, name, Path(folder)):
            print(f"# {path.name}\n{path.read_text()}")


def _show_logs(pair: ServicePair, role: Role | None, count: int, follow: bool) -> int:
    home = verbs.find_home(pair)
    if home is None:
        pair.report_missing()
        return EXIT_NOT_READY
    paths = logs.list_log_files(home, _select_roles(role))
    if not logs.show(paths, count, _write) and not follow:
        supervise.print_message(f"nothing has been logged in {home / 'logs'}")
        return EXIT_NOT_READY
    if follow:
        logs.follow(paths, _write)
    return 0


def _select_roles(role: Role | None) -> list[str]:
    return [role.value] if role else list(ROLES)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
