"""Commands of `warmline models`."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from warmline_common.process.exit_codes import EXIT_CONFIGURATION
from warmline_common.process.redaction import escape_unprintable
from warmline_common.settings.table import SETTINGS
from warmline_run.models.changes import describe_load, describe_pin, describe_unload, list_unloaded
from warmline_run.models.client import ListedModel, ModelList, ModelsClient, ModelsCommandError, parse_models_answer
from warmline_run.models.table import format_models
from warmline_run.supervisor import print_message

EXIT_INTERRUPTED = 130  # shells' code for SIGINT

HomeOption = Annotated[
    str, typer.Option("--home", envvar="WARMLINE_HOME", metavar="DIR", help="that the pair runs from")
]
JsonOption = Annotated[bool, typer.Option("--json", help="for programs instead of people")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="a model's name or alias", show_default=False)]
HOME = str(SETTINGS["home"].default)

app = typer.Typer(
    name="models",
    help="List, load, unload and pin the models of a running pair.  Exit codes: 0 fine, 1 no such model, 2 usage, "
    "3 no pair runs, or it refused.",
    short_help="List, load, unload and pin the models of a running pair.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@app.command("ls")
def list_models(home: HomeOption = HOME, as_json: JsonOption = False) -> None:
    """List all models: stage, memory, requests, last use."""
    with _open_client(home) as client:
        answer = client.list_models()
        if as_json:
            return _print_json(answer)
        print("\n".join(format_models(parse_models_answer(answer), time.time())))


@app.command()
def load(
    name: NameArgument,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="until it is loaded")] = True,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Load a model.

    Others are unloaded where it needs their memory.
    """
    with _open_client(home) as client:
        _run(client, lambda: client.load(name, wait=wait), name, describe_load, as_json)


@app.command()
def unload(name: NameArgument, home: HomeOption = HOME, as_json: JsonOption = False) -> None:
    """Unload a model.

    Its stored conversations stay; a request for it loads it again.
    """
    with _open_client(home) as client:
        _run(client, lambda: client.unload(name), name, describe_unload, as_json)


@app.command()
def pin(
    name: NameArgument,
    off: Annotated[bool, typer.Option("--off", help="let it be unloaded again")] = False,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Load a model and keep it loaded, also after a restart of the pair.

    A pin set here goes before `pinned` in the model's table; so does --off.
    """
    with _open_client(home) as client:
        _run(client, lambda: client.pin(name, pinned=not off), name, describe_pin, as_json)


@contextmanager
def _open_client(home: str) -> Iterator[ModelsClient]:
    """Client of a home's proxy; a failure becomes one line and an exit code."""
    try:
        yield ModelsClient(Path(str(SETTINGS["home"].parse(home))))
    except ValueError as error:
        print_message(f"--home: {error}, not {home!r}")
        raise typer.Exit(EXIT_CONFIGURATION) from None
    except ModelsCommandError as error:
        print_message(escape_unprintable(str(error)))
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _run(
    client: ModelsClient,
    command: Callable[[], dict[str, Any]],
    name: str,
    describe: Callable[[ListedModel, ListedModel], str],
    as_json: bool,
) -> None:
    """Send the command, and print what it has changed, or its answer, which has all models."""
    before, answer = parse_models_answer(client.list_models()), command()
    if as_json:
        return _print_json(answer)
    after = parse_models_answer(answer)
    if (old := _find_model(before, name)) and (new := _find_model(after, name)):
        print(escape_unprintable(describe(old, new)))
        if unloaded := ", ".join(list_unloaded(before, after, new.name)):
            print(escape_unprintable(f"unloaded meanwhile: {unloaded}"))


def _find_model(listed: ModelList, name: str) -> ListedModel | None:
    return next((model for model in listed.models if name in (model.name, *model.aliases)), None)


def _print_json(answer: dict[str, Any]) -> None:
    print(json.dumps(answer, indent=2, ensure_ascii=False))
