"""Prefill of several sequences in one forward pass, whose KV becomes one batch.  Engine thread.

Prompts are padded on the right; the padding is dropped afterwards, by each cache as it can.
"""

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from warmline_backend.kv_cache.chunk_draft import OutOfMemoryError, describe_out_of_memory, detach_states
from warmline_backend.kv_cache.codecs import CacheLayout, flatten
from warmline_backend.kv_cache.kv import KV

PAD_TOKEN = 0
# Whose recurrent layers leave out the padding, as tests/backend/scheduler/test_prefill_batches.py shows; some of mlx-lm
# keep the inputs of a short convolution from the batch's last columns.
PADDED_STATE_MODELS = frozenset({"qwen3_5", "qwen3_5_moe", "falcon_h1", "mamba2"})


def takes_padding(model: nn.Module, layout: CacheLayout) -> bool:
    """True where chunks of different lengths may share a batch; of a model with a draft model, those of both."""
    parts = getattr(model, "parts", ((model, layout),))
    return all(
        not its_layout.has_states or getattr(part, "model_type", "") in PADDED_STATE_MODELS
        for part, its_layout in parts
    )


def prefill_batch(model: nn.Module, kvs: Sequence[KV], chunks: Sequence[list[int]]) -> None:
    """Compute the rows of `chunks[i]`, or of none, after those of `kvs[i]`; the KVs are rows of one batch then.

    Each is alone in its batch before, and stays as it is where an exception is raised: OutOfMemoryError, or another.
    """
    try:
        layers = _compute_layers(model, kvs, chunks)
    except (RuntimeError, MemoryError) as error:
        problem = describe_out_of_memory(error)
    else:
        for index, (kv, tokens) in enumerate(zip(kvs, chunks, strict=True)):
            kv.layers, kv.index = layers, index
            kv.tokens += tokens
        return
    raise OutOfMemoryError(problem)


def _compute_layers(model: nn.Module, kvs: Sequence[KV], chunks: Sequence[list[int]]) -> list[Any]:
    layers = _merge_layers([kv.layers for kv in kvs])
    lengths = [len(tokens) for tokens in chunks]
    padding = [max(lengths) - length for length in lengths]
    for layer in layers if any(padding) else ():
        layer.prepare(lengths=lengths, right_padding=padding)
    padded = [[*tokens, *[PAD_TOKEN] * count] for tokens, count in zip(chunks, padding, strict=True)]
    if max(lengths):
        model(mx.array(padded), cache=layers)
    for layer in layers if any(padding) else ():
        layer.finalize()
    detach_states(kvs[0].layout, [leaf for _, leaf in flatten(layers)])
    mx.eval([layer.state for layer in layers])
    return layers


def _merge_layers(parts: Sequence[list[Any]]) -> list[Any]:
    """One batch of all `parts`, which are only read; pair by pair, so that each row is copied few times."""
    merged = [copy.deepcopy(part) for part in parts]
    while len(merged) > 1:
        for left, right in zip(merged[::2], merged[1::2], strict=False):
            for layer, other in zip(left, right, strict=True):
                layer.extend(other)
        merged = merged[::2]
    return merged[0]
