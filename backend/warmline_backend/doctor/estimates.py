"""Checks of a model's cache from its lazy graph: its KV by layer, bytes a row, persistence."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import CacheList

from warmline_backend.doctor.findings import CheckError, Findings, format_bytes
from warmline_backend.doctor.settings import DoctorSettings
from warmline_backend.kv_cache.codecs import CacheLayout
from warmline_backend.model.kv_quantization import make_cache_factory
from warmline_backend.model.loader import ModelError
from warmline_backend.model.model import KvSizes, measure_kv, run_probe


@dataclass(frozen=True)
class CacheSummary:
    layout: CacheLayout
    weight: KvSizes
    layers: str  # such as "21 x CacheList(KVCache, KVCache), 57 x CacheList(KVCache)"


def check_cache(findings: Findings, model: nn.Module, settings: DoctorSettings) -> CacheSummary:
    """Layout and sizes of the model's cache.  Raises CheckError where the model can't compute, ModelError."""
    layout = _read_layout(findings, model, settings)
    try:
        weight = measure_kv(layout, run_probe(model, layout)[1])
    except ModelError:
        raise
    except Exception as error:  # whatever a model that does not fit its own weights raises
        todo = "take config.json and weights from the same repository"
        if settings.kv_bits:
            todo = "leave --kv-bits out, or choose a --kv-group-size that divides the width of the heads"
        raise CheckError(f"the model can't compute a token: {type(error).__name__}: {error}", todo) from error
    counts = Counter(map(_format_layer, layout.template))
    layers = ", ".join(f"{count} x {kind}" for kind, count in counts.items())
    rows = f"{format_bytes(weight.row_bytes)} of KV a token" if weight.row_bytes else "no KV that grows"
    states = f", {format_bytes(weight.state_bytes)} of state a conversation" if weight.state_bytes else ""
    findings.ok(f"{rows}{states}: {layers}")
    if layout.problem:
        findings.warn(
            f"conversations can't be saved to disk: {layout.problem}",
            "nothing: it is served all the same, and starts cold after a restart",
        )
    elif layout.has_states:
        findings.ok("saved to disk; a conversation resumes at its checkpoints")
    elif layout.window:
        window = f"{layout.window:,}"
        findings.ok(f"saved to disk; resumes at any token, with the last {window} of its windows")
    else:
        findings.ok("saved to disk; a conversation resumes at any token")
    return CacheSummary(layout, weight, layers)


def _read_layout(findings: Findings, model: nn.Module, settings: DoctorSettings) -> CacheLayout:
    try:
        return CacheLayout.from_factory(make_cache_factory(model, settings.kv_quantization))
    except ModelError as error:
        findings.fail(str(error))
        return CacheLayout.from_factory(make_cache_factory(model, None))


def _format_layer(layer: Any) -> str:
    name = type(layer).__name__
    return f"{name}({', '.join(map(_format_layer, layer.caches))})" if isinstance(layer, CacheList) else name
