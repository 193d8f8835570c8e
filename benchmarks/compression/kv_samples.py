"""KV of real prompts as bits of bfloat16."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load
from numpy.typing import NDArray

from warmline_backend.demo import prepare_demo_model
from warmline_common.storage.home import Home

Bits = NDArray[np.uint16]
CHUNK = 256
CODE = Path(__file__).parents[2] / "backend" / "warmline_backend"
RANDOM_MODEL = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1024}
RANDOM_MODEL |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 32000, "rms_norm_eps": 1e-5}


def compute_smollm2(tokens: int, home: Path) -> list[Bits]:
    """Keys and values of each layer, (1, 3, tokens, 64), over code of this repository.

    Computed as the demo model does, and rounded: bfloat16 itself is slow on CPUs.
    """
    model, tokenizer, *_ = load(str(prepare_demo_model(Home(home))))
    text = "".join(path.read_text() for path in sorted(CODE.rglob("*.py")))
    return _prefill(model, tokenizer.encode(text[: 8 * tokens])[:tokens])


def compute_random(tokens: int) -> list[Bits]:
    """Keys and values of a llama with random weights, (1, 2, tokens, 64)."""
    mx.random.seed(1)
    model = llama.Model(llama.ModelArgs.from_dict(RANDOM_MODEL))
    return _prefill(model, [(7 * n + n * n) % 32000 for n in range(tokens)])


def _prefill(model: Any, tokens: list[int]) -> list[Bits]:
    cache = make_prompt_cache(model)
    for start in range(0, len(tokens), CHUNK):
        model(mx.array([tokens[start : start + CHUNK]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    arrays = (array[:, :, : len(tokens)] for layer in cache for array in (layer.keys, layer.values))
    return [np.array(mx.contiguous(array.astype(mx.bfloat16)).view(mx.uint16)) for array in arrays]
