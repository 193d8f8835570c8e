"""Model configurations for cache tests, loaded once a session."""

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from support import tiny_models
from support.backend.cold_runs import ColdRun, cold_logprobs
from warmline_backend.model.model import ServedModel, load_served_model
from warmline_common.settings.quantization import KvFormat, RowFormat, make_quantization

# Where a warm run's logits may differ from a cold one's: rows computed while decoding, or in other chunks, round
# differently.  Quantized rows turn a difference in the last bit into one of a step.  (On an NVIDIA GPU run these tests
# with MLX_ENABLE_TF32=0: ten bits of mantissa are too few to tell a wrong cache from rounding.)
TOLERANCE = {"quantized": 2e-2, "quantized_apart": 5e-2}
QUANTIZATIONS = {"quantized": make_quantization(8, 32), "quantized_apart": make_quantization("8,4", "64,32", 1, "8,6")}
ARCHITECTURES = {"quantized": "llama", "quantized_apart": "llama_wide"}
FAMILIES = ["llama", "qwen3_5", "gemma3", "glm_moe_dsa", "falcon_h1"]
if not mx.cuda.is_available():  # mlx has no kernel there for these quantized shapes
    FAMILIES.append("quantized")


class DequantizedKVCache(KVCache):  # type: ignore[misc]  # mlx-lm has no types
    """Plain cache of rows that were quantized and are plain numbers again: a reference without quantized products."""

    def __init__(self, kv_format: KvFormat) -> None:
        super().__init__()
        self._format = kv_format

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(round_rows(keys, self._format.keys), round_rows(values, self._format.values))


def round_rows(rows: mx.array, row_format: RowFormat) -> mx.array:
    """Rows as they are after they were quantized."""
    options = {"group_size": row_format.group_size, "bits": row_format.bits}
    return mx.dequantize(*mx.quantize(rows, **options), **options)  # type: ignore[arg-type]


@cache
def load_family(family: str, root: Path) -> ServedModel:
    architecture = ARCHITECTURES.get(family, family)
    folder = tiny_models.build(architecture, root / architecture)
    return load_served_model(str(folder), family, quantization=QUANTIZATIONS.get(family))


def compute_cold(model: ServedModel, family: str, prompt: list[int], max_tokens: int) -> ColdRun:
    """Compute the reference answer, without the product's engine."""
    caches: list[Any] | None = None
    if family == "quantized":
        caches = [QuantizedKVCache(group_size=32, bits=8) for _ in model.model.layers]
    elif quantization := QUANTIZATIONS.get(family):
        caches = [DequantizedKVCache(each) for each in quantization.list_formats(len(model.model.layers))]
    return cold_logprobs(model.model, prompt, 1 << 20, max_tokens, caches)


def get_tolerance(family: str) -> float:
    return TOLERANCE.get(family, 1e-3)


def make_prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + 7 * n + n * n * seed) % 250 for n in range(length)]
