"""What a prefill step works with on top of weights and KV, read off its computation graph without computing it."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from warmline_backend.codecs import CacheLayout, Kind, flatten, rebuild

# Operations that give their input in another form without copying it, where mlx can.
_VIEWS = frozenset(
    {"AsStrided", "Broadcast", "Copy", "CustomTransforms", "Depends", "ExpandDims", "Flatten", "Reshape", "Slice"}
    | {"Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View"}
)
# Operations that write over their first input where nobody else reads it.
_IN_PLACE = frozenset(
    {"Abs", "Add", "AsType", "Compiled", "Divide", "DynamicSliceUpdate", "Exp", "Maximum", "Minimum", "Multiply"}
    | {"Negative", "Power", "Scatter", "ScatterAxis", "Select", "Sigmoid", "SliceUpdate", "Softmax", "Square"}
    | {"Subtract", "Tanh"}
)


class Unknown(Exception):
    """The graph can't be read: the model uses an operation that mlx can't export."""


def hollow(model: nn.Module) -> None:
    """Give the model zeros, lazy and without memory, for weights: all that a graph's shapes depend on."""
    model.update(tree_map(lambda array: mx.zeros(array.shape, array.dtype), model.parameters()))


def step_bytes(model: nn.Module, layout: CacheLayout, depth: int, step: int) -> int:
    """Bytes that a chunk of `step` tokens takes while it is computed on top of `depth` tokens.  Raises Unknown.

    The model must be hollow; nothing is evaluated.  Operations are taken in their order, arrays are freed after their
    last use.
    """
    graph = _Graph()

    def chunk(tokens: mx.array) -> Any:
        layers = layout.fresh()
        if depth:
            model(tokens[:, : _before(layout, step)], cache=layers)
            layers = _deepened(layout, layers, depth)
        return model(tokens, cache=layers)

    try:
        mx.export_function(graph.take, chunk, mx.zeros((1, step), mx.int32))
    except (ValueError, RuntimeError) as error:
        raise Unknown(str(error)) from error
    return graph.peak_bytes()


def scores_bytes(config: Mapping[str, Any], dtype: str, tokens: int, step: int) -> int:
    """Where the graph is unknown: the scores of one layer's attention and their mask, for all heads at once.

    Kernels that don't write scores down take less.
    """
    text = config.get("text_config") or config
    heads = int(text.get("num_attention_heads") or 1)
    width = 4 if "float32" in dtype else 2
    return heads * step * (tokens + step) * (width + 1)


def _before(layout: CacheLayout, step: int) -> int:
    """How many tokens show the cache's shapes, and leave rotating layers as full as they get."""
    return max(1, min(layout.window, step))


def _deepened(layout: CacheLayout, layers: list[Any], depth: int) -> list[Any]:
    """The same cache with `depth` rows in every leaf that keeps all of them."""
    deep = []
    for leaf, (_, held) in zip(layout.leaves, flatten(layers), strict=True):
        if leaf.codec.kind is not Kind.ROWS:
            deep.append(held)
            continue
        rows = leaf.codec.rows(held, 0, 1, 0, 1)
        fields = {name: mx.zeros((*row.shape[:2], depth, *row.shape[3:]), row.dtype) for name, row in rows.items()}
        deep.append(leaf.codec.build(fields, depth, leaf.template))
    return rebuild(layout.template, iter(deep))


@dataclass
class _Graph:
    operations: list[tuple[str, list[str], list[tuple[str, int]]]] = field(default_factory=list)

    def take(self, event: Mapping[str, Any]) -> None:
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
                owner[output] = owner[inputs[0]] if name in _VIEWS and inputs else output
        return self._replay(uses, owner)

    def _replay(self, uses: Counter[str], owner: dict[str, str]) -> int:
        sizes: dict[str, int] = {}
        held = peak = 0
        for name, inputs, outputs in self.operations:
            mine = [(output, size) for output, size in outputs if owner[output] == output]
            freed = self._used(inputs, uses, owner, sizes)
            if name in _IN_PLACE:  # its inputs' memory becomes its own
                held -= freed
            for output, size in mine:
                sizes[output] = size if uses[output] else 0
                held += sizes[output]
            peak = max(peak, held)
            if name not in _IN_PLACE:
                held -= freed
        return peak

    def _used(self, inputs: list[str], uses: Counter[str], owner: dict[str, str], sizes: dict[str, int]) -> int:
        """Count a use of each input; the bytes that nobody needs afterwards."""
        freed = 0
        for input_name in inputs:
            held_by = owner[input_name]
            uses[held_by] -= 1
            if not uses[held_by]:
                freed += sizes.pop(held_by, 0)
        return freed
