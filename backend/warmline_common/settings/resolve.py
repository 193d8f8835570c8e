"""Resolution of settings and their sources: built-in default < HOME/warmline.toml < WARMLINE_* < flag."""

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmline_common.process.loopback import is_loopback
from warmline_common.settings.hints import format_command
from warmline_common.settings.models import ModelConfig, format_models, move_first, parse_models
from warmline_common.settings.parsers import Value
from warmline_common.settings.prewarm import check_prewarm_models, parse_prewarm
from warmline_common.settings.quantization import find_quantization_problem
from warmline_common.settings.table import DEMO_MODEL, SETTINGS, Setting, get_default
from warmline_common.storage import disk

FILE_NAME = "warmline.toml"
KEYS_FILE = "keys.json"
PREFIX = "WARMLINE_"
DEFAULT_SOURCE = "default"
INTERNAL_VARIABLES = ("WARMLINE_PARENT_PIPE", "WARMLINE_ANNOUNCE_PIPE", "WARMLINE_AGENT")  # ours, but no settings


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


@dataclass(frozen=True)
class _Layer:
    """Raw values of one place, by the settings' names, and the names of their sources for people."""

    values: Mapping[str, object]
    sources: Mapping[str, str]


def resolve(flags: Mapping[str, object], environment: Mapping[str, str]) -> ResolvedConfig:
    """Merge all layers and check what concerns several settings.

    `flags` has what was given on the command line, None for what wasn't; `model` may be a list.  Reads
    HOME/warmline.toml if it exists.  Raises ConfigurationError.
    """
    layers = [
        _Layer(flags, {name: setting.flag for name, setting in SETTINGS.items()}),
        _Layer(
            {name: environment.get(setting.variable) for name, setting in SETTINGS.items()},
            {name: setting.variable for name, setting in SETTINGS.items()},
        ),
    ]
    file = Path(str(_resolve_setting(SETTINGS["home"], layers).value)) / FILE_NAME
    layers = _convert_model_lists([*layers, _Layer(_read_file(file), dict.fromkeys(SETTINGS, str(file)))])
    effective = {name: _resolve_setting(setting, layers) for name, setting in SETTINGS.items()}
    config = ResolvedConfig(effective | _resolve_models(layers, effective["model"], effective["models"]))
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


def _resolve_setting(setting: Setting, layers: Sequence[_Layer]) -> EffectiveSetting:
    """Value of the highest layer that has one.  Raises ConfigurationError."""
    for layer in layers:
        raw, source = layer.values.get(setting.name), layer.sources[setting.name]
        if raw is not None:
            try:
                return EffectiveSetting(setting.parse(raw), source)
            except ValueError as error:
                shown = "" if setting.secret else f", not {raw!r}"
                raise ConfigurationError(f"{setting.name} (from {source}): {error}{shown}") from None
    return EffectiveSetting(setting.default, DEFAULT_SOURCE)


def _convert_model_lists(layers: Sequence[_Layer]) -> list[_Layer]:
    """Layers in which a list of several `model` is `models`, and hides `model` of the layers below.

    Raises ConfigurationError.
    """
    converted: list[_Layer] = []
    hidden: Mapping[str, object] = {}
    for layer in layers:
        values, sources = {**layer.values, **hidden}, layer.sources
        if isinstance(given := values.get("model"), list) and len(given) == 1:
            values["model"] = given[0]
        elif isinstance(given, list) and given:
            source = sources["model"]
            if values.get("models") is not None:
                raise ConfigurationError(
                    f"model (from {source}): expected one model, the default's name, since models are configured in "
                    f"the same place, not {given!r}"
                )
            values |= {"model": None, "models": [{"path": path} for path in given]}
            sources, hidden = {**sources, "models": source}, {"model": None}
        converted.append(_Layer(values, sources))
    return converted


