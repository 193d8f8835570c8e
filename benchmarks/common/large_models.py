"""Models of a real size with random weights in bfloat16, and the tiny models' tokenizer: made in seconds on a GPU.

The matrices have the scale that makes a random model's output vary (see tests/support/tiny_models.py), and only graphic
ASCII is ever likely, so that what was generated comes back as the same tokens.
"""

import importlib
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from common.servers import tiny_models

VOCABULARY = 32_000  # of the model; the tokenizer knows the first few hundred

_LLAMA = {
    **tiny_models.BASE,
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "rope_theta": 5e5,
}
_QWEN3_5_TEXT = {
    **tiny_models.FAMILIES["qwen3_5"]["text_config"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": VOCABULARY,
}
_GEMMA3 = {
    **tiny_models.FAMILIES["gemma3"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 128,
    "vocab_size": VOCABULARY,
}
_LLAMA_8B = {
    **_LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "max_position_embeddings": 1 << 16,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama_8b": _LLAMA_8B,
    "qwen3_5": {**tiny_models.FAMILIES["qwen3_5"], "text_config": _QWEN3_5_TEXT},
    "gemma3": _GEMMA3,
}


def build_model_once(shape: str, folder: Path, **changes: Any) -> None:
    """Make the model in `folder`, unless it is there, with `changes` of its config.

    A process of its own makes it: the memory that mlx keeps there would be counted as the servers'.
    """
    if not (folder / "config.json").exists():
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            pool.submit(build_model, shape, folder, **changes).result()


def build_model(shape: str, folder: Path, seed: int = 3, **changes: Any) -> int:
    """Make the model in `folder`; the number of its parameters."""
    config = {**SHAPES[shape], **changes}
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    model.update(tree_map(_scale_parameter, model.parameters()))
    weights = dict(tree_flatten(model.parameters()))
    (head,) = (name for name in weights if name.endswith("lm_head.weight"))
    allowed = tiny_models.make_output_scale(stops=False)
    rows = mx.concatenate([allowed, mx.zeros((VOCABULARY - allowed.shape[0],))])
    weights[head] = weights[head] * rows[:, None].astype(weights[head].dtype)
    mx.eval(weights)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    tiny_models.write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return sum(array.size for array in weights.values())


def _scale_parameter(parameter: mx.array) -> mx.array:
    if not mx.issubdtype(parameter.dtype, mx.floating):
        return parameter
    return (parameter * 3.0 if parameter.ndim == 2 else parameter).astype(mx.bfloat16)
