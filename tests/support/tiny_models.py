"""Tiny random-weight models of every cache family, in mlx-lm's folder layout: a whole request takes milliseconds.

Random weights make greedy output *more* sensitive to a wrong cache than trained ones would; the matrices are scaled up
(x3) so that the output varies instead of repeating one token.

Text round-trips: a conversation sends back as text what the model generated as tokens, and the test of a warm turn is
that the text becomes the same tokens again.  The tokenizer is byte-level without merges (token = byte), and the output
rows of every token that is not graphic ASCII are zero, so their logits are 0.  The other rows are scaled up once more
(x3), which puts the largest of the 93 graphic logits far above 0: greedy output is graphic ASCII always, output
sampled at temperature 1 nearly always.  Left out on purpose: the space (mlx-lm's detokenizer drops a leading one),
``<`` (so that no special token is ever spelled out), and the end-of-turn token unless `stops` is asked for.

Usage: python tests/support/tiny_models.py FAMILY FOLDER
"""

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from support.tool_templates import TOOL_TEMPLATE
from warmline_backend.model.loader import find_model_classes

SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|pad|>"]
VOCABULARY = 256 + len(SPECIAL_TOKENS)
EOS = 256 + SPECIAL_TOKENS.index("<|im_end|>")
SLIDING_WINDOW = 32
CONTEXT_TOKENS = 100_000

BASE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT_TOKENS,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
}

_SPARSE = {
    **BASE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 16,
    "qk_nope_head_dim": 32,
    "index_head_dim": 64,
    "index_n_heads": 4,
    "index_topk": 16,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
}

# The key is the name used in tests; the value is a config.json.  With --kv-bits 8 --kv-group-size 32 "llama" is the
# quantized-KV configuration: its heads are 32 wide.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "model_type": "llama", "num_hidden_layers": 2, "rope_theta": 1e4},
    # Heads are 64 wide: keys and values can have groups of their own.  Layers: boundary, inner, boundary.
    "llama_wide": {**BASE, "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 3, "rope_theta": 1e4},
    "qwen3_5": {  # gated delta net (ArraysCache) with every fourth layer attention
        "model_type": "qwen3_5",
        "eos_token_id": EOS,
        "text_config": {
            **BASE,
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "head_dim": 32,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 3,
            "full_attention_interval": 4,
        },
    },
    "gemma3": {  # rotating and plain layers in turn
        **BASE,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": SLIDING_WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
        "rope_theta": 1e4,
        "rope_local_base_freq": 1e4,
    },
    "deepseek_v32": {  # CacheList(KV, KV); the indexer selects from 16 tokens on
        **_SPARSE,
        "model_type": "deepseek_v32",
        "num_hidden_layers": 3,
        "moe_intermediate_size": 256,
        "rope_theta": 1e4,
    },
    "glm_moe_dsa": {  # CacheList(KV, KV) where a layer selects, CacheList(KV) where it shares what another selected
        **_SPARSE,
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 4,
        "moe_intermediate_size": 128,
        "indexer_types": ["full", "shared", "full", "shared"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "falcon_h1": {  # CacheList(ArraysCache, KV) in every layer
        **BASE,
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "head_dim": 32,
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 4,
        "rope_theta": 1e4,
    },
    "mamba2": {  # recurrent layers only: no rows at all
        "model_type": "mamba2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "conv_kernel": 4,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": "auto",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT_TOKENS,
        "eos_token_id": EOS,
    },
    "baichuan_m1": {  # rows, states and windows in one model
        **BASE,
        "model_type": "baichuan_m1",
        "num_hidden_layers": 4,
        "sliding_window": SLIDING_WINDOW,
        "sliding_window_layers": [1, 3],
        "conv_window": 2,
        "rope_theta": 1e4,
    },
    "bench": {  # slow enough to prefill that a benchmark sees it
        **BASE,
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 1e4,
    },
}

# Prefix-stable: rendering messages[:k] without the generation prompt is a prefix of rendering all of them.
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}"
    "{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\nTHINK_TAIL' }}{% endif %}"
)


def build(
    family: str, folder: Path, *, stops: bool = False, think_tail: bool = False, tools: bool = False, seed: int = 3
) -> Path:
    """Make the model in `folder` (once: a folder with a config.json is left as it is) and return the folder.

    `stops`: the end-of-turn token competes with the others, so that an answer may end by itself.
    `think_tail`: the generation prompt ends in ``<think>\\n``, as reasoning models' templates do.
    `tools`: a template that renders reasoning, tool calls and results, see `tool_templates`.
    `seed`: another seed gives a model of the same shape with other weights.
    """
    folder = Path(folder)
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = FAMILIES[family]
    mx.save_safetensors(str(folder / "model.safetensors"), _make_weights(config, stops, seed), {"format": "mlx"})
    write_tokenizer(folder, think_tail, tools)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def _make_weights(config: dict[str, Any], stops: bool, seed: int) -> dict[str, mx.array]:
    model_class, args_class = find_model_classes(config)
    mx.random.seed(seed)
    model: nn.Module = model_class(args_class.from_dict(config))
    model.update(tree_map(_scale_parameter, model.parameters()))
    weights = dict(tree_flatten(model.parameters()))
    (head,) = (name for name in weights if name.endswith("lm_head.weight"))
    weights[head] = weights[head] * make_output_scale(stops)[:, None]
    for name in weights:
        if name.endswith((".conv_k", ".conv_v")):  # 0 where they were not trained, which would hide a wrong state
            weights[name] = mx.random.normal(weights[name].shape)
    mx.eval(weights)
    return weights


def _scale_parameter(parameter: mx.array) -> mx.array:
    if not mx.issubdtype(parameter.dtype, mx.floating):
        return parameter
    return (parameter * 3.0 if parameter.ndim == 2 else parameter).astype(mx.float32)


def make_output_scale(stops: bool) -> mx.array:
    """3 for every token that may be generated, 0 for the others."""
    allowed = {_make_byte_alphabet().index(chr(code)) for code in range(0x21, 0x7F) if chr(code) != "<"}
    if stops:
        allowed.add(EOS)
    return mx.array([3.0 if token in allowed else 0.0 for token in range(VOCABULARY)])


def _make_byte_alphabet() -> list[str]:
    """Alphabet of one character a byte; the graphic ASCII bytes stand for themselves.  The position is the token id."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def write_tokenizer(folder: Path, think_tail: bool = False, tools: bool = False) -> None:
    plain = TEMPLATE.replace("THINK_TAIL", "<think>\\n" if think_tail else "")
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(_make_byte_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=text.startswith("<|")) for text in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": TOOL_TEMPLATE if tools else plain,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    print(build(arguments.family, arguments.folder))
