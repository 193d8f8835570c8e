"""Checks of a checkpoint: config.json, and the weights against the model that it describes.  Nothing is evaluated."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from warmline_backend.doctor.findings import Findings, format_bytes, format_first
from warmline_backend.model.architectures.glm_moe_dsa_config import FULL
from warmline_backend.model.loader import (
    ModelError,
    ParameterMismatchError,
    find_model_classes,
    format_by_kind,
    format_dtype,
    group_mismatches,
    load_lazy_model,
)

INDEXER_PATTERN = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.indexer\.")
CONFIG_REMEDY = "take config.json and weights from the same repository, or find a conversion of this very model"


def find_custom_code(config: dict[str, Any]) -> str:
    """File in the model's folder that builds the model; "" where mlx-lm or this package has the architecture."""
    return str(config.get("model_file") or "")


def check_config(config: dict[str, Any], tensor_names: Iterable[str] | None) -> Findings:
    """Findings about `config`, as `loader.read_config` returns it; `tensor_names` is None where not all are known."""
    findings = Findings("config")
    if find_custom_code(config):
        findings.warn(
            f"the model is built by code of its own, {find_custom_code(config)}",
            "read that file; serve with --trust-remote-code, which runs it, only if you trust it",
        )
        return findings
    arguments = _read_model_args(config, findings)
    if arguments is not None:
        findings.ok(_describe_config(config))
        if tensor_names is not None:
            _check_indexers(arguments, set(tensor_names), findings)
    _check_quantization(config, findings)
    return findings


def _read_model_args(config: dict[str, Any], findings: Findings) -> Any:
    """Arguments that the architecture reads from config.json; None where it can't."""
    kind = config["model_type"]
    try:
        _, args_class = find_model_classes(config)
    except ValueError:
        findings.fail(
            f"nobody here knows the architecture {kind} (model_type in config.json)",
            "a newer mlx-lm may; else choose a model of an architecture that mlx-lm has",
        )
        return None
    try:
        return args_class.from_dict(config)  # type: ignore[attr-defined]
    except TypeError as error:  # dataclasses name what they lack
        findings.fail(f"config.json is not complete for {kind}: {error}", CONFIG_REMEDY)
    except ValueError as error:
        findings.fail(f"config.json can't be meant: {error}", CONFIG_REMEDY)
    except Exception as error:  # noqa: BLE001  an architecture may raise anything on values that it does not expect
        findings.fail(
            f"config.json has values that {kind} does not expect: {type(error).__name__}: {error}", CONFIG_REMEDY
        )
    return None


def _describe_config(config: dict[str, Any]) -> str:
    text = config.get("text_config") or {}
    layers = config.get("num_hidden_layers", text.get("num_hidden_layers"))
    return f"{config['model_type']}" + (f", {layers} layers" if layers else "")


def _check_indexers(arguments: Any, names: set[str], findings: Findings) -> None:
    """Check that layers which select tokens have an indexer, and that layers which share a selection have none."""
    types: list[str] | None = getattr(arguments, "indexer_types", None)
    if not types:
        return
    having = {int(match[1]) for name in names if (match := INDEXER_PATTERN.search(name))}
    own = {layer for layer, kind in enumerate(types) if kind == FULL}
    if lacking := sorted(own - having):
        findings.fail(
            f'{len(lacking)} layers are "full" in indexer_types and have no indexer in the weights: '
            f"{_format_layer_numbers(lacking)}",
            CONFIG_REMEDY,
        )
    if needless := sorted((set(range(len(types))) - own) & having):
        findings.fail(
            f'{len(needless)} layers are "shared" in indexer_types and have an indexer in the weights: '
            f"{_format_layer_numbers(needless)}",
            CONFIG_REMEDY,
        )
    if not lacking and not needless:
        findings.ok(
            f"{len(own)} layers select tokens, {len(types) - len(own)} share a selection, as the weights have it"
        )


def _format_layer_numbers(layers: list[int]) -> str:
    """Layer numbers as ranges: "0-2, 6"."""
    (line,) = format_by_kind(f"layers.{layer}.indexer" for layer in layers)
    return line[line.index("(") + 1 : -1]


