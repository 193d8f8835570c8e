"""Attention over quantized keys and values that have formats of their own.  Engine thread.

mlx-lm's attention takes one number of bits and one group size for both.  Masks, grouped queries and types are as there.
"""

from collections.abc import Sequence

import mlx.core as mx

from warmline_common.settings.quantization import KvFormat, RowFormat

WORD_BITS = 32  # of packed data

Parts = Sequence[mx.array]  # data, scales, biases: each [sequences, heads, rows, width]
Mask = mx.array | str | None  # added to scores, or True where a row is seen, up to [sequences, heads, count, rows]


def attend_quantized(
    queries: mx.array, keys: Parts, values: Parts, kv_format: KvFormat, scale: float, mask: Mask
) -> mx.array:
    """Compute softmax(scale * queries keys^T + mask) values, [sequences, heads, count, width of values].

    `queries` are [sequences, heads, count, width]; heads are a multiple of the keys' heads.  Raises ValueError for rows
    that do not have this format.
    """
    sequences, heads, count, width = queries.shape
    if (keys_width := compute_width(keys, kv_format.keys)) != width:
        raise ValueError(f"quantized keys are {keys_width} wide, and queries {width}")
    compute_width(values, kv_format.values)
    kv_heads, rows = keys[0].shape[1:3]
    shared = heads // kv_heads  # query heads of one head of keys: further rows of one product
    grouped = (queries * scale).reshape(sequences, kv_heads, shared * count, width)
    scores = _multiply(grouped, keys, kv_format.keys, transpose=True)
    if mask is not None:
        scores = scores.reshape(sequences, kv_heads, shared, count, rows)
        scores = _apply_mask(scores, mask).reshape(sequences, kv_heads, shared * count, rows)
    weights = mx.softmax(scores, axis=-1, precise=True)
    attended = _multiply(weights, values, kv_format.values, transpose=False)
    return attended.reshape(sequences, heads, count, -1)


def compute_width(parts: Parts, row_format: RowFormat) -> int:
    """Numbers in a row.  Raises ValueError where data and scales don't agree on it in this format."""
    data, scales, _ = parts
    packed_bits, width = data.shape[-1] * WORD_BITS, scales.shape[-1] * row_format.group_size
    if packed_bits != width * row_format.bits:
        raise ValueError(
            f"quantized rows of {packed_bits} bits and {scales.shape[-1]} groups are not of {row_format.bits} bits in "
            f"groups of {row_format.group_size}"
        )
    return int(width)


def _multiply(left: mx.array, parts: Parts, row_format: RowFormat, *, transpose: bool) -> mx.array:
    data, scales, biases = parts
    return mx.quantized_matmul(
        left, data, scales, biases, transpose=transpose, group_size=row_format.group_size, bits=row_format.bits
    )


def _apply_mask(scores: mx.array, mask: mx.array | str) -> mx.array:
    """Mask scores [sequences, heads of keys, query heads of each, count, rows].

    A row that is not seen gets the least finite number: a query that sees none, as those of padding, stays finite.
    """
    kv_heads, shared, count, rows = scores.shape[1:]
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f"unknown mask {mask!r}: attention knows causal ones and arrays")
        mask = mx.arange(rows - count, rows)[:, None] >= mx.arange(rows)
    elif mask.ndim > 2:
        per_head = mask.shape[-3] > 1
        mask = mx.unflatten(mask, -3, (kv_heads, shared)) if per_head else mx.expand_dims(mask, -3)
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return scores + mask.astype(scores.dtype)
