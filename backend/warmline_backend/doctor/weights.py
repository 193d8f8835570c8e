"""Checks of the weights against the model that config.json describes: names, shapes, types.  Nothing is evaluated."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from warmline_backend.doctor.findings import Findings, format_bytes, format_first
from warmline_backend.model.loader import (
    ModelError,
    ParameterMismatchError,
    format_by_kind,
    format_dtype,
    group_mismatches,
    load_lazy_model,
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
