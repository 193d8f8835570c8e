"""Configured models: entries of `[[models]]` in HOME/warmline.toml, checked.  Pure."""

import difflib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from warmline_common.settings.parsers import Value, parse_bool, parse_model, parse_seconds
from warmline_common.settings.table import DEMO_MODEL, DEMO_NAME, SETTINGS, list_settings

NAME_CHARS_MAX = 200
MODELS_MAX = 64
SHARED_BY_ALL = ("home", "reuse", "drain_timeout_s", "log_level", "log_format", "log_files")  # one value for all models
OWN_SETTINGS = tuple(setting.name for setting in list_settings("backend") if setting.name not in SHARED_BY_ALL)
KEYS = ("name", "path", "aliases", "pinned", "idle_s", *OWN_SETTINGS)
EXAMPLE = 'name = "large", path = "/models/large"'
_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True)
class ModelConfig:
    """One served model.  `path`: a folder or repository that mlx-lm loads; `settings`: the backend's, by name."""

    name: str
    path: str
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    idle_s: float = 0.0  # without requests before it is unloaded; 0: never
    settings: Mapping[str, Value] = field(default_factory=dict)

    @property
    def instance(self) -> str:
        """Name of its backend in file names, unlike that of any other model."""
        if _FILE_NAME.fullmatch(self.name):
            return self.name
        readable = re.sub(r"[^a-z0-9._-]+", "-", self.name.lower()).strip("-.")[:40]
        return f"{readable or 'model'}-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"


def parse_models(raw: str) -> list[ModelConfig]:
    """Models of the setting `models`, the first one the default.  Raises ValueError, which names entry and key."""
    entries: list[dict[str, Any]] = json.loads(raw)
    if len(entries) > MODELS_MAX:
        raise ValueError(f"expected {MODELS_MAX} models at most, not {len(entries)}")
    models = [_parse_entry(entry, number) for number, entry in enumerate(entries, start=1)]
    _check_paths(models)
    _check_names(models)
    return models


def format_models(models: Sequence[ModelConfig]) -> str:
    """The setting's value for these models."""
    return json.dumps(
        [
            {
                "name": model.name,
                "path": model.path,
                "aliases": list(model.aliases),
                "pinned": model.pinned,
                "idle_s": model.idle_s,
                **model.settings,
            }
            for model in models
        ],
        ensure_ascii=False,
    )


def move_first(models: Sequence[ModelConfig], name: str) -> list[ModelConfig] | None:
    """Models with the one of a name or an alias first, as the default; None where none is configured so."""
    if (default := find_model(models, name)) is None:
        return None
    return [default, *(model for model in models if model is not default)]


def find_model(models: Sequence[ModelConfig], name: str) -> ModelConfig | None:
    """Model of a name or an alias; None where none is configured so."""
    return next((model for model in models if name == model.name or name in model.aliases), None)


def _parse_entry(entry: Mapping[str, Any], number: int) -> ModelConfig:
    label = f"model {number}" + (f" ({str(entry['name'])[:NAME_CHARS_MAX]})" if "name" in entry else "")
    for key in entry:
        if key not in KEYS:
            raise ValueError(f"{label}: {_describe_unknown_key(key)}")
    if "path" not in entry:
        raise ValueError(f"{label}: expected a path, as in {EXAMPLE}")
    path = _parse_value(label, "path", parse_model, entry["path"])
    return ModelConfig(
        name=_parse_value(label, "name", _parse_name, entry.get("name", _derive_name(path))),
        path=path,
        aliases=_parse_value(label, "aliases", _parse_aliases, entry.get("aliases", [])),
        pinned=_parse_value(label, "pinned", parse_bool, entry.get("pinned", False)),
        idle_s=_parse_value(label, "idle_s", parse_seconds, entry.get("idle_s", 0.0)),
        settings={
            key: _parse_value(label, key, SETTINGS[key].parse, entry[key]) for key in OWN_SETTINGS if key in entry
        },
    )


def _derive_name(path: str) -> str:
    """Last part of a folder or repository."""
    return DEMO_NAME if path == DEMO_MODEL else Path(path).name


def _parse_value(label: str, key: str, parse: Any, raw: object) -> Any:
    try:
        return parse(raw)
    except ValueError as error:
        raise ValueError(f"{label}: {key}: {error}, not {raw!r}") from None


def _describe_unknown_key(key: str) -> str:
    if key == "model":
        return "unknown key 'model'; did you mean 'path'?"
    if key in SETTINGS:
        return f"{key!r} holds for all models: write it at the top of the file, before the first [[models]]"
    near = difflib.get_close_matches(key.replace("-", "_"), KEYS, n=1, cutoff=0.5)
    return f"unknown key {key!r}; " + (f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(KEYS)}")


def _parse_name(raw: object) -> str:
    if not isinstance(raw, str) or not raw.strip() or raw != raw.strip() or not raw.isprintable():
        raise ValueError('expected a name that can be printed, without spaces at its ends, as in "small"')
    if len(raw) > NAME_CHARS_MAX:
        raise ValueError(f"expected at most {NAME_CHARS_MAX} characters")
    return raw


def _parse_aliases(raw: object) -> tuple[str, ...]:
    if not isinstance(raw, list):
        raise ValueError('expected a list of names, as in ["small", "fast"]')
    return tuple(dict.fromkeys(map(_parse_name, raw)))


def _check_paths(models: Sequence[ModelConfig]) -> None:
    """Raise ValueError where two models differ in their names alone: one model would be loaded twice."""
    for one, other in combinations(models, 2):
        if Path(one.path) == Path(other.path) and one.settings == other.settings:
            names = f" as {one.name!r}, with aliases = [{json.dumps(other.name)}]" if one.name != other.name else ""
            raise ValueError(f"{other.path} is given twice, with the same settings: keep it once{names}")


def _check_names(models: Sequence[ModelConfig]) -> None:
    """Raise ValueError where two models have one name or alias: a request could mean either."""
    owners: dict[str, ModelConfig] = {}
    for model in models:
        for name in (model.name, *model.aliases):
            if (owner := owners.setdefault(name, model)) is not model:
                raise ValueError(_describe_shared_name(name, owner, model))
    instances: dict[str, str] = {}
    for model in models:
        if (other := instances.setdefault(model.instance, model.name)) != model.name:
            raise ValueError(f"the names {other!r} and {model.name!r} lead to the same file names: change one of them")


def _describe_shared_name(name: str, one: ModelConfig, other: ModelConfig) -> str:
    named = [model for model in (one, other) if model.name == name]
    if len(named) == 2:
        return (
            f"the name {name!r} is given to two models, {one.path} and {other.path}: give one of them another, in its "
            "table [[models]]"
        )
    if not named:
        return (
            f"the alias {name!r} is given to two models, {one.name!r} and {other.name!r}: remove it from `aliases` in "
            "the table of one of them"
        )
    owner = other if named == [one] else one
    return (
        f"the alias {name!r} of {owner.name!r} is the name of another model, {named[0].path}: remove it from `aliases` "
        f"in the table of {owner.name!r}"
    )
