"""Estimates from a model's lazy graph: its KV by layer, bytes a row, persistence, and the memory of a prefill step."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import CacheList

from warmline_backend.doctor.findings import CheckError, Findings, format_bytes
from warmline_backend.doctor.settings import DoctorSettings
from warmline_backend.kv_cache.codecs import ROWS, CacheLayout, CodecKind, flatten, rebuild
from warmline_backend.model.loader import ModelError
from warmline_backend.model.model import KvSizes, make_cache_factory, measure_kv, run_probe


@dataclass(frozen=True)
class CacheSummary:
    layout: CacheLayout
    weight: KvSizes
    layers: str  # such as "21 x CacheList(KVCache, KVCache), 57 x CacheList(KVCache)"


def check_cache(findings: Findings, model: nn.Module, settings: DoctorSettings) -> CacheSummary:
    """Layout and sizes of the model's cache.  Raises CheckError where the model can't compute."""
    layout = _read_layout(findings, model, settings)
    try:
        weight = measure_kv(layout, run_probe(model, layout)[1])
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
        return CacheLayout.from_factory(make_cache_factory(model, settings.kv_bits, settings.kv_group_size))
    except ModelError as error:
        findings.fail(str(error))
        return CacheLayout.from_factory(make_cache_factory(model, 0, settings.kv_group_size))


def _format_layer(layer: Any) -> str:
    name = type(layer).__name__
    return f"{name}({', '.join(map(_format_layer, layer.caches))})" if isinstance(layer, CacheList) else name


log = logging.getLogger(__name__)

# Operations that give their input in another form without copying it, where mlx can.
_VIEW_OPERATIONS = frozenset(
    {"AsStrided", "Broadcast", "Copy", "CustomTransforms", "Depends", "ExpandDims", "Flatten", "Reshape", "Slice"}
    | {"Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View"}
)
# Operations that write over their first input where nobody else reads it.
_IN_PLACE_OPERATIONS = frozenset(
    {"Abs", "Add", "AsType", "Compiled", "Divide", "DynamicSliceUpdate", "Exp", "Maximum", "Minimum", "Multiply"}
    | {"Negative", "Power", "Scatter", "ScatterAxis", "Select", "Sigmoid", "SliceUpdate", "Softmax", "Square"}
    | {"Subtract", "Tanh"}
)


class _Operation(NamedTuple):
    """An operation of a graph: names of its inputs, and bytes of its outputs by name."""

    name: str
    inputs: list[str]
    outputs: dict[str, int]


def zero_weights(model: nn.Module) -> None:
    """Replace the model's weights by lazy zeros without memory: a graph's shapes depend on nothing else."""
    model.update(tree_map(lambda array: mx.zeros(array.shape, array.dtype), model.parameters()))


def estimate_step_bytes(model: nn.Module, layout: CacheLayout, heads: int, depth: int, step: int) -> int:
    """Bytes that a chunk of `step` tokens takes while it is computed on top of `depth` tokens.

    The model must be hollow; nothing is evaluated.  Operations are taken in their order, and arrays are freed after
    their last use.  Where the graph can't be read, the estimate is one layer's attention with `heads` heads:
    recurrent layers are loops over tokens, or kernels that mlx can't export.
    """
    if not layout.has_states:
        try:
            return _estimate_peak_bytes(
                lambda tokens: _run_chunk(model, layout, depth, tokens), mx.zeros((1, step), mx.int32)
            )
        except Exception as error:  # noqa: BLE001  an estimate is not worth an end, whatever a model does while traced
            log.info("the graph of a prefill step can't be read: %s", error)
    return max((_estimate_attention_bytes(keys, heads, depth, step) for keys in _sample_keys(model, layout)), default=0)


def _run_chunk(model: nn.Module, layout: CacheLayout, depth: int, tokens: mx.array) -> list[mx.array]:
    """Arrays that a chunk leaves in the cache: prefill evaluates these, and no logits."""
    layers = layout.make_empty_cache()
    if depth and not layout.problem:
        before = max(1, min(layout.window, tokens.shape[1]))  # enough for shapes, and to fill rotating layers
        model(tokens[:, :before], cache=layers)
        layers = _deepen_cache(layout, layers, depth)
    model(tokens, cache=layers)
    held = tree_flatten([leaf.state for _, leaf in flatten(layers)])
    return [value for _, value in held if isinstance(value, mx.array)]


def _deepen_cache(layout: CacheLayout, layers: list[Any], depth: int) -> list[Any]:
    """Copy of the cache with `depth` rows in every leaf that keeps all rows."""
    deep = []
    for leaf, (_, held) in zip(layout.leaves, flatten(layers), strict=True):
        if leaf.codec.kind is not CodecKind.ROWS:
            deep.append(held)
            continue
        rows = leaf.codec.rows(held, 0, 1, 0, 1)
        fields = {name: mx.zeros((*row.shape[:2], depth, *row.shape[3:]), row.dtype) for name, row in rows.items()}
        deep.append(leaf.codec.build(fields, depth, leaf.template))
    return rebuild(layout.template, iter(deep))


def _sample_keys(model: nn.Module, layout: CacheLayout) -> list[mx.array]:
    """One lazy row of each leaf that keeps the keys of all tokens."""
    layers = layout.make_empty_cache()
    model(mx.zeros((1, 1), mx.int32), cache=layers)
    leaves = zip(layout.leaves, flatten(layers), strict=False)  # none where the cache has no codecs
    return [held.keys[:, :, :1] for leaf, (_, held) in leaves if leaf.codec is ROWS]


def _estimate_attention_bytes(row: mx.array, heads: int, depth: int, step: int) -> int:
    """Bytes of attention by this device's own kernel: some kernels write all scores, some don't."""
    _, kv_heads, _, width = row.shape
    keys = mx.zeros((1, kv_heads, depth + step, width), row.dtype)

    def attend(queries: mx.array) -> list[mx.array]:
        return [mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=1.0, mask="causal")]

    return _estimate_peak_bytes(
        attend, mx.zeros((1, max(heads, kv_heads) // kv_heads * kv_heads, step, width), row.dtype)
    )


def _estimate_peak_bytes(function: Callable[[mx.array], list[mx.array]], example: mx.array) -> int:
    """Most bytes held at once by a function's graph, if each array's memory is freed after its last use."""
    operations: list[_Operation] = []

    def record_event(event: Mapping[str, Any]) -> None:
        """Record an operation of mlx's export."""
        if event["type"] == "primitive":
            inputs = [name for name, *_ in event["inputs"]]
            outputs = {name: math.prod(shape) * dtype.size for name, shape, dtype in event["outputs"]}
            operations.append(_Operation(event["name"], inputs, outputs))

    mx.export_function(record_event, function, example)
    uses: Counter[str] = Counter()  # by the array that owns the memory
    owner: dict[str, str] = {}
    for operation in operations:
        for name in operation.inputs:
            uses[owner.setdefault(name, name)] += 1
        for name in operation.outputs:
            is_view = operation.name in _VIEW_OPERATIONS and operation.inputs
            owner[name] = owner[operation.inputs[0]] if is_view else name
    return _replay_operations(operations, uses, owner)


def _replay_operations(operations: list[_Operation], uses: Counter[str], owner: dict[str, str]) -> int:
    sizes: dict[str, int] = {}
    held = peak = 0
    for operation in operations:
        freed = 0
        for memory in map(owner.__getitem__, operation.inputs):
            uses[memory] -= 1
            if not uses[memory]:
                freed += sizes.pop(memory, 0)
        made = {name: size for name, size in operation.outputs.items() if owner[name] == name and uses[name]}
        sizes |= made
        is_in_place = operation.name in _IN_PLACE_OPERATIONS  # its inputs' memory becomes its own
        peak = max(peak, held + sum(made.values()) - (freed if is_in_place else 0))
        held += sum(made.values()) - freed
    return peak
