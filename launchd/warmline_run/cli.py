"""`warmline`: starts the pair or one of the two, examines models and servers, or shows the settings in force."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from warmline_common.process import exit_codes
from warmline_common.process.exit_codes import EXIT_CONFIGURATION
from warmline_common.process.parent_watch import watch_parent
from warmline_common.process.version import version
from warmline_common.settings.models import format_models
from warmline_common.settings.parsers import make_amount_parser, make_integer_parser, make_option_parser
from warmline_common.settings.resolve import ConfigurationError, EffectiveSetting, ResolvedConfig, resolve
from warmline_common.settings.table import SETTINGS
from warmline_run import model_folders, openblas, ports, processes, supervisor
from warmline_run.launch.cli import launch_client
from warmline_run.models.cli import app as models_app
from warmline_run.models.prepare import prepare_models
from warmline_run.services.cli import JsonOption, make_app
from warmline_run.settings.cli_options import with_settings
from warmline_run.settings.effective import format_settings, hide_secrets
from warmline_run.settings.model_config import has_several_models
from warmline_run.supervisor import print_message


def _amount(unit: str, low: float, high: float) -> Callable[[object], float]:
    return make_option_parser(make_amount_parser(unit, low, high), typer.BadParameter)


def _count(low: int, high: int) -> Callable[[object], int]:
    return make_option_parser(make_integer_parser(low, high), typer.BadParameter)


app = typer.Typer(
    help="A caching proxy in front of an MLX model: what was prefilled once is never prefilled again.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"warmline {version()}")
        raise typer.Exit


@app.callback()
def _main(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...


@app.command()
@with_settings
def serve(config: ResolvedConfig) -> None:
    """Run proxy and backend together; restart what dies."""
    watch_parent(float(config["drain_timeout_s"]) + 2 * supervisor.STOP_MARGIN_S)  # of `warmline launch`
    if problem := ports.describe_occupied_port(config):  # early and by name: the children bind a moment later
        raise ConfigurationError(problem)
    model_folders.check_model_folders(config)
    if has_several_models(config):
        keeper = processes.keeper_command(config, os.environ)
        raise typer.Exit(supervisor.run(keeper, processes.proxy_command(config, os.environ), config))
    _print_blas_advice()
    try:
        model = processes.prepare_model(config)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    backend_command = processes.backend_command(config, model, os.environ)
    raise typer.Exit(supervisor.run(backend_command, processes.proxy_command(config, os.environ), config))


app.command("launch", short_help="Start a client that uses the pair.")(launch_client)


@app.command()
@with_settings
def proxy(config: ResolvedConfig) -> None:
    """Run the proxy alone, in this process."""
    _exec_command(processes.proxy_command(config, os.environ))


@app.command()
@with_settings
def backend(config: ResolvedConfig) -> None:
    """Run the backend alone, in this process; with several models, the keeper of their backends."""
    model_folders.check_model_folders(config)
    if has_several_models(config):
        from warmline_run.keeper import app as keeper  # here, since no other command needs its server

        _print_blas_advice()
        raise typer.Exit(keeper.run_keeper(config, os.environ))
    _print_blas_advice()
    _exec_command(processes.backend_command(config, processes.prepare_model(config), os.environ))


@app.command(short_help="Say whether a model can be served, and how.")
@with_settings
def doctor(
    config: ResolvedConfig,
    examined_model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="instead of the settings", show_default=False)
    ] = None,
    memory_gb: Annotated[
        float,
        typer.Option(min=0, parser=_amount("gigabytes", 0, 1e6), help="on a Mac of so much memory; 0: on this machine"),
    ] = 0,
    prefill_tokens_s: Annotated[
        float,
        typer.Option(min=0, parser=_amount("tokens", 0, 1e9), help="how fast it prefills, for times; 0: not known"),
    ] = 0,
    disk_gb_s: Annotated[
        float,
        typer.Option(
            min=0, parser=_amount("gigabytes", 0, 1e6), help="how fast its disk is read, for times; 0: not known"
        ),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Say whether a model can be served, and how, without loading its weights.

    Where several models are configured and none is named: each of them, and which of them fit into memory together.
    """
    if examined_model is not None:
        try:
            model = EffectiveSetting(SETTINGS["model"].parse(examined_model), "MODEL")
        except ValueError as error:
            raise ConfigurationError(f"MODEL: {error}, not {examined_model!r}") from None
        config = ResolvedConfig(
            {**config.effective_settings, "model": model, "models": EffectiveSetting("[]", "MODEL")}
        )
    numbers = {"--memory-gb": memory_gb, "--prefill-tokens-s": prefill_tokens_s, "--disk-gb-s": disk_gb_s}
    options = [word for flag, number in numbers.items() if number for word in (flag, f"{number:g}")]
    options += ["--json"] if as_json else []
    if models := prepare_models(config):
        options += ["--models", format_models(models), "--models-memory-gb", str(config["models_memory_gb"])]
    model_path = models[0].path if models else processes.prepare_model(config)
    _exec_command(processes.doctor_command(config, model_path, options, os.environ))


