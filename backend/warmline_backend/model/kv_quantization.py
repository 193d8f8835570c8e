"""Caches of a model whose KV is quantized, and the attention over them.  Engine thread.

Where a layer's keys and values have formats of their own, attention is ours: mlx-lm's takes one format for both.  Each
of mlx-lm's architectures imports that function by name, so the name is replaced in the modules of this model's layers.
The replacement passes every other cache on to mlx-lm's own, so that other models compute as before.  A probe proves
that it was called for each such layer.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.base
from mlx_lm.models.cache import KVCache, make_prompt_cache

from warmline_backend.kv_cache.batch_caches import BatchQuantizedKVCache
from warmline_backend.kv_cache.quantization.attention import attend_quantized
from warmline_backend.kv_cache.quantization.mixed_cache import make_quantized_cache
from warmline_backend.model.loader import ModelError
from warmline_common.settings.quantization import KvQuantization

ATTENTION_REVISION = 1  # raised with any change of what attention over unlike formats computes; part of the fingerprint
REMEDY = "give keys and values the same bits and group size, as in --kv-bits 8, or leave --kv-bits out"
_FUNCTION_NAME = "scaled_dot_product_attention"  # in mlx-lm's modules

_records: list[set[int]] = []  # ids of caches that ours was called with, while a probe runs


def make_cache_factory(model: nn.Module, quantization: KvQuantization | None) -> Callable[[], list[Any]]:
    """Make the factory of the model's cache.  Raises ModelError where it can't be quantized so."""
    if quantization is None:
        return lambda: list(make_prompt_cache(model))
    flags, layers = quantization.describe_flags(), make_prompt_cache(model)
    others = {type(layer).__name__ for layer in layers if type(layer) is not KVCache}
    if others:
        raise ModelError(
            f"{flags}: only plain KV caches can be quantized, this model has {', '.join(sorted(others))}; "
            "leave --kv-bits out"
        )
    try:
        formats = quantization.list_formats(len(layers))
    except ValueError as error:
        raise ModelError(f"{flags}: {error}; give fewer boundary layers, or these bits as --kv-bits") from None
    if not all(kv_format.is_uniform for kv_format in formats):
        _install_attention(model, flags)
    return lambda: list(map(make_quantized_cache, formats))


def identify_quantization(quantization: KvQuantization | None) -> object:
    """Its part of a fingerprint, as JSON: what was stored with one format for all rows is still found."""
    if quantization is None:
        return None
    inner, boundary = (
        [[half.bits, half.group_size] for half in (each.keys, each.values)]
        for each in (quantization.inner, quantization.boundary)
    )
    if quantization.is_uniform:
        return inner[0]
    return {"inner": inner, "boundary": [quantization.boundary_layers, boundary], "attention": ATTENTION_REVISION}


def _install_attention(model: nn.Module, flags: str) -> None:
    """Replace mlx-lm's attention by ours in the modules of this model's layers.

    Raises ModelError where none of them has it.
    """
    modules = list(_list_namespaces(model))
    if not any(_FUNCTION_NAME in names for names in modules):
        name = type(model).__module__
        raise ModelError(f"{flags}: the model's code, {name}, does not call mlx-lm's {_FUNCTION_NAME}; {REMEDY}")
    for names in modules:
        if names.get(_FUNCTION_NAME) is mlx_lm.models.base.scaled_dot_product_attention:
            names[_FUNCTION_NAME] = _attend


def _list_namespaces(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Global names of each module whose classes are layers of this model."""
    seen: set[int] = set()
    for layer_class in {type(layer) for layer in model.modules()}:
        names = getattr(inspect.unwrap(layer_class.__call__), "__globals__", {})
        if id(names) not in seen:
            seen.add(id(names))
            yield names


@functools.wraps(mlx_lm.models.base.scaled_dot_product_attention)
def _attend(queries: mx.array, keys: Any, values: Any, cache: Any, *args: Any, **options: Any) -> mx.array:
    if not isinstance(cache, BatchQuantizedKVCache) or cache.format.is_uniform:
        attended: mx.array = _attend.__wrapped__(queries, keys, values, cache, *args, **options)
        return attended
    return _attend_mixed(queries, keys, values, cache, *args, **options)


def _attend_mixed(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: BatchQuantizedKVCache,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    for record in _records:
        record.add(id(cache))
    if sinks is not None:
        raise ModelError(f"attention sinks can't be computed over keys and values with formats of their own; {REMEDY}")
    if not (isinstance(keys, list) and isinstance(values, list)):
        raise ModelError(f"the model changes rows of its cache before attention reads them; {REMEDY}")
    return attend_quantized(queries, keys, values, cache.format, scale, mask)


@contextmanager
def prove_attention(layers: Sequence[Any]) -> Iterator[None]:
    """Check a computation over these caches: ours was called for each whose keys and values have unlike formats.

    Raises ModelError where it wasn't.
    """
    attended: set[int] = set()
    _records.append(attended)
    try:
        yield
    finally:
        _records.pop()
    for number, cache in enumerate(layers):
        is_mixed = isinstance(cache, BatchQuantizedKVCache) and not cache.format.is_uniform
        if is_mixed and id(cache) not in attended:
            raise ModelError(f"layer {number} does not call mlx-lm's {_FUNCTION_NAME}; {REMEDY}")
