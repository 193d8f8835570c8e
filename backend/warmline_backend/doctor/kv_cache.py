"""What a conversation's KV consists of, what it weighs, and whether it can be kept on disk."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import CacheList

from warmline_backend.doctor.findings import Findings, gigabytes
from warmline_backend.doctor.sample_prompt import Question
from warmline_backend.kv_cache.codecs import CacheLayout
from warmline_backend.model.loader import ModelProblem
from warmline_backend.model.model import Weight, cache_maker, few_tokens, weigh


@dataclass(frozen=True)
class Cache:
    layout: CacheLayout
    weight: Weight
    layers: str  # such as "21 x CacheList(KVCache, KVCache), 57 x CacheList(KVCache)"


def check_cache(model: nn.Module, question: Question) -> tuple[Findings, Cache | None]:
    findings = Findings("cache")
    layout = _layout(model, question, findings)
    try:
        weight = weigh(layout, few_tokens(model, layout)[1])
    except Exception as error:  # noqa: BLE001  whatever a model that does not fit its own weights raises
        todo = "take config.json and weights from the same repository"
        if question.kv_bits:
            todo = "leave --kv-bits out, or choose a --kv-group-size that divides the width of the heads"
        findings.fail(f"the model can't compute a token: {type(error).__name__}: {error}", todo)
        return findings, None
    layers = _layers(layout.template)
    kept = f"{gigabytes(weight.row_bytes)} of KV a token" if weight.row_bytes else "no KV that grows"
    states = f", {gigabytes(weight.state_bytes)} of state a conversation" if weight.state_bytes else ""
    findings.ok(f"{kept}{states}: {layers}")
    if layout.problem:
        findings.warn(
            f"conversations can't be kept on disk: {layout.problem}",
            "nothing: it is served all the same, and starts cold after a restart",
        )
    else:
        findings.ok(_kept(layout))
    return findings, Cache(layout, weight, layers)


def _layout(model: nn.Module, question: Question, findings: Findings) -> CacheLayout:
    try:
        return CacheLayout.of(cache_maker(model, question.kv_bits, question.kv_group_size))
    except ModelProblem as problem:
        findings.fail(str(problem))
        return CacheLayout.of(cache_maker(model, 0, question.kv_group_size))


def _layers(layers: Iterable[Any]) -> str:
    counts = Counter(_kind(layer) for layer in layers)
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items())


def _kind(layer: Any) -> str:
    name = type(layer).__name__
    return f"{name}({', '.join(map(_kind, layer.caches))})" if isinstance(layer, CacheList) else name


def _kept(layout: CacheLayout) -> str:
    if layout.has_states:
        return "kept on disk; a conversation can be taken up at its checkpoints"
    if layout.window:
        return f"kept on disk; can be taken up at any token, with the last {layout.window:,} of its windows"
    return "kept on disk; a conversation can be taken up at any token"
