"""Loading of a model by mlx-lm's loader: our architectures before its own, and every parameter checked.

A parameter that a checkpoint lacks would keep its random initial values, and one that the model does not know would be
ignored: both give answers that look right for a while, so both are errors.  So are packed numbers that would be taken
for plain ones: mlx reads 8-bit floats as integers.
"""

import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_config, load_model

from warmline_backend.model.architectures import ARCHITECTURES

T = TypeVar("T")

LAYER_RUNS_SHOWN_MAX = 12
LAYERS_MAX = 10_000


class ModelError(Exception):
    """A model that can't be served; the text says the cause and the remedy."""


class ParameterMismatchError(ModelError):
    """Parameters in the files that differ from the model's.  `str` lists them by kind."""

    def __init__(
        self,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        wrong_shape: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (),
        wrong_type: tuple[tuple[str, str, str], ...] = (),
    ) -> None:
        """Take names of parameters; for a wrong shape or type also the needed one and the one found."""
        self.missing, self.unexpected = missing, unexpected
        self.wrong_shape, self.wrong_type = wrong_shape, wrong_type
        parts = [
            *_format_section("missing", "that the model needs and the files lack", missing),
            *_format_section("unexpected", "in the files that the model does not have", unexpected),
            *_format_mismatches("of another shape", "than the model needs", wrong_shape),
            *_format_mismatches("of another type", "than the model computes with", wrong_type),
        ]
        super().__init__(
            "its weights don't fit its config.json, and with any of them left out its answers would be wrong; "
            "download it again, or find a conversion of this very model\n" + "\n".join(parts)
        )


def _format_section(title: str, reason: str, names: Sequence[str]) -> list[str]:
    lines = [f"  {line}" for line in format_by_kind(names)]
    return [f"{len(names)} {title} ({reason}):", *lines] if names else []


def _format_mismatches(title: str, reason: str, parameters: Sequence[tuple[str, T, T]]) -> list[str]:
    kinds = group_mismatches(parameters).items()
    lines = [f"  {kind}: needed {needed}, found {found}" for kind, (needed, found) in kinds]
    return [*_format_section(title, reason, [name for name, *_ in parameters]), *lines]


def mask_layer_number(name: str) -> str:
    """Replace the layer's number in a name by `*`."""
    return re.sub(r"\.\d+\.", ".*.", name, count=1)


def group_mismatches(parameters: Iterable[tuple[str, T, T]]) -> dict[str, tuple[T, T]]:
    """Needed and found value of one parameter of each kind, by kind."""
    return {mask_layer_number(name): (needed, found) for name, needed, found in parameters}


def format_by_kind(names: Iterable[str]) -> list[str]:
    """Format a line for each kind of parameter, with its layers."""
    places: dict[str, list[int]] = {}
    for name in names:
        number = re.search(r"\.(\d+)\.", name)
        places.setdefault(mask_layer_number(name), []).extend([int(number[1])] if number else [])
    return [kind + _format_layers(sorted(set(numbers))) for kind, numbers in sorted(places.items())]


def _format_layers(numbers: list[int]) -> str:
    if not numbers:
        return ""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:LAYER_RUNS_SHOWN_MAX])
    more = ", ..." if len(runs) > LAYER_RUNS_SHOWN_MAX else ""
    return f": {len(numbers)} layer{'s' * (len(numbers) > 1)} ({shown}{more})"


