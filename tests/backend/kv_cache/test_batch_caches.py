"""Quantized caches of several sequences: each has the rows and the attention that it has alone."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import QuantizedKVCache

from warmline_backend.kv_cache.batch_caches import BatchQuantizedKVCache

HEADS, WIDTH, GROUP = 2, 32, 32


def make_rows(seed: int, sequences: int, count: int) -> tuple[mx.array, mx.array]:
    keys = mx.random.normal((2, sequences, HEADS, count, WIDTH), key=mx.random.key(seed))
    return keys[0], keys[1]


def make_single(rows: tuple[mx.array, mx.array], bits: int) -> QuantizedKVCache:
    single = QuantizedKVCache(group_size=GROUP, bits=bits)
    single.update_and_fetch(*rows)
    return single


def attend(cache: object, query: mx.array, keys: object, values: object, mask: object) -> mx.array:
    attended: mx.array = scaled_dot_product_attention(mx.array(query), keys, values, cache=cache, scale=0.2, mask=mask)
    return attended


def make_batch(seeds: Sequence[int], lengths: Sequence[int], bits: int) -> BatchQuantizedKVCache:
    parts = []
    for seed, length in zip(seeds, lengths, strict=True):
        part = BatchQuantizedKVCache([0], GROUP, bits)
        part.update_and_fetch(*make_rows(seed, 1, length))
        parts.append(part)
    batch, *others = parts
    for other in others:
        batch.extend(other)
    return batch


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 9, 6), (300, 256, 257), (1, 260)])
def test_sequences_of_a_batch_attend_as_alone(bits: int, lengths: tuple[int, ...]) -> None:
    """Through steps, a pass that is cut, and sequences that leave."""
    seeds = range(1, len(lengths) + 1)
    batch = make_batch(seeds, lengths, bits)
    alone = [make_single(make_rows(seed, 1, length), bits) for seed, length in zip(seeds, lengths, strict=True)]
    places = list(range(len(lengths)))
    for step, width in enumerate((1, 4, 1, 1, 3, 1)):
        rows = make_rows(50 + step, len(lengths), width)
        query = mx.random.normal((len(lengths), 2 * HEADS, width, WIDTH), key=mx.random.key(90 + step))
        mask = batch.make_mask(width)
        keys, values = batch.update_and_fetch(*(half[mx.array(places)] for half in rows))
        together = attend(batch, query[mx.array(places)], keys, values, mask)
        for row, place in enumerate(places):
            own = alone[place]
            own_mask = own.make_mask(width, return_array=False, window_size=None)
            own_rows = own.update_and_fetch(*(half[place : place + 1] for half in rows))
            expected = attend(own, query[place : place + 1], *own_rows, own_mask)
            assert np.allclose(together[row], expected[0], atol=1e-5)
            if width > 1:
                own.trim(width - 1)
        if width > 1:
            batch.trim(width - 1)
        assert batch.offset.tolist() == [alone[place].offset for place in places]
        if step in (2, 4) and len(places) > 1:
            del places[0]
            batch.filter(list(range(1, len(places) + 1)))
            assert min(batch.left_padding.tolist()) == 0  # type: ignore[type-var]


def test_padding_on_the_right_is_moved_before_the_rows() -> None:
    batch, lengths = BatchQuantizedKVCache([0, 0], GROUP, 8), [7, 4]
    rows = make_rows(3, 2, 7)
    batch.prepare(lengths=lengths, right_padding=[0, 3])
    batch.update_and_fetch(*rows)
    batch.finalize()
    assert batch.offset.tolist() == lengths and batch.left_padding.tolist() == [0, 3]
    single = make_single((rows[0][1:, :, :4], rows[1][1:, :, :4]), 8)
    assert batch.keys is not None and single.keys is not None
    for mine, theirs in zip(batch.keys, single.keys, strict=True):
        assert np.array_equal(mine[1:, :, 3:7], theirs[:, :, :4])


def test_empty_caches_join() -> None:
    one, other = BatchQuantizedKVCache([0], GROUP, 8), BatchQuantizedKVCache([0], GROUP, 8)
    assert one.empty()
    one.extend(other)
    assert one.empty() and one.offset.tolist() == [0, 0]
    filled = make_batch([4], [3], 8)
    one.extend(filled)
    assert one.size() == 3 and one.left_padding.tolist() == [3, 3, 0] and one.offset.tolist() == [0, 0, 3]
