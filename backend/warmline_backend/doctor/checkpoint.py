"""Checks of a checkpoint: config.json, and the weights against the model that it describes.  Nothing is evaluated."""

import re
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from warmline_backend.doctor.findings import CheckError, Findings, format_bytes, format_first
from warmline_backend.model import loader
from warmline_backend.model.architectures.glm_moe_dsa_config import FULL

INDEXER_PATTERN = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.indexer\.")
CONFIG_REMEDY = "take config.json and weights from the same repository, or find a conversion of this very model"


def find_custom_code(config: dict[str, Any]) -> str:
    """File in the model's folder that builds the model; "" where mlx-lm or this package has the architecture."""
    return str(config.get("model_file") or "")


def check_config(findings: Findings, folder: Path, tensor_names: Set[str] | None) -> dict[str, Any]:
    """Config of the folder; `tensor_names` is None where not all are known.  Raises ModelError."""
    config = loader.read_config(folder)
    if custom_code := find_custom_code(config):
        findings.warn(
            f"the model brings its own code, {custom_code}",
            "read that file; serve with --trust-remote-code, which runs it, only if you trust it",
        )
        return config
    arguments = _read_model_args(findings, config)
    if arguments is not None:
        text = config.get("text_config") or {}
        layers = config.get("num_hidden_layers", text.get("num_hidden_layers"))
        findings.ok(f"{config['model_type']}" + (f", {layers} layers" if layers else ""))
        if tensor_names is not None:
            _check_indexers(findings, arguments, tensor_names)
    _check_quantization(findings, config)
    return config


def _read_model_args(findings: Findings, config: dict[str, Any]) -> Any:
    """Arguments that the architecture reads from config.json; None where it can't."""
    kind = config["model_type"]
    try:
        _, args_class = loader.find_model_classes(config)
    except ValueError:
        findings.fail(
            f"unknown architecture {kind} (model_type in config.json)",
            "a newer mlx-lm may; else choose a model of an architecture that mlx-lm has",
        )
        return None
    try:
        return args_class.from_dict(config)  # type: ignore[attr-defined]
    except TypeError as error:  # dataclasses name what they lack
        what = f"config.json is not complete for {kind}: {error}"
    except ValueError as error:
        what = f"config.json can't be meant: {error}"
    except Exception as error:  # noqa: BLE001  an architecture may raise anything on values that it does not expect
        what = f"config.json has values that {kind} does not expect: {type(error).__name__}: {error}"
    findings.fail(what, CONFIG_REMEDY)
    return None


def _check_indexers(findings: Findings, arguments: Any, names: Set[str]) -> None:
    """Check that layers which select tokens have an indexer, and that layers which share a selection have none."""
    types: list[str] | None = getattr(arguments, "indexer_types", None)
    if not types:
        return
    indexers = {int(match[1]) for name in names if (match := INDEXER_PATTERN.search(name))}
    full = {layer for layer, kind in enumerate(types) if kind == FULL}
    lacking, needless = sorted(full - indexers), sorted((set(range(len(types))) - full) & indexers)
    for layers, kind, has in ((lacking, "full", "have no"), (needless, "shared", "have an")):
        if layers:
            (line,) = loader.format_by_kind(f"layers.{layer}.indexer" for layer in layers)
            numbers = line[line.index("(") + 1 : -1]  # as ranges: "0-2, 6"
            what = f'{len(layers)} layers are "{kind}" in indexer_types and {has} indexer in the weights: {numbers}'
            findings.fail(what, CONFIG_REMEDY)
    if not lacking and not needless:
        shared = len(types) - len(full)
        findings.ok(f"{len(full)} layers select tokens, {shared} share a selection, as the weights have it")


def _check_quantization(findings: Findings, config: dict[str, Any]) -> None:
    used, other = config.get("quantization"), config.get("quantization_config")
    if not isinstance(used, dict):
        return
    keys = ("bits", "group_size")
    if lacking := [key for key in keys if not isinstance(used.get(key), int)]:
        findings.fail(f"quantization in config.json lacks {' and '.join(lacking)}", CONFIG_REMEDY)
    differing = [key for key in keys if key in other and other[key] != used.get(key)] if isinstance(other, dict) else []
    if differing:
        listed = format_first(differing)
        what = f"quantization and quantization_config in config.json differ in {listed}; the first is used"
        findings.warn(what, "nothing, if the parameters below are right")


OTHER_WEIGHTS = "find a conversion of this very model for mlx-lm, or download it again; never load it without these"
KINDS_MAX = 12  # listed each


@dataclass(frozen=True)
class LazyModel:
    """Model with its weights as lazy arrays, and the config as mlx-lm completes it."""

    model: nn.Module
    config: dict[str, Any]
    weight_bytes: int
    quantization: str  # for people; "" where weights are not quantized
    dtypes: dict[str, int]  # bytes by type


def check_weights(findings: Findings, folder: Path, trust_remote_code: bool) -> LazyModel | None:
    """The model with its weights; None where they don't fit.  Raises CheckError, ModelError."""
    try:
        model, config = loader.load_lazy_model(folder, trust_remote_code=trust_remote_code)
    except loader.ParameterMismatchError as mismatch:
        for what in _describe_mismatch(mismatch):
            findings.fail(what, OTHER_WEIGHTS)
        return None
    except loader.ModelError:
        raise
    except Exception as error:
        what = f"the model can't be built from its weights: {type(error).__name__}: {error}"
        raise CheckError(what, OTHER_WEIGHTS) from error
    dtypes: Counter[str] = Counter()
    parameters = tree_flatten(model.parameters())
    for _, array in parameters:
        dtypes[loader.format_dtype(array)] += array.nbytes
    listed = ", ".join(f"{format_bytes(count)} as {name}" for name, count in dtypes.most_common())
    findings.ok(f"all {len(parameters):,} parameters are there, in their shapes: {listed}")
    if quantization := _describe_quantization(model):
        findings.ok(f"quantized: {quantization}")
    return LazyModel(model, config, dtypes.total(), quantization, dict(dtypes))


def _describe_mismatch(mismatch: loader.ParameterMismatchError) -> Iterator[str]:
    """A text for each kind of difference."""
    groups = {
        "that the model needs are not in the weights": mismatch.missing,
        "of the weights are not in the model": mismatch.unexpected,
    }
    for what, names in groups.items():
        if names:
            lines = loader.format_by_kind(names)
            more = f"; and {len(lines) - KINDS_MAX} more kinds" if lines[KINDS_MAX:] else ""
            yield f"{len(names)} parameters {what}: {'; '.join(lines[:KINDS_MAX])}{more}"
    shapes = tuple((name, str(list(needed)), str(list(found))) for name, needed, found in mismatch.wrong_shape)
    differing = {"type than the model computes with": mismatch.wrong_type, "shape than the model's": shapes}
    for what, parameters in differing.items():
        if parameters:
            kinds = loader.group_mismatches(parameters).items()
            listed = format_first(f"{kind} {found}, not {needed}" for kind, (needed, found) in kinds)
            yield f"{len(parameters)} parameters have another {what}: {listed}"


def _describe_quantization(model: nn.Module) -> str:
    """Quantizations of the modules, the most frequent first."""
    ways: Counter[str] = Counter()
    for _, module in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        if hasattr(module, "bits") and hasattr(module, "group_size"):
            ways[f"{module.bits} bits in groups of {module.group_size}, {getattr(module, 'mode', 'affine')}"] += 1
    return "; ".join(f"{count} modules {way}" for way, count in ways.most_common())
