"""`warmline launchd` and `warmline service`: the same commands for launchd and for systemd."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from warmline_common.process.exit_codes import EXIT_CONFIGURATION
from warmline_common.settings.parsers import make_integer_parser, make_option_parser, parse_seconds
from warmline_common.settings.resolve import ConfigurationError, ResolvedConfig
from warmline_run.services import actions, logs
from warmline_run.services.actions import EXIT_MANAGER_FAILED, EXIT_NOT_READY, ServicePair
from warmline_run.services.manager import ServiceManager, ServiceManagerError
from warmline_run.services.service import ROLES, check_name, make_processes
from warmline_run.services.status import format_json, format_lines, read_status
from warmline_run.settings.cli_options import with_settings
from warmline_run.supervisor import print_message

WAIT_S = 1800.0  # the weights of the largest models take minutes to read, and at the first start to digest

LINES_MAX = 100_000


class Role(StrEnum):
    """Role as an argument; none means both."""

    proxy = "proxy"
    backend = "backend"


NameOption = Annotated[
    str, typer.Option("--name", metavar="NAME", help="act on a further pair, with its own home and ports")
]
WaitOption = Annotated[
    float,
    typer.Option(
        "--wait-s",
        min=0,
        parser=make_option_parser(parse_seconds, typer.BadParameter),
        metavar="S",
        help="seconds to wait for requests to be served; 0: none",
    ),
]
LinesOption = Annotated[
    int,
    typer.Option(
        "-n",
        "--lines",
        min=0,
        max=LINES_MAX,
        parser=make_option_parser(make_integer_parser(0, LINES_MAX), typer.BadParameter),
        help="of each file",
    ),
]
RoleArgument = Annotated[Role | None, typer.Argument(help="that one alone; else both", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="for programs instead of people")]


def make_app(group: str, display_name: str, short_help: str) -> typer.Typer:
    """Commands of one service manager, which is made when one of them is used; `group`: "launchd" or "service"."""
    app = typer.Typer(
        name=group,
        help=f"Keep proxy and backend running as {display_name}.  Exit codes: 0 fine, 1 not ready or not installed, "
        f"2 usage or configuration, 3 the service manager refused.",
        short_help=short_help,
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
            Path | None, typer.Option("--out", metavar="DIR", help="for --dry-run; else they are printed")
        ] = None,
    ) -> None:
        """Install both with these settings, and start them."""
        if out and not dry_run:
            raise ConfigurationError("--out is for --dry-run: agents are installed where they are looked for")
        if dry_run:
            _print_or_write_files(_make_manager(group), config, name, out)
            return
        with _open_pair(group, name) as pair:
            raise typer.Exit(actions.install(pair, config, os.environ, wait_s))

    @app.command()
    def uninstall(name: NameOption = "") -> None:
        """Stop both and remove their files.  What is stored stays."""
        with _open_pair(group, name) as pair:
            actions.uninstall(pair)

    _add_status_commands(app, group)
    return app


def _add_status_commands(app: typer.Typer, group: str) -> None:
    @app.command()
    def status(name: NameOption = "", as_json: JsonOption = False) -> None:
        """Show whether the services are installed, running and ready."""
        with _open_pair(group, name) as pair:
            found = read_status(pair)
            print(format_json(found) if as_json else "\n".join(format_lines(found)), flush=True)
            raise typer.Exit(0 if found.installed and found.ready else EXIT_NOT_READY)

    @app.command()
    def restart(which: RoleArgument = None, name: NameOption = "", wait_s: WaitOption = WAIT_S) -> None:
        """Start both anew, or one.

        While the proxy alone restarts, the backend keeps its model and its conversations in memory.
        """
        with _open_pair(group, name) as pair:
            raise typer.Exit(actions.restart(pair, [which] if which else ROLES, wait_s))

    @app.command("logs")
    def show_logs(
        which: RoleArgument = None,
        name: NameOption = "",
        count: LinesOption = 40,
        follow: Annotated[bool, typer.Option("-f", "--follow", help="and new lines, until Ctrl-C")] = False,
    ) -> None:
        """Show the last lines of their logs; the backend's include those of all models' backends."""
        with _open_pair(group, name) as pair:
            home = actions.find_home(pair)
            if home is None:
                pair.report_missing()
                raise typer.Exit(EXIT_NOT_READY)
            list_paths = partial(logs.list_log_files, home, [which] if which else ROLES)
            if not logs.show(list_paths(), count, _write) and not follow:
                print_message(f"nothing has been logged in {home / 'logs'}")
                raise typer.Exit(EXIT_NOT_READY)
            if follow:
                logs.follow(list_paths, _write)


def _make_manager(group: str) -> ServiceManager:
    if group == "launchd":
        from warmline_run.services.launchd import LaunchdManager  # here, since no other command needs these imports

        return LaunchdManager()
    from warmline_run.services.systemd import SystemdManager

    return SystemdManager()


@contextmanager
def _open_pair(group: str, name: str) -> Iterator[ServicePair]:
    """Pair of services; a failure becomes one line and an exit code."""
    try:
        check_name(name)
        manager = _make_manager(group)
        manager.check_tool_installed()
        yield ServicePair(manager, name, print_message)
    except (ConfigurationError, ServiceManagerError) as error:
        print_message(str(error))
        code = EXIT_CONFIGURATION if isinstance(error, ConfigurationError) else EXIT_MANAGER_FAILED
        raise typer.Exit(code) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _print_or_write_files(manager: ServiceManager, config: ResolvedConfig, name: str, folder: Path | None) -> None:
    for process in make_processes(config, os.environ, name):
        file = manager.service_file(process.service_id)
        if folder:
            manager.write_file(process, folder / file.name)
            print(folder / file.name)
        else:
            print(f"# {file.name}\n{manager.render_file(process)}")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
