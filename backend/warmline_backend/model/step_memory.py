"""Memory of a prefill step, reckoned from the graph of a chunk before it is computed.  Pure but for `hollow_weights`.

A chunk's memory grows with its tokens, with the tokens before it, or with the product of both, where attention writes
its scores.  The graphs of three chunks are read: of most tokens after none, and of least and most tokens after the
greatest depth.  Between them the memory is interpolated.  The largest array of a graph changes on the way, so
interpolated bytes are rather too many than too few.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from warmline_backend.kv_cache.chunk_draft import draft_chunk
from warmline_backend.kv_cache.codecs import ROWS, CacheLayout, CodecKind, flatten, rebuild

log = logging.getLogger(__name__)

CHUNK_TOKENS_MIN = 32  # down to which chunks are halved
DEPTH_MAX = 1_000_000  # reckoned, where neither the context nor the memory for KV is less

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


@dataclass(frozen=True)
class StepMemory:
    """Bytes that a chunk takes while it is computed, beside the KV."""

    tokens: tuple[int, int]  # of the smallest and the largest chunk
    depths: tuple[int, int]  # of the shallowest and the deepest place
    shallow: tuple[int, int]  # bytes of both chunks at the shallowest place
    deep: tuple[int, int]  # and at the deepest

    def bytes_for(self, tokens: int, depth: int) -> int:
        """Bytes of a chunk of `tokens` after `depth` tokens."""
        small, large = (_interpolate(self.depths, pair, depth) for pair in zip(self.shallow, self.deep, strict=True))
        return max(0, int(_interpolate(self.tokens, (small, large), tokens)))


def fit_tokens(step: int, room_bytes: int, bytes_for: Callable[[int], int]) -> int:
    """The longest chunk of `step`, its half, its quarter ... that takes at most `room_bytes`; else the shortest."""
    tokens = step
    while bytes_for(tokens) > room_bytes and halve_chunk(tokens) < tokens:
        tokens = halve_chunk(tokens)
    return tokens


def halve_chunk(tokens: int) -> int:
    """Half of a chunk, and CHUNK_TOKENS_MIN at least."""
    return min(tokens, max(CHUNK_TOKENS_MIN, tokens // 2))


def _interpolate(places: tuple[int, int], values: tuple[float, float], place: int) -> float:
    (first, last), (low, high) = places, values
    return low + (high - low) * (place - first) / max(1, last - first)


def reckon_step_memory(model: nn.Module, layout: CacheLayout, heads: int, step: int, depth_max: int) -> StepMemory:
    """Reckon chunks of up to `step` tokens after up to `depth_max` tokens.  Nothing is evaluated."""
    tokens = min(CHUNK_TOKENS_MIN, step), step
    depths = 0, max(step, min(depth_max, DEPTH_MAX))
    with hollow_weights(model):
        sample = _sample_layers(model, layout)
        reckon = partial(_reckon_bytes, model, layout, sample, heads)
        first = reckon(0, step)
        deep = reckon(depths[1], tokens[0]), reckon(depths[1], step)
    return StepMemory(tokens, depths, (first * tokens[0] // step, first), deep)


@contextmanager
def hollow_weights(model: nn.Module) -> Iterator[None]:
    """Replace the weights by one number each, repeated without memory: a graph's shapes depend on nothing else."""
    weights = model.parameters()
    model.update(tree_map(lambda array: mx.broadcast_to(mx.array(0, array.dtype), array.shape), weights))
    try:
        yield
    finally:
        model.update(weights)


def count_heads(config: Mapping[str, Any]) -> int:
    """Heads of the layer that has most; 1 where the config doesn't say."""
    counts = (config.get("text_config") or config).get("num_attention_heads")
    return max(
        (count for count in (counts if isinstance(counts, list) else [counts]) if isinstance(count, int)), default=1
    )


def _sample_layers(model: nn.Module, layout: CacheLayout) -> list[Any]:
    """Lazy cache of one token, for the shapes of its rows."""
    layers = layout.make_empty_cache()
    model(mx.zeros((1, 1), mx.int32), cache=layers)
    return layers


def _reckon_bytes(model: nn.Module, layout: CacheLayout, sample: list[Any], heads: int, depth: int, step: int) -> int:
    """Bytes that a chunk of `step` tokens takes while it is computed on top of `depth` tokens.

    The model must be hollow.  Operations are taken in their order, and arrays are freed after their last use.  Where
    the graph can't be read, it is one layer's attention with `heads` heads: recurrent layers are loops over tokens, or
    kernels that mlx can't export.
    """
    if not (layout.has_states or layout.problem):
        try:
            return _find_peak_bytes(
                lambda tokens: draft_chunk(model, layout, _make_deep_cache(layout, sample, depth), tokens).arrays,
                mx.zeros((1, step), mx.int32),
            )
        except Exception as error:  # noqa: BLE001  an estimate is not worth an end, whatever a model does while traced
            log.info("the graph of a prefill step can't be read: %s", error)
    leaves = zip(layout.leaves, flatten(sample), strict=False)  # none where the cache has no codecs
    keys = [held.keys[:, :, :1] for leaf, (_, held) in leaves if leaf.codec is ROWS]
    return max((_reckon_attention_bytes(row, heads, depth, step) for row in keys), default=0)


def _make_deep_cache(layout: CacheLayout, sample: list[Any], depth: int) -> list[Any]:
    """Cache of `depth` tokens, or of as many as its windows keep, with rows of the sample's shapes."""
    if not depth:
        return layout.make_empty_cache()
    leaves = []
    for leaf, (_, held) in zip(layout.leaves, flatten(sample), strict=True):
        count = depth if leaf.codec.kind is CodecKind.ROWS else min(depth, leaf.template.max_size)
        rows = leaf.codec.rows(held, 0, 1, 0, 1)
        fields = {name: mx.zeros((*row.shape[:2], count, *row.shape[3:]), row.dtype) for name, row in rows.items()}
        leaves.append(leaf.codec.build(fields, depth, leaf.template))
    return rebuild(layout.template, iter(leaves))


def _reckon_attention_bytes(row: mx.array, heads: int, depth: int, step: int) -> int:
    """Bytes of attention by this device's own kernel: some kernels write all scores, some don't."""
    _, kv_heads, _, width = row.shape
    keys = mx.zeros((1, kv_heads, depth + step, width), row.dtype)

    def attend(queries: mx.array) -> list[mx.array]:
        return [mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=1.0, mask="causal")]

    return _find_peak_bytes(attend, mx.zeros((1, max(heads, kv_heads) // kv_heads * kv_heads, step, width), row.dtype))


def _find_peak_bytes(function: Callable[[mx.array], list[mx.array]], example: mx.array) -> int:
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
