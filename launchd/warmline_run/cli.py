"""`warmline`: starts the pair or one of the two, examines models and servers, or shows the settings in force."""

import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from warmline_run import exit as kept
from warmline_run import openblas, ports
from warmline_run import probe as asking
from warmline_run import processes as commands
from warmline_run import startup_report as summary
from warmline_run import supervisor as supervise
from warmline_run.address import address_of
from warmline_run.services.cli import group
from warmline_run.services.manager import ServiceManager
from warmline_run.settings.cli_options import with_settings
from warmline_run.settings.resolve import EXIT_CONFIGURATION, Config, ConfigurationError, Effective, resolve
from warmline_run.settings.schema import SETTINGS

app = typer.Typer(
    help="A caching proxy in front of an MLX model: what was prefilled once is never prefilled again.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"warmline {version('warmline')}")
        raise typer.Exit


@app.callback()
def _main(
    asked: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None: ...


@app.command()
@with_settings
def serve(config: Config) -> None:
    """Run proxy and backend together; restart what dies."""
    _check_ports_free(config)
    _advise(os.environ)
    try:
        model = commands.model_to_load(config)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    code = supervise.run(
        commands.backend(config, model, os.environ),
        commands.proxy(config, os.environ),
        address_of(config),
        partial(asking.needs_key, address_of(config), Path(str(config["home"]))),
        partial(summary.found, config),
    )
    raise typer.Exit(code)


@app.command()
@with_settings
def proxy(config: Config) -> None:
    """Run the proxy alone, in this process."""
    _become(commands.proxy(config, os.environ))


@app.command()
@with_settings
def backend(config: Config) -> None:
    """Run the backend alone, in this process."""
    _advise(os.environ)
    _become(commands.backend(config, commands.model_to_load(config), os.environ))


@app.command(short_help="Say whether a model can be served, and how.")
@with_settings
def doctor(
    config: Config,
    examined: Annotated[str, typer.Argument(metavar="MODEL", help="instead of the setting", show_default=False)] = "",
    memory_gb: Annotated[float, typer.Option(min=0, help="on a Mac of so much memory; 0: on this machine")] = 0,
    prefill_tokens_s: Annotated[float, typer.Option(min=0, help="how fast it prefills, for times; 0: not known")] = 0,
    disk_gb_s: Annotated[float, typer.Option(min=0, help="how fast its disk is read, for times; 0: not known")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="for programs instead of people")] = False,
) -> None:
    """Say whether a model can be served, and how, without loading its weights."""
    if examined:
        config = _with_model(config, examined)
    numbers = {"--memory-gb": memory_gb, "--prefill-tokens-s": prefill_tokens_s, "--disk-gb-s": disk_gb_s}
    options = [word for flag, number in numbers.items() if number for word in (flag, f"{number:g}")]
    options += ["--json"] if as_json else []
    _become(commands.doctor(config, commands.model_to_load(config), options, os.environ))


@app.command(short_help="Check a running server.")
def gates(
    url: Annotated[
        str, typer.Option(metavar="URL", help="default: what runs from the home, or the settings' own")
    ] = "",
    home: Annotated[str | None, typer.Option(metavar="DIR", help="that the server runs from, for `restart`")] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="this gate alone; may be repeated")] = None,
    names: Annotated[bool, typer.Option("--list", help="list the gates, and run none")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="also end the backend, which interrupts others")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="a gate that can't be run is a failure")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for programs instead of people")] = False,
    model: Annotated[str, typer.Option(metavar="NAME", help="default: the first that the server lists")] = "",
    turns: Annotated[int, typer.Option(min=2, max=1000, help="of the long transcript")] = 12,
    turn_kb: Annotated[float, typer.Option(min=0.2, max=1000, help="that each of them says")] = 3.0,
    long_tokens: Annotated[int, typer.Option(min=500, max=1_000_000, help="of the prompt that is cancelled")] = 12_288,
    tolerance: Annotated[float, typer.Option(min=0, help="nats at which two tokens are tied; 0: by their type")] = 0.0,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="for one request, and for a model to load")] = 1800.0,
    seed: Annotated[str, typer.Option(help="at the top of each prompt; default: a new one")] = "",
) -> None:
    """Check a running server, from a first token to a long transcript.  The key comes from WARMLINE_CLIENT_KEY."""
    from warmline_run.smoke import command  # here, since no other command needs what these import
    from warmline_run.smoke.check import Scale

    if names:
        print(command.listing())
        return
    try:
        target = command.target(resolve({"home": home}, os.environ), url, os.environ)
        scale = Scale(turns_count=turns, turn_bytes=int(turn_kb * 1000), long_tokens=long_tokens)
        visit = command.visit(target, scale, model=model, tolerance=tolerance, timeout_s=timeout_s, seed=seed)
        visit.may_restart = restart
        wanted = command.Wanted(command.gates_called(only or []), as_json, strict)
    except ConfigurationError as error:
        supervise.say(str(error))
        raise typer.Exit(EXIT_CONFIGURATION) from None
    raise typer.Exit(command.examine(visit, wanted))


@app.command("config")
@with_settings
def show_config(
    config: Config, as_json: Annotated[bool, typer.Option("--json", help="for programs instead of people")] = False
) -> None:
    """Show each setting in force and where it came from."""
    rows = {name: (_shown(name, config), effective.source) for name, effective in config.origin.items()}
    if as_json:
        print(
            json.dumps({name: {"value": value, "source": source} for name, (value, source) in rows.items()}, indent=2)
        )
        return
    told = {name: (_as_typed(value), source) for name, (value, source) in rows.items()}
    widths = max(map(len, told)), max(len(value) for value, _ in told.values())
    for name, (value, source) in told.items():
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}")


def _as_typed(value: Any) -> str:
    """As the file, a variable and a flag take it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _with_model(config: Config, given: str) -> Config:
    try:
        return Config({**config.origin, "model": Effective(SETTINGS["model"].parse(given), "MODEL")})
    except ValueError as error:
        raise ConfigurationError(f"MODEL: {error}, not {given!r}") from None


def _shown(name: str, config: Config) -> Any:
    return "(set)" if SETTINGS[name].secret and config[name] else config[name]


def _advise(environment: Mapping[str, str]) -> None:
    _, advice = openblas.preload(environment.get("LD_PRELOAD", ""))
    if advice:
        supervise.say(advice)


def _become(command: commands.Command) -> None:
    sys.stdout.flush()
    os.execve(command.arguments[0], command.arguments, dict(command.environment))


def _check_ports_free(config: Config) -> None:
    """Fail early and by name; the children bind for themselves a moment later."""
    if problem := ports.occupied(config):
        raise ConfigurationError(problem)


def _launchd() -> ServiceManager:
    from warmline_run.services.launchd import Launchd  # here, since no other command needs what this imports

    return Launchd()


def _systemd() -> ServiceManager:
    from warmline_run.services.systemd import Systemd

    return Systemd()


app.add_typer(
    group(_launchd, "launch agents (macOS)"), name="launchd", short_help="Have launchd keep the pair (macOS)."
)
app.add_typer(
    group(_systemd, "user services (Linux)"), name="service", short_help="Have systemd keep the pair (Linux)."
)


def main() -> None:
    """`app`, in a process that launchd or systemd may keep."""
    kept.bound_output()
    try:
        app()
    except SystemExit as ended:
        sys.exit(kept.exit_code(ended.code) if isinstance(ended.code, int) else ended.code)


if __name__ == "__main__":
    main()
