"""The reckoned memory of a prefill step against what it takes."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from support import tiny_models
from support.device_memory import read_active_memory
from warmline_backend.kv_cache.batch_caches import BatchFloatKVCache
from warmline_backend.kv_cache.codecs import CacheLayout
from warmline_backend.kv_cache.kv import KV
from warmline_backend.model.loader import load_lazy_model
from warmline_backend.model.step_memory import count_heads, hollow_weights, reckon_step_memory

DEPTH, STEP = 512, 128


def load_layout(family: str, folder: Path) -> tuple[nn.Module, CacheLayout, int]:
    model, config = load_lazy_model(tiny_models.build(family, folder / family), trust_remote_code=False)
    return model, CacheLayout.from_factory(lambda: list(make_prompt_cache(model))), count_heads(config)


def measure_step(model: nn.Module, layout: CacheLayout, tokens: int) -> int:
    kv = KV(layout, [], layout.make_empty_cache(), journal_enabled=False)
    for _ in range(DEPTH // STEP):
        kv.prefill(model, [n % 250 for n in range(STEP)])
    before = read_active_memory()
    mx.reset_peak_memory()
    kv.prefill(model, [n % 250 for n in range(tokens)])
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "glm_moe_dsa", "gemma3"])
def test_reckoned_bytes_are_near_real_ones(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model, layout, heads = load_layout(family, tmp_path)
    mx.eval(model.parameters())
    taken = measure_step(model, layout, STEP // 2)
    reckoned = reckon_step_memory(model, layout, heads, STEP, 2 * DEPTH).bytes_for(STEP // 2, DEPTH)
    assert 0.5 * taken < reckoned < 2 * taken
    assert caplog.messages == []  # the graph could be read


def test_quantized_cache_is_reckoned(tmp_path: Path) -> None:
    model, plain, heads = load_layout("llama", tmp_path)
    count = len(plain.template)
    layout = CacheLayout.from_factory(lambda: [QuantizedKVCache(group_size=32, bits=8) for _ in range(count)])
    taken = measure_step(model, layout, STEP)
    assert 0.5 * taken < reckon_step_memory(model, layout, heads, STEP, DEPTH).bytes_for(STEP, DEPTH) < 2 * taken


def test_model_without_attention_has_no_scores(tmp_path: Path) -> None:
    model, layout, _ = load_layout("mamba2", tmp_path)
    assert reckon_step_memory(model, layout, 1, 2048, 4096).bytes_for(2048, 4096) == 0


def test_weights_are_back_after_reckoning(tmp_path: Path) -> None:
    model, layout, heads = load_layout("llama", tmp_path)
    before = dict(tree_flatten(model.parameters()))
    reckon_step_memory(model, layout, heads, STEP, DEPTH)
    after = dict(tree_flatten(model.parameters()))
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    with pytest.raises(ZeroDivisionError), hollow_weights(model):
        raise ZeroDivisionError
    name = next(iter(before))
    assert np.array_equal(np.array(dict(tree_flatten(model.parameters()))[name]), np.array(before[name]))


def test_masks_of_one_sequence_are_named_and_of_several_are_arrays() -> None:
    """An array mask of a chunk makes attention write heads x chunk x context numbers on CUDA."""
    cache, rows = BatchFloatKVCache([0]), mx.zeros((1, 1, 5, 8))
    cache.update_and_fetch(rows, rows)
    assert cache.make_mask(4, return_array=False, window_size=None) == "causal"
    assert isinstance(cache.make_mask(1, return_array=False, window_size=None), mx.array)
    cache.masks_decode_steps = False
    assert cache.make_mask(1, return_array=False, window_size=None) is None
    mask = np.array(cache.make_mask(1, return_array=True, window_size=3))
    assert mask.reshape(-1).tolist() == [False] * 3 + [True] * 3
    single = KVCache()
    single.update_and_fetch(rows, rows)
    for options in ({"return_array": True, "window_size": None}, {"return_array": False, "window_size": 3}):
        expected = single.make_mask(4, **options)
        assert np.array_equal(np.array(cache.make_mask(4, **options)), np.array(expected))
    other = BatchFloatKVCache([0])
    other.update_and_fetch(rows[:, :, :3], rows[:, :, :3])
    cache.extend(other)
    assert np.array(cache.make_mask(1))[:, 0, 0].sum(axis=-1).tolist() == [6, 4]
    mask = np.array(cache.make_mask(4))
    assert mask.shape == (2, 1, 4, 9) and mask.sum(axis=-1)[:, 0].tolist() == [[6, 7, 8, 9], [4, 5, 6, 7]]
    cache.drop_last([2, 0])
    assert cache.make_mask(4, return_array=False, window_size=None) == "causal", "equally long"
