"""Models whose keys and values are quantized apart: what is installed, what is refused, and what others keep."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import base, deepseek_v3, gemma2, llama
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from support import tiny_models
from support.backend.families import DequantizedKVCache, load_family
from warmline_backend.kv_cache.batch_caches import BatchQuantizedKVCache
from warmline_backend.kv_cache.codecs import CacheLayout
from warmline_backend.kv_cache.quantization.mixed_cache import MixedQuantizedKVCache
from warmline_backend.model.kv_quantization import make_cache_factory
from warmline_backend.model.loader import ModelError, load_lazy_model
from warmline_backend.model.model import load_served_model, run_probe
from warmline_common.settings.quantization import KvQuantization, make_quantization, parse_bits

WIDTH = 32
APART, UNIFORM = make_quantization("8,4", 32), make_quantization(8, 32)


class Attention(nn.Module):
    """Attention of one head; `way` is how it reads its cache."""

    def __init__(self, way: str = "imported") -> None:
        super().__init__()
        self.way = way
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        queries, keys, values = mx.split(self.project(x)[:, None], 3, axis=-1)
        keys, values = cache.update_and_fetch(keys, values)
        if self.way == "not at all":
            return queries[:, 0]
        if self.way == "plain":
            options = {"group_size": 32, "bits": 8}
            keys = values = mx.dequantize(*keys, **options)
        if self.way.startswith("as of "):
            kv_format = make_quantization(self.way.removeprefix("as of "), 32).inner
            cache = BatchQuantizedKVCache([0], kv_format)
        function = base.scaled_dot_product_attention if self.way == "by module" else scaled_dot_product_attention
        sinks = {"sinks": mx.zeros(1)} if self.way == "sinks" else {}
        attended: mx.array = function(queries, keys, values, cache=cache, scale=0.2, mask=mask, **sinks)
        return attended[:, 0]


class SmallModel(nn.Module):
    def __init__(self, *ways: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, WIDTH)
        self.layers = [Attention(way) for way in ways]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        x = self.embedding(tokens)
        for layer, held in zip(self.layers, cache, strict=True):
            x = x + layer(x, base.create_attention_mask(x, held), held)
        return x


def probe(model: nn.Module, quantization: KvQuantization | None = APART) -> CacheLayout:
    layout = CacheLayout.from_factory(make_cache_factory(model, quantization))
    mx.eval(run_probe(model, layout)[0])
    return layout


def test_layers_have_their_formats() -> None:
    model = SmallModel(*["imported"] * 5)
    layout = probe(model, make_quantization("8,4", 32, 1, "6,6"))
    kinds = [type(layer) for layer in layout.template]
    assert kinds == [QuantizedKVCache, *[MixedQuantizedKVCache] * 3, QuantizedKVCache]
    assert (layout.template[0].bits, layout.template[0].group_size, layout.quantization) == (6, 32, "q8,4+q6")
    assert [type(layer) for layer in probe(model, make_quantization("8,8", "32,32")).template] == [QuantizedKVCache] * 5
    assert [type(layer) for layer in probe(model, make_quantization(0, 32, 1, 8)).template] == [KVCache] * 5


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        (["imported", "plain"], "changes rows of its cache before attention reads them; give keys and values the same"),
        (["imported", "not at all"], "^layer 1 does not call mlx-lm's scaled_dot_product_attention; give keys and"),
        (["imported", "sinks"], "attention sinks can't be computed over keys and values with formats of their own; gi"),
    ],
)
def test_attention_that_is_not_ours_in_each_layer_is_refused(ways: list[str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        probe(SmallModel(*ways))


def test_function_that_is_called_by_its_module_fails() -> None:
    with pytest.raises(TypeError):
        probe(SmallModel("by module"))
    assert base.scaled_dot_product_attention is scaled_dot_product_attention.__wrapped__, "it stays as it is"


@pytest.mark.parametrize("kind", [8, 4, "8,4"])
@pytest.mark.parametrize("other", ["8", "4", "8,4", "4,8", "8,6"])
def test_cache_of_another_format_is_never_read(kind: int | str, other: str) -> None:
    """As a model might hand another layer's cache to attention, where boundary layers have other bits."""
    model, quantization = SmallModel(f"as of {other}"), make_quantization(kind, 32)
    if other == str(kind) == "8,4":
        with pytest.raises(ModelError, match="layer 0 does not call"):
            probe(model, quantization)
    elif other != str(kind):
        with pytest.raises((ValueError, ModelError)):
            probe(model, quantization)