def find_model_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """Classes of a model and of its arguments.  Raises ValueError for an unknown architecture."""
    if architecture := ARCHITECTURES.get(config["model_type"]):
        return architecture.Model, architecture.ModelArgs
    try:
        classes: tuple[type[nn.Module], type] = _get_classes(config)
    except AttributeError:  # a module of mlx-lm that is no architecture
        raise ValueError(f"Model type {config['model_type']} not supported.") from None
    return classes


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json and generation_config.json as mlx-lm does.  Raises ModelError, OSError."""
    try:
        config: Any = load_config(folder)
    except OSError:
        raise
    except Exception as error:  # JSON may be broken, no text, no object, or nested without end
        raise ModelError(
            f"config.json or generation_config.json in {folder} is damaged, download both again "
            f"({type(error).__name__}: {error})"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f'{folder / "config.json"} names no model_type; expected one such as "llama"')
    text = config.get("text_config") or {}
    if not isinstance(text, dict):
        raise ModelError(f"text_config in {folder / 'config.json'} is no object; download the file again")
    for layers in (config.get("num_hidden_layers"), text.get("num_hidden_layers")):
        if isinstance(layers, int) and layers > LAYERS_MAX:  # making them would take all memory there is
            raise ModelError(
                f"num_hidden_layers in {folder / 'config.json'} is {layers}, and no model has more than {LAYERS_MAX}; "
                "download the file again"
            )
    return config


def load_lazy_model(folder: Path, *, trust_remote_code: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Load the model with its weights, and its config; lazily: only headers of the files are read.

    Raises ParameterMismatchError; ModelError for untrusted code and for errors of an architecture on these files;
    ValueError for an unknown architecture or a contradictory config; OSError, FileNotFoundError for the files.
    """
    config = read_config(folder)
    if glob.escape(str(folder)) != str(folder):  # mlx-lm would take the path for a pattern, and find nothing, or others
        raise ModelError(f"mlx-lm can't read a folder with *, ? or [ in its path: {folder}; rename it, or give a link")
    if (code := config.get("model_file")) and not trust_remote_code:
        raise ModelError(
            f"its config.json names {code}, code that comes with the model and would run here; read {folder / code}, "
            "and pass --trust-remote-code if you trust it"
        )
    try:
        model, config = load_model(
            folder, lazy=True, get_model_classes=_find_checking_classes, trust_remote_code=trust_remote_code
        )
    except (ModelError, ValueError, OSError, MemoryError):
        raise
    except (Exception, SystemExit) as error:  # whatever constructors, mlx, and code that comes with a model raise
        if code:
            raise ModelError(
                f"{folder / code}, code that comes with the model, fails; see what it needs installed, and whether "
                f"it is made for these weights ({type(error).__name__}: {error})"
            ) from error
        raise ModelError(
            f"config.json and the weights can't be those of one {config['model_type']}; download both again from the "
            f"same repository, or find a conversion of this very model ({type(error).__name__}: {error})"
        ) from error
    return model, config


def _find_checking_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    model_class, args_class = find_model_classes(config)
    return _make_checking_class(model_class), args_class


def _make_checking_class(model_class: type[nn.Module]) -> type[nn.Module]:
    """Make a subclass that reports all wrong weights at once, by kind."""

    class Checking(model_class):  # type: ignore[misc]
        def load_weights(self, weights: list[tuple[str, mx.array]], strict: bool = True) -> nn.Module:
            check_parameters(self, dict(weights))
            return super().load_weights(weights, strict)

    Checking.__name__, Checking.__qualname__ = model_class.__name__, model_class.__qualname__
    Checking.__module__ = model_class.__module__
    return Checking


def check_parameters(model: nn.Module, weights: Mapping[str, mx.array]) -> None:
    """Raise ParameterMismatchError unless names and shapes of `weights` are the model's, floats as floats."""
    needed = dict(tree_flatten(model.parameters()))
    missing = tuple(sorted(needed.keys() - weights.keys()))
    unexpected = tuple(sorted(weights.keys() - needed.keys()))
    both = [(name, needed[name], weights[name]) for name in sorted(needed.keys() & weights.keys())]
    wrong = tuple((name, tuple(a.shape), tuple(b.shape)) for name, a, b in both if a.shape != b.shape)
    types = tuple(
        (name, format_dtype(a), format_dtype(b))
        for name, a, b in both
        if mx.issubdtype(a.dtype, mx.floating) and not mx.issubdtype(b.dtype, mx.floating)
    )
    if missing or unexpected or wrong or types:
        raise ParameterMismatchError(missing, unexpected, wrong, types)


def format_dtype(array: mx.array) -> str:
    """Format a type as in "bfloat16"."""
    return str(array.dtype).removeprefix("mlx.core.")