@app.command(short_help="Check a running server.")
def gates(
    url: Annotated[
        str, typer.Option(metavar="URL", help="default: the running pair of the home, else the settings' address")
    ] = "",
    home: Annotated[str | None, typer.Option(metavar="DIR", help="that the server runs from, for `restart`")] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="this gate alone; may be repeated")] = None,
    names: Annotated[bool, typer.Option("--list", help="list the gates, and run none")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="also end the backend, which interrupts others")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="a gate that can't be run is a failure")] = False,
    as_json: JsonOption = False,
    model: Annotated[str, typer.Option(metavar="NAME", help="default: the first that the server lists")] = "",
    turns: Annotated[int, typer.Option(min=2, max=1000, parser=_count(2, 1000), help="of the long transcript")] = 12,
    turn_kb: Annotated[
        float, typer.Option(min=0.2, max=1000, parser=_amount("kilobytes", 0.2, 1000), help="that each of them says")
    ] = 3.0,
    long_tokens: Annotated[
        int, typer.Option(min=500, max=1_000_000, parser=_count(500, 1_000_000), help="of the prompt that is cancelled")
    ] = 12_288,
    tolerance: Annotated[
        float,
        typer.Option(min=0, parser=_amount("nats", 0, 1e6), help="nats at which two tokens are tied; 0: by their type"),
    ] = 0.0,
    timeout_s: Annotated[
        float,
        typer.Option(min=0.1, parser=_amount("seconds", 0.1, 1e9), help="for one request, and for a model to load"),
    ] = 1800.0,
    seed: Annotated[str, typer.Option(help="at the top of each prompt; default: a new one")] = "",
) -> None:
    """Check a running server, from a first token to a long transcript.  The key comes from WARMLINE_CLIENT_KEY."""
    from warmline_run.smoke import report, runner  # here, since no other command needs these imports
    from warmline_run.smoke.check import Scale

    if names:
        print(report.render_list(runner.CHECKS))
        return
    try:
        endpoint = runner.find_endpoint(resolve({"home": home}, os.environ), url, os.environ)
        scale = Scale(turns_count=turns, turn_bytes=int(turn_kb * 1000), long_tokens=long_tokens)
        target = runner.make_target(endpoint, scale, model=model, tolerance=tolerance, timeout_s=timeout_s, seed=seed)
        target.may_restart = restart
        checks = runner.find_checks(only or [])
    except ConfigurationError as error:
        print_message(str(error))
        raise typer.Exit(EXIT_CONFIGURATION) from None
    raise typer.Exit(asyncio.run(runner.run_checks(target, checks, as_json=as_json, strict=strict)))


@app.command("config")
@with_settings
def show_config(
    config: ResolvedConfig,
    as_json: JsonOption = False,
) -> None:
    """Show each setting in force and where it came from."""
    effective = hide_secrets(config.effective_settings)
    if as_json:
        print(json.dumps({name: asdict(setting) for name, setting in effective.items()}, indent=2))
        return
    for line in format_settings(effective):
        print(line)


def _print_blas_advice() -> None:
    _, advice = openblas.choose_preload(os.environ.get("LD_PRELOAD", ""))
    if advice:
        print_message(advice)


def _exec_command(command: processes.Command) -> None:
    sys.stdout.flush()
    os.execve(command.arguments[0], command.arguments, dict(command.environment))


app.add_typer(models_app)
app.add_typer(make_app("launchd", "launch agents (macOS)", "Have launchd keep the pair (macOS)."))
app.add_typer(make_app("service", "user services (Linux)", "Have systemd keep the pair (Linux)."))


def main() -> None:
    """Run `app` in a process that launchd or systemd may keep."""
    exit_codes.truncate_output()
    exit_codes.run_main(app)


if __name__ == "__main__":
    main()
