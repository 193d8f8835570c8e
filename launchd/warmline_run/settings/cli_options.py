"""Flags of the commands that take all settings."""

import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from warmline_common.process.exit_codes import EXIT_CONFIGURATION
from warmline_common.process.parent_watch import PARENT_PIPE
from warmline_common.settings.hints import format_command
from warmline_common.settings.parsers import strip_backticks
from warmline_common.settings.resolve import ConfigurationError, ResolvedConfig, describe_misspelt_variables, resolve
from warmline_common.settings.table import SETTINGS, Setting
from warmline_run.supervisor import print_message


def with_settings(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `config` a flag for each setting instead, resolved once."""

    def command(**given: Any) -> None:
        flags = {name: given.pop(name) for name in list(given) if name in SETTINGS}
        flags["model"] = flags["model"] or None  # a list, empty where no flag is given
        if PARENT_PIPE not in os.environ:  # else the parent has printed them
            for line in describe_misspelt_variables(os.environ):
                print_message(line)
        try:
            config = resolve(flags, os.environ)
            _refuse_secrets(config)
            function(config, **given)
        except ConfigurationError as error:
            print_message(str(error))
            raise typer.Exit(EXIT_CONFIGURATION) from None

    own = list(inspect.signature(function).parameters.values())[1:]
    flags = [_make_parameter(setting) for setting in SETTINGS.values()]
    parameters = [*(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own), *flags]
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _refuse_secrets(config: ResolvedConfig) -> None:
    """Raises ConfigurationError for a setting that has no flag: it is an option only to say what to do instead."""
    for name, setting in SETTINGS.items():
        if not setting.has_flag and config.effective_settings[name].source == setting.flag:
            command = format_command("cachectl key add NAME", str(config["home"]))
            raise ConfigurationError(
                f"{setting.flag} is no flag, since command lines are visible to all: set {setting.variable}, or make a "
                f"key with `{command}`"
            )


def _make_parameter(setting: Setting) -> inspect.Parameter:
    """Flags arrive as text and are parsed by the table, so that all sources are checked by the same rule."""
    shown = strip_backticks(setting.help) + (f" (default: {setting.default})" if setting.default else "")
    option = typer.Option(setting.flag, metavar=setting.metavar, help=shown, hidden=not setting.has_flag)
    kind = list[str] if setting.name == "model" else str  # several models: the flag is given again
    annotation: Any = Annotated[kind | None, option]
    if setting.is_switch:
        annotation = Annotated[bool | None, typer.Option(f"{setting.flag}/{setting.off_flag}", help=shown)]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
