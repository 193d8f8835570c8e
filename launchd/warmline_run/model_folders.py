"""Check of the configured models' folders before anything is started.  Reads their folders alone."""

from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from warmline_common.settings.hints import FOLDER_ADVICE
from warmline_common.settings.models import NAME_CHARS_MAX, parse_models
from warmline_common.settings.resolve import ConfigurationError, ResolvedConfig
from warmline_common.settings.table import DEMO_MODEL

NEAR_COUNT_MAX = 3


def check_model_folders(config: ResolvedConfig) -> None:
    """Raise ConfigurationError for a model that is no model's folder and can't be a repository's name either.

    The backend checks more, once it runs; this is found before anything is started.
    """
    models = parse_models(str(config["models"]))
    for model in models:
        source = config.effective_settings["models"].source
        _check_model_folder(model.path, f"models (from {source}): {model.name}: {model.path[:NAME_CHARS_MAX]}")
    if not models:
        name = str(config["model"])
        _check_model_folder(name, f"{config.effective_settings['model'].source} {name[:NAME_CHARS_MAX]}")


def _check_model_folder(name: str, label: str) -> None:
    path = Path(name)
    with suppress(OSError):  # a name that can't be a path's: the backend says why
        if name == DEMO_MODEL or (path / "config.json").is_file():
            return
        if path.exists():
            raise ConfigurationError(f"{label}: not a model's folder, it has no config.json; {FOLDER_ADVICE}")
        if name.startswith((".", "/")) or name.count("/") != 1:
            raise ConfigurationError(f"{label}: there is no such folder; {_suggest_folders(path)}")


def _suggest_folders(path: Path) -> str:
    folders = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    near = [str(path.with_name(each)) for each in get_close_matches(path.name, folders, NEAR_COUNT_MAX)]
    return f"near it: {', '.join(near)}" if near else FOLDER_ADVICE
