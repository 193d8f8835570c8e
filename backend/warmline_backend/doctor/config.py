"""Checks of config.json against itself and against the names of the tensors."""

import re
from collections.abc import Iterable
from typing import Any

from warmline_backend.doctor.findings import Findings, format_first
from warmline_backend.model.architectures.glm_moe_dsa_config import FULL
from warmline_backend.model.loader import find_model_classes, format_by_kind

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
