"""What a prefill step works with on top of weights and KV, read off its computation graph without computing it."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from warmline_backend.kv_cache.codecs import ROWS, CacheLayout, CodecKind, flatten, rebuild

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


def zero_weights(model: nn.Module) -> None:
    """Give the model zeros, lazy and without memory, for weights: all that a graph's shapes depend on."""
    model.update(tree_map(lambda array: mx.zeros(array.shape, array.dtype), model.parameters()))


def estimate_step_bytes(model: nn.Module, layout: CacheLayout, heads: int, depth: int, step: int) -> int:
    """Bytes that a chunk of `step` tokens takes while it is computed on top of `depth` tokens.

    The model must be hollow; nothing is evaluated.  Operations are taken in their order, arrays are freed after their
    last use.  Where the graph can't be read it is what one layer's attention with so many `heads` takes: recurrent
    layers are loops over tokens, or kernels that mlx can't export.
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
    """What a chunk leaves in the cache: prefill evaluates this, and no logits."""
    layers = layout.make_empty_cache()
    if depth and not layout.problem:
        before = max(1, min(layout.window, tokens.shape[1]))  # enough for shapes, and to fill rotating layers
        model(tokens[:, :before], cache=layers)
        layers = _deepen_cache(layout, layers, depth)
    model(tokens, cache=layers)
    held = tree_flatten([leaf.state for _, leaf in flatten(layers)])
    return [value for _, value in held if isinstance(value, mx.array)]


def _deepen_cache(layout: CacheLayout, layers: list[Any], depth: int) -> list[Any]:
    """The same cache with `depth` rows in every leaf that keeps all of them."""
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
    """One row of each leaf that keeps keys of all tokens, lazily."""
    layers = layout.make_empty_cache()
    model(mx.zeros((1, 1), mx.int32), cache=layers)
    leaves = zip(layout.leaves, flatten(layers), strict=False)  # none where the cache has no codecs
    return [held.keys[:, :, :1] for leaf, (_, held) in leaves if leaf.codec is ROWS]


def _estimate_attention_bytes(row: mx.array, heads: int, depth: int, step: int) -> int:
    """By this device's own kernel: some write all scores down, some don't."""
    _, kv_heads, _, width = row.shape
    keys = mx.zeros((1, kv_heads, depth + step, width), row.dtype)

    def attend(queries: mx.array) -> list[mx.array]:
        return [mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=1.0, mask="causal")]

    return _estimate_peak_bytes(
        attend, mx.zeros((1, max(heads, kv_heads) // kv_heads * kv_heads, step, width), row.dtype)
    )


def _estimate_peak_bytes(function: Callable[[mx.array], list[mx.array]], example: mx.array) -> int:
    graph = _Graph()
    mx.export_function(graph.record_event, function, example)
    return graph.peak_bytes()


@dataclass
class _Graph:
    operations: list[tuple[str, list[str], list[tuple[str, int]]]] = field(default_factory=list)

    def record_event(self, event: Mapping[str, Any]) -> None:
        """An event of mlx's export: of the operations, their names, their inputs' names, their outputs' sizes."""
        if event["type"] == "primitive":
            inputs = [name for name, *_ in event["inputs"]]
            outputs = [(name, math.prod(shape) * dtype.size) for name, shape, dtype in event["outputs"]]
            self.operations.append((event["name"], inputs, outputs))

    def peak_bytes(self) -> int:
        """The most that is held at once, if each array's memory is freed after its last use."""
        uses: Counter[str] = Counter()  # by the array that owns the memory
        owner: dict[str, str] = {}
        for name, inputs, outputs in self.operations:
            for input_name in inputs:
                uses[owner.setdefault(input_name, input_name)] += 1
            for output, _ in outputs:
                owner[output] = owner[inputs[0]] if name in _VIEW_OPERATIONS and inputs else output
        return self._replay(uses, owner)

    def _replay(self, uses: Counter[str], owner: dict[str, str]) -> int:
        sizes: dict[str, int] = {}
        held = peak = 0
        for name, inputs, outputs in self.operations:
            mine = [(output, size) for output, size in outputs if owner[output] == output]
            freed = self._release_inputs(inputs, uses, owner, sizes)
            if name in _IN_PLACE_OPERATIONS:  # its inputs' memory becomes its own
                held -= freed
            for output, size in mine:
                sizes[output] = size if uses[output] else 0
                held += sizes[output]
            peak = max(peak, held)
            if name not in _IN_PLACE_OPERATIONS:
                held -= freed
        return peak

    def _release_inputs(
        self, inputs: list[str], uses: Counter[str], owner: dict[str, str], sizes: dict[str, int]
    ) -> int:
        """Count a use of each input; the bytes that nobody needs afterwards."""
        freed = 0
        for input_name in inputs:
            held_by = owner[input_name]
            uses[held_by] -= 1
            if not uses[held_by]:
                freed += sizes.pop(held_by, 0)
        return freed
