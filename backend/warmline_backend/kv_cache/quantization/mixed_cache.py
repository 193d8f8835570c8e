"""Quantized cache of one layer whose keys and values have formats of their own, as a model's cache has it.  Pure."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from warmline_common.settings.quantization import KvFormat, RowFormat


@dataclass
class MixedQuantizedKVCache:
    """Rows of one sequence as data, scales and biases; mlx-lm's QuantizedKVCache has one format for both halves.

    It is computed with in its batched form alone.
    """

    format: KvFormat
    keys: list[mx.array] | None = None
    values: list[mx.array] | None = None
    offset: int = 0  # rows


def make_quantized_cache(kv_format: KvFormat) -> QuantizedKVCache | MixedQuantizedKVCache:
    """Empty cache of a layer: mlx-lm's own where it can say the format."""
    if kv_format.is_uniform:
        return QuantizedKVCache(group_size=kv_format.keys.group_size, bits=kv_format.keys.bits)
    return MixedQuantizedKVCache(kv_format)


def get_kv_format(cache: Any) -> KvFormat:
    """Format of a quantized cache of either class, or of their batched form."""
    kv_format: KvFormat | None = getattr(cache, "format", None)
    if kv_format is not None:
        return kv_format
    row_format = RowFormat(cache.bits, cache.group_size)
    return KvFormat(row_format, row_format)
