"""What a conversation's KV consists of, what it weighs, and whether it can be kept on disk."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import CacheList

from warmline_backend.doctor.findings import Findings, format_bytes
from warmline_backend.doctor.sample_prompt import DoctorSettings
from warmline_backend.kv_cache.codecs import CacheLayout
from warmline_backend.model.loader import ModelError
from warmline_backend.model.model import KvSizes, make_cache_factory, measure_kv, run_probe


@dataclass(frozen=True)
class CacheSummary:
    layout: CacheLayout
    weight: KvSizes
    layers: str  # such as "21 x CacheList(KVCache, KVCache), 57 x CacheList(KVCache)"


def check_cache(model: nn.Module, settings: DoctorSettings) -> tuple[Findings, CacheSummary | None]:
    findings = Findings("cache")
    layout = _read_layout(model, settings, findings)
    try:
        weight = measure_kv(layout, run_probe(model, layout)[1])
    except Exception as error:  # noqa: BLE001  whatever a model that does not fit its own weights raises
        todo = "take config.json and weights from the same repository"
        if settings.kv_bits:
            todo = "leave --kv-bits out, or choose a --kv-group-size that divides the width of the heads"
        findings.fail(f"the model can't compute a token: {type(error).__name__}: {error}", todo)
        return findings, None
    layers = _format_layers(layout.template)
    kept = f"{format_bytes(weight.row_bytes)} of KV a token" if weight.row_bytes else "no KV that grows"
    states = f", {format_bytes(weight.state_bytes)} of state a conversation" if weight.state_bytes else ""
    findings.ok(f"{kept}{states}: {layers}")
    if layout.problem:
        findings.warn(
            f"conversations can't be kept on disk: {layout.problem}",
            "nothing: it is served all the same, and starts cold after a restart",
        )
    else:
        findings.ok(_describe_persistence(layout))
    return findings, CacheSummary(layout, weight, layers)


def _read_layout(model: nn.Module, settings: DoctorSettings, findings: Findings) -> CacheLayout:
    try:
        return CacheLayout.from_factory(make_cache_factory(model, settings.kv_bits, settings.kv_group_size))
    except ModelError as problem:
        findings.fail(str(problem))
        return CacheLayout.from_factory(make_cache_factory(model, 0, settings.kv_group_size))


def _format_layers(layers: Iterable[Any]) -> str:
    counts = Counter(_format_layer(layer) for layer in layers)
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items())


def _format_layer(layer: Any) -> str:
    name = type(layer).__name__
    return f"{name}({', '.join(map(_format_layer, layer.caches))})" if isinstance(layer, CacheList) else name


def _describe_persistence(layout: CacheLayout) -> str:
    if layout.has_states:
        return "kept on disk; a conversation can be taken up at its checkpoints"
    if layout.window:
        return f"kept on disk; can be taken up at any token, with the last {layout.window:,} of its windows"
    return "kept on disk; a conversation can be taken up at any token"