def _resolve_models(
    layers: Sequence[_Layer], model: EffectiveSetting, models: EffectiveSetting
) -> dict[str, EffectiveSetting]:
    """`model` and `models` in force where several are configured: `models` canonical, `model` its first one's path.

    Raises ConfigurationError.
    """
    try:
        configured = parse_models(str(models.value))
    except ValueError as error:
        name = "model" if models.source == SETTINGS["model"].flag else "models"
        raise ConfigurationError(f"{name} (from {models.source}): {error}") from None
    if not configured:
        return {}
    source, model_at = models.source, _find_layer(layers, "model")
    if model_at is not None:
        chosen, source = move_first(configured, str(model.value)), model.source
        is_above = model_at < (_find_layer(layers, "models") or 0)
        if chosen is None and is_above and _can_be_model(str(model.value)):
            return {"models": EffectiveSetting(format_models([]), source)}
        if chosen is None:
            names = ", ".join(each.name for each in configured)
            remedy = "give a folder or owner/model to serve that alone" if is_above else "add a table [[models]] for it"
            raise ConfigurationError(
                f"model (from {source}): {model.value} is none of the models that are configured (from "
                f"{models.source}): name the default, one of {names}, or {remedy}"
            )
        configured = chosen
    return {
        "models": EffectiveSetting(format_models(configured), models.source),
        "model": EffectiveSetting(configured[0].path, source),
    }


def _can_be_model(name: str) -> bool:
    """False for a word that is neither a folder nor a repository: a misspelt name."""
    return "/" in name or name == DEMO_MODEL or Path(name).exists()


def _find_layer(layers: Sequence[_Layer], name: str) -> int | None:
    """Position of the highest layer that sets a value; None for the default."""
    return next((at for at, layer in enumerate(layers) if layer.values.get(name) is not None), None)


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
        if key == "model" and isinstance(value, list) and any(isinstance(each, dict) for each in value):
            raise ConfigurationError(f"{file}: unknown tables [[model]]; did you mean [[models]]?")
        if key == "models" and isinstance(value, dict):
            raise ConfigurationError(f"{file}: [models] is one table; write [[models]], before each model's lines")
        if key == "prewarm" and isinstance(value, dict):
            raise ConfigurationError(f"{file}: [prewarm] is one table; write [[prewarm]], before each entry's lines")
        if key not in SETTINGS or not SETTINGS[key].in_toml:
            raise ConfigurationError(f"{file}: {_describe_unknown_key(key, value)}")
    return table


def _describe_unknown_key(key: str, value: object) -> str:
    if key in SETTINGS:
        setting = SETTINGS[key]
        return f"{key!r} can't be set in this file; use {setting.flag} or {setting.variable}"
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(each, dict) for each in value)):
        near = difflib.get_close_matches(key, ["models", "prewarm"], n=1) if isinstance(value, list) else []
        if near:
            return f"unknown tables [[{key}]]; did you mean [[{near[0]}]]?"
        return (
            f"unknown table {key!r}: settings stand at the top of this file, in no table, as in port = 8026; only "
            "models and prompts to prewarm have tables, [[models]] and [[prewarm]]"
        )
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
    if config["models"] != get_default("models") and config["served_name"]:
        source = config.effective_settings["served_name"].source
        raise ConfigurationError(
            f"served_name (from {source}): {config['served_name']} can't name several models; remove it, and give each "
            "one a `name` in its table [[models]]"
        )
    if config["port"] == config["backend_port"]:
        raise ConfigurationError(f"port and backend_port are both {config['port']}; they must differ")
    _check_quantization(config)
    try:
        check_prewarm_models(parse_prewarm(str(config["prewarm"])), parse_models(str(config["models"])))
    except ValueError as error:
        source = config.effective_settings["prewarm"].source
        raise ConfigurationError(f"prewarm (from {source}): {error}") from None


def _check_quantization(config: ResolvedConfig) -> None:
    """Raise ConfigurationError where settings of the quantized KV, or one model's, don't go together.

    A model may turn off what is set for all.
    """
    models: Sequence[ModelConfig | None] = parse_models(str(config["models"])) or [None]
    for model in models:
        own = model.settings if model else {}
        name, problem = find_quantization_problem({**config, **own})
        if problem and not any(own.get(switch) == 0 for switch in ("kv_bits", "kv_boundary_layers")):
            source = config.effective_settings["models" if name in own else name].source
            label = f"model {model.name!r}: {name}" if model else name
            raise ConfigurationError(f"{label} (from {source}): {problem}")


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
