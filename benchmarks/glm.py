"""GLM-5.2's attention at its real width: what a chunk of prefill and a step of decoding cost after how many tokens.

    .venv/bin/python benchmarks/glm.py [--tokens 4096,16384] [--chunk 256] [--repeats 3] [--bits 16]

Two layers, one that selects and one that shares, with the real model's 64 heads, latents and indexer, and a
small dense MLP in place of its experts; random weights, and random rows in place of those that a prefill would have
left.  Compared: ours; ours with every row multiplied and those that are not selected masked, at any length; and
mlx-lm's own `glm_moe_dsa`, in which both layers select.  Medians; the three take turns.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from common.rows import StreamingTable
from mlx.utils import tree_flatten
from mlx_lm.models import glm_moe_dsa as mlx_lms
from mlx_lm.models.cache import CacheList
from rich.console import Console

from warmline_backend.model.architectures import glm_moe_dsa as ours

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support import glm_5_2

GATHERED_FROM = ours.GATHERED_FROM
STEPS = 5
CONFIG: dict[str, Any] = {  # as published, but for its layers, its MLP and its vocabulary
    **{name: value for name, value in glm_5_2.CONFIG.items() if name not in ("indexer_types", "quantization")},
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "intermediate_size": 64,
    "vocab_size": 256,
    "topk_method": "noaux_tc",  # these three mlx-lm asks for
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="4096,16384", help="how many are in the cache, separated by commas")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bits", type=int, choices=(16, 32), default=32, help="bfloat16 or float32")
    given = parser.parse_args()
    dtype = mx.bfloat16 if given.bits == 16 else mx.float32
    own = _prepare_model(ours.Model(ours.ModelArgs.from_dict({**CONFIG, "indexer_types": ["full", "shared"]})), dtype)
    peer = _prepare_model(mlx_lms.Model(mlx_lms.ModelArgs.from_dict(CONFIG)), dtype)
    console = Console()
    title = f"a chunk of {given.chunk} tokens and a step, two layers, {dtype}, medians of {given.repeats}"
    widths = {"tokens": 8, "model": 12, "chunk": 9, "a token": 9, "peak above rest": 9, "step": 9}
    rows = StreamingTable(console, title, widths)
    for tokens in map(int, given.tokens.split(",")):
        contenders = {"ours": (own, GATHERED_FROM), "masked": (own, 1 << 40), "mlx-lm": (peer, 0)}
        measured: dict[str, list[tuple[float, int, float]]] = {name: [] for name in contenders}
        for _ in range(given.repeats + 1):  # the first compiles
            for name, (model, gathered_from) in contenders.items():
                ours.GATHERED_FROM = gathered_from
                measured[name].append(_measure(model, tokens, given.chunk, dtype))
        for name, runs in measured.items():
            chunk_s, peak, step_s = (statistics.median(values) for values in zip(*runs[1:], strict=True))
            token_ms = 1e3 * chunk_s / given.chunk
            rows.add_row(
                f"{tokens:,}",
                name,
                f"{chunk_s:.2f} s",
                f"{token_ms:.2f} ms",
                f"{peak / 1e9:.2f} GB",
                f"{step_s * 1e3:.0f} ms",
            )


def _prepare_model(model: nn.Module, dtype: mx.Dtype) -> nn.Module:
    model.load_weights([(name, array.astype(dtype)) for name, array in tree_flatten(model.parameters())])
    mx.eval(model.parameters())
    return model


def _measure(model: nn.Module, tokens: int, chunk: int, dtype: mx.Dtype) -> tuple[float, int, float]:
    """Seconds of a chunk, the memory that it took at its peak beyond what it started with, seconds of a step."""
    caches = _make_filled_caches(model, tokens, dtype)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    chunk_s = _time_compute(lambda: model(mx.array([list(range(chunk))]) % 256, cache=caches), caches)
    peak = mx.get_peak_memory() - held
    steps = [_time_compute(lambda: model(mx.array([[7]]), cache=caches), caches) for _ in range(STEPS)]
    return chunk_s, peak, statistics.median(steps)


def _time_compute(compute: Callable[[], mx.array], caches: list[CacheList]) -> float:
    started = time.perf_counter()
    mx.eval(compute(), [layer.state for layer in caches])
    return time.perf_counter() - started


def _make_filled_caches(model: nn.Module, tokens: int, dtype: mx.Dtype) -> list[CacheList]:
    """Caches as if `tokens` had been prefilled, with room for what comes."""
    caches: list[CacheList] = model.make_cache()
    mx.eval(model(mx.array([[1]]), cache=caches), [layer.state for layer in caches])
    for layer in caches:
        for leaf in layer.caches:
            leaf.keys, leaf.values = (
                mx.random.normal((1, 1, tokens, array.shape[-1])).astype(dtype) for array in (leaf.keys, leaf.values)
            )
            leaf.offset = tokens
    mx.eval([layer.state for layer in caches])
    return caches


if __name__ == "__main__":
    main()
