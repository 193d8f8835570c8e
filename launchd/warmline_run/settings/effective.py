"""Settings in force as a table for people.  Pure."""

from collections.abc import Iterator, Mapping

from warmline_common.settings.models import ModelConfig, parse_models
from warmline_common.settings.parsers import Value
from warmline_common.settings.resolve import EffectiveSetting
from warmline_common.settings.table import SETTINGS


def hide_secrets(effective: Mapping[str, EffectiveSetting]) -> dict[str, EffectiveSetting]:
    """The same settings, with "(set)" for a secret's value."""
    return {
        name: EffectiveSetting("(set)" if SETTINGS[name].secret and setting.value else setting.value, setting.source)
        for name, setting in effective.items()
    }


def format_settings(effective: Mapping[str, EffectiveSetting]) -> Iterator[str]:
    """A line for each setting, and then for each model."""
    models = parse_models(str(effective["models"].value))
    values = {name: _format_value(setting.value) for name, setting in effective.items()}
    if models:
        values["model"] = f"{models[0].name}, the default"
        values["models"] = f"{len(models)}, see below"
    name_width, value_width = max(map(len, values)), max(map(len, values.values()))
    for name, value in values.items():
        yield f"{name:<{name_width}}  {value:<{value_width}}  {effective[name].source}"
    if models:
        yield from _format_models(models)


def _format_models(models: list[ModelConfig]) -> Iterator[str]:
    yield "\nmodels, the default first"
    name_width, path_width = max(len(model.name) for model in models), max(len(model.path) for model in models)
    for model in models:
        yield f"  {model.name:<{name_width}}  {model.path:<{path_width}}  {', '.join(_list_traits(model))}".rstrip()


def _list_traits(model: ModelConfig) -> Iterator[str]:
    if model.pinned:
        yield "pinned"
    if model.aliases:
        yield f"also {' and '.join(model.aliases)}"
    if model.idle_s:
        yield f"idle_s = {_format_value(model.idle_s)}"
    for name, value in model.settings.items():
        yield f"{name} = {_format_value(value)}"


def _format_value(value: Value) -> str:
    """A value as the file, a variable and a flag take it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.15g}" if isinstance(value, float) else str(value)
