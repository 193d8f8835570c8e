"""Model configurations for cache tests, loaded once a session."""

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from support import tiny_models
from support.backend.cold_runs import ColdRun, cold_logprobs
from warmline_backend.model.model import ServedModel, load_served_model

# Where a warm run's logits may differ from a cold one's: rows computed while decoding, or in other chunks, round
# differently.  Quantized rows turn a difference in the last bit into one of a step.  (On an NVIDIA GPU run these tests
# with MLX_ENABLE_TF32=0: ten bits of mantissa are too few to tell a wrong cache from rounding.)
TOLERANCE = {"quantized": 2e-2}
FAMILIES = ["llama", "qwen3_5", "gemma3", "glm_moe_dsa", "falcon_h1"]
if not mx.cuda.is_available():  # mlx has no kernel there for these quantized shapes
    FAMILIES.append("quantized")


@cache
def load_family(family: str, root: Path) -> ServedModel:
    architecture = "llama" if family == "quantized" else family
    folder = tiny_models.build(architecture, root / architecture)
    options: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32} if family == "quantized" else {}
    return load_served_model(str(folder), family, **options)


def compute_cold(model: ServedModel, family: str, prompt: list[int], max_tokens: int) -> ColdRun:
    """Compute the reference answer, without the product's engine."""
    caches = None
    if family == "quantized":
        caches = [QuantizedKVCache(group_size=32, bits=8) for _ in model.model.layers]
    return cold_logprobs(model.model, prompt, 1 << 20, max_tokens, caches)


def get_tolerance(family: str) -> float:
    return TOLERANCE.get(family, 1e-3)


def make_prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + 7 * n + n * n * seed) % 250 for n in range(length)]
