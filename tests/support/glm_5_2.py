"""GLM-5.2's folder in full size, with sparse files in place of weights: only headers and configuration can be read.

The configuration is the published one's; the weights are those of a conversion to mxfp4, as mlx-lm makes it.
"""

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from support import tiny_models
from warmline_backend.model.architectures.glm_moe_dsa import Model, ModelArgs

LAYERS = 78
CONFIG: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "vocab_size": 154_880,
    "hidden_size": 6144,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "indexer_types": ["full" if max(layer - 2, 0) % 4 == 0 else "shared" for layer in range(LAYERS)],
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1_048_576,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
    "attention_bias": False,
    "eos_token_id": tiny_models.EOS,
    "quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
}
SHARD_BYTES = 5 << 30
TYPES = {mx.bfloat16: "BF16", mx.uint32: "U32", mx.uint8: "U8"}


def write_folder(folder: Path) -> Path:
    """Write the folder, whose files claim some 395 GB and take a few MB; the tokenizer is a tiny one."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tiny_models.write_tokenizer(folder, think_tail=True, tools=True)
    shards = _split_shards(_make_parameters())
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard)
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    total = sum(array.nbytes for shard in shards for array in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _make_parameters() -> dict[str, mx.array]:
    """Make the parameters lazily, so that none is ever computed."""
    model = Model(ModelArgs.from_dict(CONFIG))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4, mode="mxfp4", class_predicate=lambda _, module: _is_quantizable(module))
    return dict(tree_flatten(model.parameters()))


def _is_quantizable(module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def _split_shards(parameters: dict[str, mx.array]) -> list[dict[str, mx.array]]:
    shards: list[dict[str, mx.array]] = [{}]
    for name, array in parameters.items():
        if sum(held.nbytes for held in shards[-1].values()) + array.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
        shards[-1][name] = array
    return shards


def _write_shard(path: Path, shard: dict[str, mx.array]) -> None:
    header, end = {}, 0
    for name, array in shard.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": TYPES[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
