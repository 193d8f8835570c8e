"""Resolution of settings and their sources: built-in default < HOME/warmline.toml < WARMLINE_* < flag."""

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmline_common.process.loopback import is_loopback
from warmline_common.settings.hints import format_command
from warmline_common.settings.parsers import Value
from warmline_common.settings.table import SETTINGS, Setting
from warmline_common.storage import disk

FILE_NAME = "warmline.toml"
KEYS_FILE = "keys.json"
PREFIX = "WARMLINE_"
INTERNAL_VARIABLES = ("WARMLINE_PARENT_PIPE", "WARMLINE_AGENT")  # ours, but no settings


class ConfigurationError(Exception):
    """One line for the user; the process ends with `EXIT_CONFIGURATION`."""


@dataclass(frozen=True)
class EffectiveSetting:
    """Value of a setting in force and its source: "default", the TOML file's path, a variable's name or a flag."""

    value: Value
    source: str


class ResolvedConfig(Mapping[str, Value]):
    """Values in force by setting name; `effective_settings` has each with its source.  Immutable."""

    def __init__(self, effective: Mapping[str, EffectiveSetting]) -> None:
        self.effective_settings = dict(effective)

    def __getitem__(self, name: str) -> Value:
        return self.effective_settings[name].value

    def __iter__(self) -> Any:
        return iter(self.effective_settings)

    def __len__(self) -> int:
        return len(self.effective_settings)


def resolve(flags: Mapping[str, object], environment: Mapping[str, str]) -> ResolvedConfig:
    """Merge all layers and check what concerns several settings.

    `flags` has what was given on the command line, None for what wasn't.  Reads HOME/warmline.toml if it exists.
    Raises ConfigurationError.
    """
    home = _resolve_setting(SETTINGS["home"], flags, environment, Path(), {})
    file = Path(str(home.value)) / FILE_NAME
    table = _read_file(file)
    config = ResolvedConfig(
        {name: _resolve_setting(setting, flags, environment, file, table) for name, setting in SETTINGS.items()}
    )
    _check_config(config)
    return config


def describe_misspelt_variables(environment: Mapping[str, str]) -> list[str]:
    """Lines about variables that look like a setting and are none.  Not an error: other programs may own them."""
    variables = {setting.variable.removeprefix(PREFIX): setting.variable for setting in SETTINGS.values()}
    lines = []
    for name in sorted(environment):
        if name.upper().startswith(PREFIX) and name not in (*variables.values(), *INTERNAL_VARIABLES):
            near = difflib.get_close_matches(name.upper().removeprefix(PREFIX), variables, n=1)
            hint = f"; did you mean {variables[near[0]]}?" if near else ""
            lines.append(f"{name} is no setting and has no effect{hint}")
    return lines


def _resolve_setting(
    setting: Setting,
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    file: Path,
    table: Mapping[str, object],
) -> EffectiveSetting:
    layers = (
        (flags.get(setting.name), setting.flag),
        (environment.get(setting.variable), setting.variable),
        (table.get(setting.name), str(file)),
    )
    for raw, source in layers:
        if raw is not None:
            try:
                return EffectiveSetting(setting.parse(raw), source)
            except ValueError as error:
                shown = "" if setting.secret else f", not {raw!r}"
                raise ConfigurationError(f"{setting.name} (from {source}): {error}{shown}") from None
    return EffectiveSetting(setting.default, "default")


def _read_file(file: Path) -> Mapping[str, object]:
    try:
        table = tomllib.loads(disk.read_file(file).decode())
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        advice = 'texts want quotes, as in reuse = "exact"'
        raise ConfigurationError(f"{file} is no valid TOML: {error}; {advice}") from None
    except OSError as error:
        raise ConfigurationError(f"{file} can't be read: {error.strerror}") from None
    for key, value in table.items():
        if key not in SETTINGS or not SETTINGS[key].in_toml:
            raise ConfigurationError(f"{file}: {_describe_unknown_key(key, value)}")
    return table


def _describe_unknown_key(key: str, value: object) -> str:
    if key in SETTINGS:
        setting = SETTINGS[key]
        return f"{key!r} can't be set in this file; use {setting.flag} or {setting.variable}"
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(each, dict) for each in value)):
        return f"unknown table {key!r}: settings stand at the top of this file, in no table, as in port = 8026"
    known_keys = [name for name, setting in SETTINGS.items() if setting.in_toml]
    near = difflib.get_close_matches(key.replace("-", "_"), known_keys, n=1, cutoff=0.5)
    return f"unknown key {key!r}; " + (f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known_keys)}")


def _check_config(config: ResolvedConfig) -> None:
    host, keys = str(config["host"]), Path(str(config["home"])) / KEYS_FILE
    has_key = config["lan"] or config["client_key"] or keys.exists()  # the proxy looks into the file
    if not (is_loopback(host) or has_key):
        raise ConfigurationError(
            f"host {host} is reachable by others, and no client key keeps strangers out: use --lan, which makes one, "
            f"or make one first ({format_command('cachectl key add NAME', str(config['home']))})"
        )
    if config["port"] == config["backend_port"]:
        raise ConfigurationError(f"port and backend_port are both {config['port']}; they must differ")


def read_setting(home: Path, name: str, environment: Mapping[str, str] = os.environ) -> Any:
    """Value of a setting from its variable or HOME/warmline.toml; its default where neither can be used."""
    setting = SETTINGS[name]
    raw = environment.get(setting.variable) or _read_table(home / FILE_NAME).get(name, setting.default)
    try:
        return setting.parse(raw)
    except ValueError:
        return setting.default


def _read_table(file: Path) -> dict[str, Any]:
    """Table of the TOML file; empty where it can't be read: the processes that need it report the reason."""
    try:
        return tomllib.loads(disk.read_file(file).decode())
    except (OSError, ValueError):
        return {}
