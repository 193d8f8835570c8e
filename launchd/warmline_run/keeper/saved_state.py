"""HOME/run/models.json: pins that people set, and the models that are loaded, for the keeper's next start."""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from warmline_common.storage import disk


@dataclass(frozen=True)
class KeptModels:
    """Pins that differ from the configuration's, by name, and names of loaded models."""

    pins: Mapping[str, bool] = field(default_factory=dict)
    loaded: Collection[str] = ()


def read_kept_models(file: Path, names: Collection[str]) -> KeptModels:
    """Content of the file, about configured models alone; nothing where it can't be read."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        content = json.loads(disk.read_file(file))
        pins = {str(name): is_pinned is True for name, is_pinned in content["pins"].items() if name in names}
        return KeptModels(pins, [name for name in content["loaded"] if name in names])
    return KeptModels()


def write_kept_models(file: Path, kept: KeptModels) -> None:
    """Raises OSError."""
    disk.replace_file(file, json.dumps({"pins": dict(kept.pins), "loaded": list(kept.loaded)}))
