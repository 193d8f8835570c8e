"""Attention over keys and values with formats of their own, against mlx's over the same rows as plain numbers."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from support.backend.families import round_rows
from warmline_backend.kv_cache.batch_caches import BatchQuantizedKVCache
from warmline_backend.kv_cache.quantization.attention import attend_quantized
from warmline_common.settings.quantization import KvFormat, RowFormat

pytestmark = pytest.mark.skipif(mx.cuda.is_available(), reason="mlx has no kernel there for these quantized shapes")
WIDTH, SCALE = 64, 0.125
FORMATS = [
    KvFormat(RowFormat(8, 64), RowFormat(4, 32)),
    KvFormat(RowFormat(3, 32), RowFormat(6, 64)),
    KvFormat(RowFormat(8, 32), RowFormat(8, 64)),
]


def make_normal(shape: tuple[int, ...], seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def make_mask(kind: str, sequences: int, heads: int, count: int, rows: int) -> Any:
    """Mask in each form that models and caches give to attention."""
    if kind in ("none", "causal"):
        return None if kind == "none" else kind
    seen = mx.random.bernoulli(0.6, (sequences, heads, count, rows), key=mx.random.key(9))
    seen[..., 0] = True
    shaped = {
        "rows": seen[0, 0],
        "sequences": seen[:, :1],
        "heads": seen,
        "heads of one": seen[0],
        "added": seen[:, :1],
        "added by head": seen,
    }[kind]
    return mx.where(shaped, 0.5, -1e9) if kind.startswith("added") else shaped


@pytest.mark.parametrize(
    "kind", ["none", "causal", "rows", "sequences", "heads", "heads of one", "added", "added by head"]
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_attention_equals_that_over_plain_numbers(heads: int, kv_heads: int, kind: str) -> None:
    sequences, rows = 2, 40
    for seed, kv_format in enumerate(FORMATS):
        cache = BatchQuantizedKVCache([0] * sequences, kv_format)
        keys = make_normal((sequences, kv_heads, rows, WIDTH), seed)
        values = make_normal((sequences, kv_heads, rows, WIDTH), seed + 10)
        packed_keys, packed_values = cache.update_and_fetch(keys, values)
        plain = round_rows(keys, kv_format.keys), round_rows(values, kv_format.values)
        for count in (1, 5):
            queries = make_normal((sequences, heads, count, WIDTH), seed + 20)
            mask = make_mask(kind, sequences, heads, count, rows)
            found = attend_quantized(queries, packed_keys, packed_values, kv_format, SCALE, mask)
            expected = mx.fast.scaled_dot_product_attention(queries, *plain, scale=SCALE, mask=mask)
            assert np.allclose(found, expected, atol=2e-5), (kv_format, count)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_answer_has_the_type_of_queries(dtype: mx.Dtype) -> None:
    keys, values = (make_normal((1, 2, 9, WIDTH), seed).astype(dtype) for seed in (1, 2))
    kv_format, queries = FORMATS[0], make_normal((1, 4, 3, WIDTH), 3).astype(dtype)
    cache = BatchQuantizedKVCache([0], kv_format)
    packed = cache.update_and_fetch(keys, values)
    added = mx.zeros((3, 9), mx.float32)
    assert attend_quantized(queries, *packed, kv_format, SCALE, added).dtype == dtype
    assert np.array_equal(
        np.array(queries.astype(mx.float32)),
        np.array(make_normal((1, 4, 3, WIDTH), 3).astype(dtype).astype(mx.float32)),
    )


def test_queries_that_see_no_row_stay_finite() -> None:
    """Those of padding: a NaN of theirs would be in the next layer's rows."""
    kv_format = FORMATS[0]
    cache = BatchQuantizedKVCache([0], kv_format)
    packed = cache.update_and_fetch(make_normal((1, 1, 8, WIDTH), 1), make_normal((1, 1, 8, WIDTH), 2))
    blind = mx.zeros((2, 8), mx.bool_)
    found = attend_quantized(make_normal((1, 2, 2, WIDTH), 3), *packed, kv_format, SCALE, blind)
    assert np.isfinite(np.array(found)).all()


def test_rows_of_another_format_are_refused() -> None:
    kv_format, wrong = FORMATS[0], KvFormat(RowFormat(4, 64), RowFormat(8, 32))
    cache = BatchQuantizedKVCache([0], kv_format)
    keys, values = cache.update_and_fetch(make_normal((1, 1, 8, WIDTH), 1), make_normal((1, 1, 8, WIDTH), 2))
    queries = make_normal((1, 2, 2, WIDTH), 3)
    with pytest.raises(ValueError, match="are not of 4 bits in groups of 64"):
        attend_quantized(queries, keys, values, wrong, SCALE, None)
    with pytest.raises(ValueError, match="are not of 8 bits in groups of 32"):
        attend_quantized(queries, keys, values, KvFormat(kv_format.keys, wrong.values), SCALE, None)
    with pytest.raises(ValueError, match="keys are 64 wide, and queries 32"):
        attend_quantized(queries[..., :32], keys, values, kv_format, SCALE, None)
    with pytest.raises(ValueError, match="unknown mask 'full'"):
        attend_quantized(queries, keys, values, kv_format, SCALE, "full")


def test_mlx_lm_reads_bits_of_one_format_only() -> None:
    """Its own attention can't take a mixed cache for a uniform one, nor for a plain one: rows are no arrays."""
    mixed = BatchQuantizedKVCache([0], KvFormat(RowFormat(8, 64), RowFormat(4, 64)))
    assert not hasattr(mixed, "bits") and not hasattr(mixed, "group_size")
    uniform = BatchQuantizedKVCache([0], KvFormat(RowFormat(8, 64), RowFormat(8, 64)))
    assert (uniform.bits, uniform.group_size, uniform.format.is_uniform) == (8, 64, True)
