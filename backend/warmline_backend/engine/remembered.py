"""Measurements of a model on this device, kept in a file between starts.  Any thread."""

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

import mlx.core as mx

from warmline_common.storage import disk

log = logging.getLogger(__name__)

T = TypeVar("T")

MODELS_MAX = 256  # remembered; the oldest are dropped first


class RememberedMeasurements(Generic[T]):
    """Values by model in one JSON file.  `subject`: what is measured, for messages.

    `parse` returns the value of what was read, None where it is none: it is measured again then.
    """

    def __init__(self, path: Path, subject: str, parse: Callable[[object], T | None]) -> None:
        self._path, self._subject, self._parse = path, subject, parse

    def find(self, model: str) -> T | None:
        """The value that was measured for a model on this device; None for none."""
        return self._parse(self._load().get(_make_key(model)))

    def remember(self, model: str, value: T) -> None:
        """Keep a value; where that is impossible, a warning says so."""
        key = _make_key(model)
        # Read again: a backend of another model may have written meanwhile.
        newest = [entry for entry in self._load().items() if entry[0] != key][1 - MODELS_MAX :]
        try:
            with suppress(OSError):
                for draft in self._path.parent.glob(f".{self._path.stem}.*{disk.DRAFT_SUFFIX}"):  # of killed processes
                    disk.delete(draft)
            data = json.dumps(dict([*newest, (key, value)]), indent=1).encode()
            try:
                disk.write_durable(self._path, [data])
            except FileNotFoundError:  # another backend took our draft for that of a killed process
                disk.write_durable(self._path, [data])
        except OSError as error:
            log.warning("%s can't be remembered and will be measured again at the next start: %s", self._subject, error)

    def _load(self) -> dict[str, Any]:
        """All values by key; none where the file can't be read or is damaged."""
        try:
            values: Any = json.loads(disk.read_file(self._path))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s can't be read and is begun anew: %s", self._path, error)
            return {}
        if not isinstance(values, dict):
            log.warning("%s is damaged and begun anew", self._path)
            return {}
        return {key: value for key, value in values.items() if self._parse(value) is not None}


def _make_key(model: str) -> str:
    return f"{model} {describe_device()}"


def describe_device() -> str:
    """Device and mlx version, by which measurements are remembered."""
    info = mx.device_info()
    names = [str(info[key]) for key in ("device_name", "architecture") if info.get(key)]
    return " ".join([*(names or [str(mx.default_device())]), f"mlx {metadata.version('mlx')}"])
