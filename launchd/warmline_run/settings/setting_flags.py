"""Settings of flags and variables as flags, for a process of `warmline` that reads HOME/warmline.toml itself."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from warmline_common.settings.models import ModelConfig, format_models, parse_models
from warmline_common.settings.resolve import ResolvedConfig
from warmline_common.settings.table import DEMO_MODEL, SETTINGS

FOLDER_SETTINGS = ("model", "adapter_path", "draft_model")
MODEL_SETTINGS = ("model", "models")


def is_explicit(config: ResolvedConfig, name: str) -> bool:
    """True for a value of a flag or a variable, and not of the file."""
    names = MODEL_SETTINGS if name == "models" else (name,)  # `model` may be why there are no others
    return config.effective_settings[name].source in [
        text for each in names for text in (SETTINGS[each].flag, SETTINGS[each].variable)
    ]


def format_setting_flags(config: ResolvedConfig, left_out: Collection[str] = ()) -> list[str]:
    """Flags from which `resolve` makes this configuration, in any folder, from the same file and no variables."""
    words = [SETTINGS["home"].flag, str(config["home"]), *format_model_flags(config)]
    for name, setting in SETTINGS.items():
        if name in ("home", *MODEL_SETTINGS, *left_out) or not setting.has_flag or not is_explicit(config, name):
            continue
        value = make_folder_absolute(str(config[name])) if name in FOLDER_SETTINGS else config[name]
        if setting.is_switch:
            words.append(setting.flag if value else setting.off_flag)
        else:
            words += [setting.flag, str(value)]
    return words


def format_model_flags(config: ResolvedConfig) -> list[str]:
    """Flags `--models` and `--model` from which `resolve` gets the same models in another folder."""
    models, words = parse_models(str(config["models"])), list[str]()
    if is_explicit(config, "models"):
        words += [SETTINGS["models"].flag, format_models([_make_absolute(model) for model in models])]
    if is_explicit(config, "model"):
        words += [SETTINGS["model"].flag, models[0].name if models else make_folder_absolute(str(config["model"]))]
    return words


def describe_relative_folder(config: ResolvedConfig) -> str:
    """Message about the first folder of the file that depends on the current one; "" where none does."""
    for name, value, source in _list_file_folders(config):
        if is_relative_folder(value):
            return f"{name} (from {source}): {value} depends on the current folder; write it whole"
    return ""


def is_relative_folder(value: str) -> bool:
    return value not in ("", DEMO_MODEL) and not Path(value).is_absolute() and Path(value).is_dir()


def make_folder_absolute(value: str) -> str:
    """Absolute path of an existing folder; any other value, such as a repository's name, as it is."""
    return str(Path(value).absolute()) if is_relative_folder(value) else value


def _make_absolute(model: ModelConfig) -> ModelConfig:
    settings = {
        name: make_folder_absolute(str(value)) if name in FOLDER_SETTINGS else value
        for name, value in model.settings.items()
    }
    return replace(model, path=make_folder_absolute(model.path), settings=settings)


def _list_file_folders(config: ResolvedConfig) -> Iterator[tuple[str, str, str]]:
    """(name, value, source) of each folder that services read from the file."""
    models = parse_models(str(config["models"]))
    for name in FOLDER_SETTINGS:
        if not is_explicit(config, name) and not (models and name == "model"):
            yield name, str(config[name]), config.effective_settings[name].source
    for model in () if is_explicit(config, "models") else models:
        source = f"models, {config.effective_settings['models'].source}"
        yield model.name, model.path, source
        for name in FOLDER_SETTINGS[1:]:
            yield f"{model.name}: {name}", str(model.settings.get(name, "")), source
