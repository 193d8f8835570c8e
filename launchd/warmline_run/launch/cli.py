"""`warmline launch`."""

import asyncio
import os
from typing import Annotated

import typer

from warmline_common.process.exit_codes import EXIT_CONFIGURATION
from warmline_common.settings.resolve import ConfigurationError, describe_misspelt_variables, resolve
from warmline_run.launch.clients import CLIENTS
from warmline_run.launch.server import LaunchError
from warmline_run.launch.session import LaunchOptions, describe_launch, launch
from warmline_run.supervisor import print_message

NAMES = ", ".join(CLIENTS)


def launch_client(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"one of {NAMES}", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGUMENTS", help="for the client, which has its own", show_default=False),
    ] = None,
    home: Annotated[str | None, typer.Option("--home", metavar="DIR", help="that the pair runs from")] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="NAME",
            help="one of the served models; for a pair that is started here also a folder or repository",
        ),
    ] = "",
    url: Annotated[str, typer.Option("--url", metavar="URL", help="of a server elsewhere; none is started")] = "",
    key: Annotated[
        str,
        typer.Option("--key", metavar="KEY", help="of clients; default: WARMLINE_CLIENT_KEY, else the home's only one"),
    ] = "",
    keep: Annotated[bool, typer.Option("--keep", help="leave a pair that was started here running")] = False,
    show_only: Annotated[bool, typer.Option("--print", help="print variables and command, run nothing")] = False,
) -> None:
    """Start a client with the settings that have it use the pair.

    A pair is started where none runs, and stopped when the client ends.  Exit codes: the client's, 127 where it is not
    installed, 130 after Ctrl-C before its start, 2 usage.
    """
    for line in describe_misspelt_variables(os.environ):
        print_message(line)
    try:
        if (client := CLIENTS.get(name)) is None:
            raise ConfigurationError(f"there is no client {name!r} to launch; there are {NAMES}")
        config = resolve({"home": home}, os.environ)
        options = LaunchOptions(url=url, model=model, key=key, keep=keep)
        if show_only:
            return print(describe_launch(client, config, options, arguments or []))
        code = asyncio.run(launch(client, config, options, arguments or [], os.environ))
    except ConfigurationError as error:
        print_message(str(error))
        raise typer.Exit(EXIT_CONFIGURATION) from None
    except LaunchError as error:
        print_message(str(error))
        raise typer.Exit(error.exit_code) from None
    except OSError as error:
        name = error.filename or "a file of the home"
        print_message(
            f"{name} can't be used: {error.strerror or error}; see its permissions, and the space on its disk"
        )
        raise typer.Exit(EXIT_CONFIGURATION) from None
    raise typer.Exit(code)