def _check_quantization(config: dict[str, Any], findings: Findings) -> None:
    ours, theirs = config.get("quantization"), config.get("quantization_config")
    if not isinstance(ours, dict):
        return
    if lacking := [key for key in ("bits", "group_size") if not isinstance(ours.get(key), int)]:
        findings.fail(f"quantization in config.json lacks {' and '.join(lacking)}", CONFIG_REMEDY)
    if isinstance(theirs, dict):
        differing = [key for key in ("bits", "group_size") if key in theirs and theirs[key] != ours.get(key)]
        if differing:
            findings.warn(
                f"quantization and quantization_config in config.json differ in {format_first(differing)}; the first "
                "is used",
                "nothing, if the parameters below are right",
            )


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


def check_weights(folder: Path, *, trust_remote_code: bool) -> tuple[Findings, LazyModel | None]:
    findings = Findings("parameters")
    try:
        model, config = load_lazy_model(folder, trust_remote_code=trust_remote_code)
    except ParameterMismatchError as mismatch:
        _report_mismatch(mismatch, findings)
        return findings, None
    except ModelError as problem:
        findings.fail(str(problem))
        return findings, None
    except Exception as error:  # noqa: BLE001  an architecture may raise anything on weights that it does not expect
        findings.fail(f"the model can't be built from its weights: {type(error).__name__}: {error}", OTHER_WEIGHTS)
        return findings, None
    assembled = _summarize_model(model, config)
    count = len(tree_flatten(model.parameters()))
    findings.ok(f"all {count:,} parameters are there, in their shapes: {_format_dtypes(assembled.dtypes)}")
    if assembled.quantization:
        findings.ok(f"quantized: {assembled.quantization}")
    return findings, assembled


def _report_mismatch(mismatch: ParameterMismatchError, findings: Findings) -> None:
    parts = (
        (mismatch.missing, "that the model needs are not in the weights"),
        (mismatch.unexpected, "of the weights are not in the model"),
    )
    for names, what in parts:
        if names:
            findings.fail(f"{len(names)} parameters {what}: {_format_kinds(names)}", OTHER_WEIGHTS)
    if mismatch.wrong_type:
        listed = format_first(
            f"{kind} {found}, not {needed}" for kind, (needed, found) in group_mismatches(mismatch.wrong_type).items()
        )
        findings.fail(
            f"{len(mismatch.wrong_type)} parameters have another type than the model computes with: {listed}",
            OTHER_WEIGHTS,
        )
    if mismatch.wrong_shape:
        listed = format_first(
            f"{kind} {list(found)}, not {list(needed)}"
            for kind, (needed, found) in group_mismatches(mismatch.wrong_shape).items()
        )
        findings.fail(
            f"{len(mismatch.wrong_shape)} parameters have another shape than the model's: {listed}", OTHER_WEIGHTS
        )


def _format_kinds(names: Iterable[str]) -> str:
    lines = format_by_kind(names)
    return "; ".join(lines[:KINDS_MAX]) + (f"; and {len(lines) - KINDS_MAX} more kinds" if lines[KINDS_MAX:] else "")


def _summarize_model(model: nn.Module, config: dict[str, Any]) -> LazyModel:
    dtypes: Counter[str] = Counter()
    for _, array in tree_flatten(model.parameters()):
        dtypes[format_dtype(array)] += array.nbytes
    return LazyModel(model, config, dtypes.total(), _describe_quantization(model), dict(dtypes))


def _format_dtypes(dtypes: dict[str, int]) -> str:
    ordered = sorted(dtypes.items(), key=lambda item: -item[1])
    return ", ".join(f"{format_bytes(count)} as {name}" for name, count in ordered)


def _describe_quantization(model: nn.Module) -> str:
    """Quantizations of the modules, the most frequent first."""
    ways: Counter[str] = Counter()
    for _, module in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        if hasattr(module, "bits") and hasattr(module, "group_size"):
            ways[f"{module.bits} bits in groups of {module.group_size}, {getattr(module, 'mode', 'affine')}"] += 1
    return "; ".join(f"{count} modules {way}" for way, count in ways.most_common())
