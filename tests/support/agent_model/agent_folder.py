"""The trained model as a folder that mlx-lm reads: configuration, tokenizer, template and weights.

The weights are kept as 8-bit integers, a scale for each row, and unpacked to float32, which CPUs compute fastest with.

Usage: python tests/support/agent_model/agent_folder.py FOLDER
"""

import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx

HERE = Path(__file__).parent
WEIGHTS, TOKENIZER = HERE / "agent_model.safetensors", HERE / "agent_tokenizer.json"
CONTEXT_TOKENS = 262_144
VOCABULARY = 1280
EOS = "<|im_end|>"
LARGEST = 127

# All layers slide, so what stood more than layers x window tokens before changes nothing: an agent may put any system
# prompt and any history in front.  Of mlx-lm's models this is one that needs no layer of full attention.
CONFIG = {
    "model_type": "muse_glimmer",
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-5,
    "sliding_window": 256,
    "layer_types": ["sliding_attention"] * 4,
    "layer_rope_theta": [1e4, 1e4, 0, 1e4],  # 0: tokens are found by what they are, wherever they stand
    "rope_theta": 1e4,
    "qk_scale_factor": 8.0,
    "max_position_embeddings": CONTEXT_TOKENS,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
    "output_multiplier": 0.2,
}


def build(folder: Path) -> Path:
    """Make the model in `folder` (once: a folder with a config.json is left as it is) and return the folder."""
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        mx.save_safetensors(str(folder / "model.safetensors"), unpack_weights(mx.load(str(WEIGHTS))), {"format": "mlx"})
        write_tokenizer(folder)
        tokenizer = json.loads(TOKENIZER.read_text())
        (eos,) = (token["id"] for token in tokenizer["added_tokens"] if token["content"] == EOS)
        (folder / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": eos}, indent=1))
    return folder


def pack_weights(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Pack matrices as int8 with a scale a row, the few other values in half precision."""
    kept: dict[str, mx.array] = {}
    for name, weight in weights.items():
        if weight.ndim == 2:
            scale = mx.maximum(mx.abs(weight).max(axis=1, keepdims=True), 1e-8) / LARGEST
            kept[name] = mx.round(weight / scale).astype(mx.int8)
            kept[name + ".scale"] = scale.astype(mx.float32)
        else:
            kept[name] = weight.astype(mx.float16)
    return kept


def unpack_weights(kept: dict[str, mx.array]) -> dict[str, mx.array]:
    scales = {name: scale for name, scale in kept.items() if name.endswith(".scale")}
    return {
        name: value.astype(mx.float32) * scales.get(name + ".scale", 1)
        for name, value in kept.items()
        if name not in scales
    }


def write_tokenizer(folder: Path) -> None:
    """The tokenizer's two files, with the template."""
    from support.agent_model.agent_template import AGENT_TEMPLATE  # here, so that this file also runs as a script

    shutil.copyfile(TOKENIZER, folder / "tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": "<|pad|>",
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": AGENT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[1]))
    print(build(Path(sys.argv[1])))
