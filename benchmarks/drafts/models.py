"""Models of real shapes with random weights, in memory alone, and a real tokenizer.  Nothing of them is on disk."""

import importlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config

from warmline_backend.kv_cache.codecs import CacheLayout
from warmline_backend.model.drafted_model import DraftModel
from warmline_backend.model.kv_quantization import make_cache_factory
from warmline_backend.model.model import ServedModel, load_model_tokenizer, measure_kv, pair_models, run_probe

VOCABULARY = 49_152  # of the demo model's tokenizer
_BASE = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "vocab_size": VOCABULARY, "max_position_embeddings": 65_536}
_EXPERTS = {
    **_BASE,
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "head_dim": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        **_BASE,
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    # Of a draft model for them; half a billion parameters with the vocabulary that such models usually have.
    "0.5b": {
        **_BASE,
        "model_type": "llama",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    # Half of the layers of a mixture of 30 billion parameters, 3 of which compute a token.
    "experts": {
        **_EXPERTS,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "small": {
        **_EXPERTS,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "small-draft": {
        **_BASE,
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
}
DRAFT_SHAPES = {"8b": "0.5b", "experts": "0.5b", "small": "small-draft"}  # by the model's shape


def make_served_model(shape: str, tokenizer_folder: Path, dtype: mx.Dtype | None = None) -> ServedModel:
    """Make a model of one of SHAPES, in `dtype` or as `make_random_model` does."""
    model = make_random_model(shape, dtype)
    layout = CacheLayout.from_factory(make_cache_factory(model, None))
    tokenizer = load_model_tokenizer(tokenizer_folder, load_config(tokenizer_folder), trust_remote_code=False)
    return _measure(shape, model, layout, tokenizer, tokenizer_folder)


def add_draft_model(served: ServedModel, shape: str) -> ServedModel:
    """The same model with a draft model of one of SHAPES."""
    model = make_random_model(shape)
    layout = CacheLayout.from_factory(make_cache_factory(model, None))
    context = SHAPES[shape]["max_position_embeddings"]
    draft = DraftModel(model, served.path, layout, VOCABULARY, context)
    paired, whole = pair_models(served.model, served.layout, draft)
    return replace(_measure(served.name, paired, whole, served.tokenizer, served.path), draft=draft)


def _measure(
    shape: str, model: nn.Module, layout: CacheLayout, tokenizer: TokenizerWrapper, tokenizer_folder: Path
) -> ServedModel:
    logits, layers = run_probe(model, layout)
    mx.eval(logits)
    return ServedModel(
        **vars(measure_kv(layout, layers)),
        model=model,
        tokenizer=tokenizer,
        path=tokenizer_folder,
        name=shape,
        layout=layout,
        context_tokens_max=SHAPES[shape]["max_position_embeddings"],
        vocabulary_size=VOCABULARY,
        weight_bytes=sum(array.nbytes for _, array in tree_flatten(model.parameters())),
        index_topk=0,
    )


def make_random_model(shape: str, dtype: mx.Dtype | None = None) -> nn.Module:
    """Make a model of one of SHAPES: in bfloat16, and in float32 on a CPU, which has no other kernels for experts."""
    if dtype is None:
        dtype = mx.bfloat16 if mx.default_device().type == mx.DeviceType.gpu else mx.float32
    config = SHAPES[shape]
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = architecture.Model(architecture.ModelArgs.from_dict(config))
    mx.random.seed(3)
    model.update(tree_map(partial(_make_parameter, dtype), model.parameters()))
    model.eval()
    return model


def _make_parameter(dtype: mx.Dtype, parameter: mx.array) -> mx.array:
    """A parameter of the same shape; mlx-lm's own is never computed: it would be float32."""
    if parameter.ndim < 2:
        return mx.ones(parameter.shape, dtype)
    made = mx.random.normal(parameter.shape, dtype) * (parameter.shape[-1] ** -0.5)
    mx.eval(made)
    return made