def test_too_many_boundary_layers_are_refused() -> None:
    message = (
        "^--kv-bits 8,4 --kv-boundary-layers 2 --kv-boundary-bits 8: the model has 4 layers, and none would be between "
        ".* last; give fewer boundary layers, or these bits as --kv-bits$"
    )
    with pytest.raises(ModelError, match=message):
        make_cache_factory(SmallModel(*["imported"] * 4), make_quantization("8,4", 32, 2, 8))


def test_architecture_with_attention_of_its_own_is_refused() -> None:
    size = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2}
    args = gemma2.ModelArgs(
        **size, model_type="gemma2", head_dim=32, rms_norm_eps=1e-5, vocab_size=300, num_key_value_heads=1
    )
    message = "^--kv-bits 8,4: the model's code, mlx_lm.models.gemma2, does not call mlx-lm's scaled_dot_product_att"
    with pytest.raises(ModelError, match=message):
        make_cache_factory(gemma2.Model(args), APART)


def test_latent_attention_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies what it caches."""
    size = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64, "moe_intermediate_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 32, "q_lora_rank": None}
    widths = {"qk_rope_head_dim": 32, "v_head_dim": 32, "qk_nope_head_dim": 32, "vocab_size": 300}
    model = deepseek_v3.Model(deepseek_v3.ModelArgs(**size, **heads, **widths, first_k_dense_replace=1))
    folder = tiny_models.build("llama", tmp_path / "llama")
    config = load_lazy_model(folder, trust_remote_code=False)[1]
    monkeypatch.setattr("warmline_backend.model.model.load_lazy_model", lambda *_, **__: (model, config))
    for quantization in (APART, UNIFORM):
        with pytest.raises(
            ModelError, match=r"computes with rows of its cache, which can't be quantized then .*swapaxes"
        ):
            load_served_model(str(folder), "m", quantization=quantization)


def test_group_size_divides_the_width_of_heads(tmp_path: Path) -> None:
    folder = tiny_models.build("llama", tmp_path / "llama")
    with pytest.raises(ModelError, match="choose a --kv-group-size that divides the width of the heads"):
        load_served_model(str(folder), "m", quantization=make_quantization("8,4", "32,64"))
    with pytest.raises(
        ModelError, match=r"--kv-bits 8,4: only plain KV caches can be quantized, .* has RotatingKVCache"
    ):
        load_served_model(str(tiny_models.build("gemma3", tmp_path / "gemma3")), "m", quantization=APART)


def test_other_models_of_the_process_compute_as_before(tmp_path: Path) -> None:
    plain = load_family("llama", tmp_path)
    prompt = mx.array([[5, 6, 7, 8]])

    def compute(quantization: KvQuantization | None) -> Any:
        layout = CacheLayout.from_factory(make_cache_factory(plain.model, quantization))
        return np.array(plain.model(prompt, cache=layout.make_empty_cache()))

    llama.scaled_dot_product_attention = scaled_dot_product_attention = base.scaled_dot_product_attention
    before, cold = (
        [compute(each) for each in (None, UNIFORM)],
        np.array(plain.model(prompt, cache=make_prompt_cache(plain.model))),
    )
    load_family("quantized_apart", tmp_path)
    installed = llama.scaled_dot_product_attention
    assert (
        installed is not scaled_dot_product_attention
        and base.scaled_dot_product_attention is scaled_dot_product_attention
    )
    compute(APART)
    assert llama.scaled_dot_product_attention is installed, "a second time it changes nothing"
    for one, other in zip(before, [compute(each) for each in (None, UNIFORM)], strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(cold, np.array(plain.model(prompt, cache=make_prompt_cache(plain.model))))


@pytest.mark.parametrize("bits", ["2", "3", "5", "6", "3,2"])
def test_all_bits_of_mlx_compute_what_rounded_rows_do(bits: str) -> None:
    model, quantization = SmallModel("imported", "imported"), make_quantization(parse_bits(bits), 32)
    assert quantization is not None
    layout, tokens = probe(model, quantization), mx.array([[5, 6, 7, 8, 9]])
    rounded = [DequantizedKVCache(each) for each in quantization.list_formats(2)]
    found, expected = (np.array(model(tokens, cache=caches)) for caches in (layout.make_empty_cache(), rounded))
    assert np.allclose(found, expected, atol=1e-4)
    assert layout.quantization == f"q{bits}"
