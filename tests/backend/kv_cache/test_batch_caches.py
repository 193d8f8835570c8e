"""Caches of several sequences: each has the rows and the attention that it has alone."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from warmline_backend.kv_cache.batch_caches import BatchFloatKVCache, BatchQuantizedKVCache, BatchRowsCache
from warmline_common.settings.quantization import KvFormat, RowFormat

HEADS, WIDTH, GROUP = 2, 32, 32
BITS = [0, 4, 8]  # 0: not quantized


def make_rows(seed: int, sequences: int, count: int) -> tuple[mx.array, mx.array]:
    keys = mx.random.normal((2, sequences, HEADS, count, WIDTH), key=mx.random.key(seed))
    return keys[0], keys[1]


def make_empty(sequences: int, bits: int) -> BatchRowsCache:
    lengths = [0] * sequences
    row_format = RowFormat(bits, GROUP)
    return BatchQuantizedKVCache(lengths, KvFormat(row_format, row_format)) if bits else BatchFloatKVCache(lengths)


def make_single(rows: tuple[mx.array, mx.array], bits: int) -> KVCache | QuantizedKVCache:
    single = QuantizedKVCache(group_size=GROUP, bits=bits) if bits else KVCache()
    single.update_and_fetch(*rows)
    return single


def attend(cache: object, query: mx.array, keys: object, values: object, mask: object) -> mx.array:
    attended: mx.array = scaled_dot_product_attention(mx.array(query), keys, values, cache=cache, scale=0.2, mask=mask)
    return attended


def make_batch(seeds: Sequence[int], lengths: Sequence[int], bits: int) -> BatchRowsCache:
    parts = []
    for seed, length in zip(seeds, lengths, strict=True):
        part = make_empty(1, bits)
        part.update_and_fetch(*make_rows(seed, 1, length))
        parts.append(part)
    batch, *others = parts
    for other in others:
        batch.extend(other)
    return batch


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("lengths", [(5, 5), (3, 9, 6), (300, 256, 257), (1, 260)])
def test_sequences_of_a_batch_attend_as_alone(bits: int, lengths: tuple[int, ...]) -> None:
    """Through steps, passes of which each sequence keeps another number of rows, and sequences that leave."""
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
        rejected = [(step + place) % width for place in places]
        for row, place in enumerate(places):
            own = alone[place]
            own_mask = own.make_mask(width, return_array=False, window_size=None)
            own_rows = own.update_and_fetch(*(half[place : place + 1] for half in rows))
            expected = attend(own, query[place : place + 1], *own_rows, own_mask)
            assert np.allclose(together[row], expected[0], atol=1e-5)
            own.trim(rejected[row])
        batch.drop_last(rejected)
        assert batch.offset.tolist() == list(batch.lengths) == [alone[place].offset for place in places]
        if step in (2, 4) and len(places) > 1:
            del places[0]
            batch.filter(list(range(1, len(places) + 1)))
    extracted = batch.extract(0)
    assert extracted.lengths == batch.lengths[:1] and extracted.count_buffer_rows() == batch.lengths[0]


@pytest.mark.parametrize("bits", BITS)
def test_padding_on_the_right_is_dropped(bits: int) -> None:
    batch, lengths = make_empty(2, bits), [7, 4]
    batch.prepare(lengths=lengths, right_padding=[0, 3])
    batch.update_and_fetch(*make_rows(3, 2, 7))
    batch.finalize()
    assert batch.offset.tolist() == lengths == list(batch.lengths)
    batch.finalize()
    assert list(batch.lengths) == lengths, "once"
    mask = np.array(batch.make_mask(1))
    assert mask[:, 0, 0].sum(axis=-1).tolist() == [8, 5]


def test_buffers_grow_by_steps_and_shrink_with_the_longest_sequence() -> None:
    batch = make_batch([1, 2], [300, 5], 0)
    assert batch.count_buffer_rows() == 512
    batch.update_and_fetch(*make_rows(3, 2, 250))
    assert batch.count_buffer_rows() == 300 + 256
    batch.drop_last([250, 0])
    batch.update_and_fetch(*make_rows(4, 2, 1))
    assert batch.count_buffer_rows() == 300 + 256, "the room is still there"
    batch.filter([1])
    assert batch.lengths == (256,) and batch.count_buffer_rows() == 256
    batch.reserve_rows(1024)
    assert batch.count_buffer_rows() == 1024 and batch.trim(300) == 256 and batch.size() == 0


@pytest.mark.parametrize("bits", BITS)
def test_empty_caches_join(bits: int) -> None:
    one, other = make_empty(1, bits), make_empty(1, bits)
    assert one.empty()
    one.extend(other)
    assert one.empty() and one.offset.tolist() == [0, 0]
    filled = make_batch([4], [3], bits)
    one.extend(filled)
    assert one.size() == 3 and one.offset.tolist() == [0, 0, 3]


def test_sequence_without_rows_joins() -> None:
    nothing, filled = make_batch([1], [3], 0), make_batch([2], [5], 0)
    nothing.drop_last([3])
    alone = nothing.extract(0)
    assert alone.count_buffer_rows() == 0 and not alone.empty()
    other = nothing.extract(0)
    alone.extend(other)
    alone.extend(filled)
    alone.update_and_fetch(*make_rows(3, 3, 1))
    assert alone.lengths == (1, 1, 6)


def test_keys_without_values_are_kept() -> None:
    batch = make_batch([1, 2], [3, 5], 0)
    keys_alone = BatchFloatKVCache([0])
    keys = make_rows(1, 1, 3)[0]
    keys_alone.update_and_fetch(keys, keys[..., :0])
    longer = BatchFloatKVCache([0])
    longer.update_and_fetch(*(make_rows(2, 1, 5)[0], make_rows(2, 1, 5)[0][..., :0]))
    keys_alone.extend(longer)
    added = make_rows(7, 2, 1)[0]
    both = batch.update_and_fetch(added, added)[0]
    held, _ = keys_alone.update_and_fetch(added, added[..., :0])
    assert np.array_equal(held[0, :, :4], both[0, :, :4]) and np.array_equal(held[1], both[1])


def test_keys_and_values_of_a_batch_may_have_formats_of_their_own() -> None:
    kv_format = KvFormat(RowFormat(8, 32), RowFormat(4, 32))
    batch, other = BatchQuantizedKVCache([0], kv_format), BatchQuantizedKVCache([0], kv_format)
    for cache, seed, count in ((batch, 1, 3), (other, 2, 5)):
        cache.update_and_fetch(*make_rows(seed, 1, count))
    batch.extend(other)
    rows = make_rows(7, 2, 1)
    keys, values = batch.update_and_fetch(*rows)
    assert not hasattr(batch, "bits"), "mlx-lm's attention would take one number for both"
    for half, added, row_format in ((keys, rows[0], kv_format.keys), (values, rows[1], kv_format.values)):
        quantized = mx.quantize(added, group_size=row_format.group_size, bits=row_format.bits)
        for part, expected in zip(half, quantized, strict=True):
            assert np.array_equal(part[0, :, 3], expected[0, :, 0]) and np.array_equal(part[1, :, 5], expected[1, :, 0])
