"""Configurations, weights and inputs of the golden tests of GLM, for us and for the reference alike.

Weights are made from their names, so that none need to be kept.  Only numpy is used here: `make_golden.py` runs this
beside PyTorch and transformers, the tests run it beside mlx.
"""

import zlib
from typing import Any

import numpy as np

Weights = dict[str, np.ndarray[Any, np.dtype[np.float32]]]

VOCABULARY = 64
TOPK = 16
TOKENS = 4 * TOPK + 9  # well past the selection, and no multiple of anything

_BASE: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 40,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "index_topk": TOPK,
    "index_head_dim": 32,
    "index_n_heads": 16,  # with few, some tokens would score 0 with each, and ties be cut at random
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

# The name of each case says what it is about; its value is a config.json.
CASES: dict[str, dict[str, Any]] = {
    "every_layer_full": {**_BASE, "num_hidden_layers": 3},
    "shared_as_listed": {
        **_BASE,
        "num_hidden_layers": 5,
        "indexer_types": ["full", "shared", "shared", "full", "shared"],
    },
    "one_full_for_all": {**_BASE, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "shared", "shared"]},
    "by_pattern": {**_BASE, "num_hidden_layers": 4, "index_topk_pattern": "FFSF"},
    "by_frequency_as_in_glm_5_2": {
        **_BASE,
        "num_hidden_layers": 7,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "first_k_dense_replace": 3,
    },
    "dense_only": {**_BASE, "num_hidden_layers": 2, "first_k_dense_replace": 2, "indexer_types": ["full", "shared"]},
    "experts_by_list_in_groups": {
        **_BASE,
        "num_hidden_layers": 3,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "indexer_types": ["full", "shared", "full"],
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": False,
    },
    "biases": {**_BASE, "num_hidden_layers": 2, "attention_bias": True},
    "yarn": {**_BASE, "num_hidden_layers": 3, "rope_parameters": _YARN, "indexer_types": ["full", "shared", "full"]},
}


def make_tokens(case: str) -> list[int]:
    return [int(token) for token in _random(f"tokens of {case}").randint(0, VOCABULARY, TOKENS)]


def make_checkpoint(config: dict[str, Any], indexer_types: list[str], mlp_layer_types: list[str]) -> Weights:
    """Make all parameters of a checkpoint, with their published names."""
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], config["hidden_size"]),
        "model.norm.weight": (config["hidden_size"],),
        "lm_head.weight": (config["vocab_size"], config["hidden_size"]),
    }
    for layer, (indexer, mlp) in enumerate(zip(indexer_types, mlp_layer_types, strict=True)):
        parts = {
            **{f"{norm}_layernorm.weight": (config["hidden_size"],) for norm in ("input", "post_attention")},
            **{f"self_attn.{name}": shape for name, shape in _attention(config).items()},
            **{f"self_attn.indexer.{name}": shape for name, shape in _indexer(config).items() if indexer == "full"},
            **{f"mlp.{name}": shape for name, shape in (_experts if mlp == "sparse" else _dense)(config).items()},
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return {name: _weight(name, shape) for name, shape in shapes.items()}


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, rank, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "q_a_proj.weight": (q_rank, hidden),
        "q_a_layernorm.weight": (q_rank,),
        "q_b_proj.weight": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (nope + value), rank),
        "o_proj.weight": (hidden, heads * value),
    }
    biases = {"q_a_proj.bias": (q_rank,), "kv_a_proj_with_mqa.bias": (rank + rope,), "o_proj.bias": (hidden,)}
    return {**shapes, **biases} if config["attention_bias"] else shapes


def _indexer(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, heads = config["index_head_dim"], config["index_n_heads"]
    return {
        "wq_b.weight": (heads * width, config["q_lora_rank"]),
        "wk.weight": (width, config["hidden_size"]),
        "k_norm.weight": (width,),
        "k_norm.bias": (width,),
        "weights_proj.weight": (heads, config["hidden_size"]),
    }


def _dense(config: dict[str, Any], width: str = "intermediate_size", prefix: str = "") -> dict[str, tuple[int, ...]]:
    wide, hidden = config[width], config["hidden_size"]
    return {
        f"{prefix}gate_proj.weight": (wide, hidden),
        f"{prefix}up_proj.weight": (wide, hidden),
        f"{prefix}down_proj.weight": (hidden, wide),
    }


def _experts(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    count = config["n_routed_experts"]
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (count, config["hidden_size"]),
        "gate.e_score_correction_bias": (count,),
    }
    for expert in range(count):
        shapes |= _dense(config, "moe_intermediate_size", f"experts.{expert}.")
    return shapes | _dense(config, "moe_intermediate_size", "shared_experts.")


def _weight(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Normal values: about 1 for the factors of norms, small for what is added, else such that lengths are kept."""
    values = _random(name).standard_normal(shape)
    if "norm" in name and name.endswith(".weight"):
        values = 1 + 0.2 * values
    elif len(shape) == 1:
        values = 0.2 * values
    elif "embed_tokens" not in name:
        values = values * (2.0 if "lm_head" in name else 1.0) / np.sqrt(shape[-1])
    return values.astype(np.float32)


def _random(name: str) -> np.random.RandomState:
    """RandomState: its numbers are promised never to change."""
    return np.random.RandomState(zlib.crc32(name.encode()))
