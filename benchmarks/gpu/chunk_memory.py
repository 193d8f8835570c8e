"""The memory of prefill chunks on this device: reckoned and measured at some depths, and a prefill that runs out of it.

The model has a llama's shape with heads too wide for fused attention on CUDA (256), so its scores are written to
memory.  First chunks are computed after 20,000 to 200,000 random rows.  Then other arrays fill the device but for a few
gigabytes, which the scheduler is not told, and a prompt is prefilled: its answer must be that without them.

Usage: PYTHONPATH=benchmarks:tests .venv/bin/python benchmarks/gpu/chunk_memory.py
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import mlx.core as mx

from common import large_models
from support.backend.engine_driver import EventLog, SchedulerDriver
from warmline_backend.engine.chunk_size import make_chunk_memory
from warmline_backend.generation.chunk_memory import ChunkMemory
from warmline_backend.kv_cache.codecs import flatten, rebuild
from warmline_backend.kv_cache.kv import KV
from warmline_backend.model.model import MemoryLimits, ServedModel, get_machine_bytes, load_served_model
from warmline_backend.scheduler.scheduler import Scheduler
from warmline_common.measurement.model_memory import compute_memory_budget

STEP = 2048
DEPTHS = (20_000, 80_000, 200_000)
WIDE_HEADS = {"head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 12}
PROMPT_TOKENS, FREE_GB = 12_000, 2.5


def make_deep_kv(served: ServedModel, depth: int) -> KV:
    """KV of `depth` random rows."""
    layout, layers = served.layout, served.layout.make_empty_cache()
    served.model(mx.array([[1]]), cache=layers)
    leaves = []
    for leaf, (_, held) in zip(layout.leaves, flatten(layers), strict=True):
        rows = leaf.codec.rows(held, 0, 1, 0, 1)
        fields = {
            name: mx.random.normal((*row.shape[:2], depth, row.shape[3])).astype(row.dtype)
            for name, row in rows.items()
        }
        mx.eval(fields)
        leaves.append(leaf.codec.build(fields, depth, leaf.template))
    return KV(layout, [1] * depth, rebuild(layout.template, iter(leaves)), journal_enabled=False)


def measure_depths(served: ServedModel, memory: ChunkMemory) -> None:
    for depth in DEPTHS:
        kv = make_deep_kv(served, depth)
        for tokens in (STEP, STEP // 4):
            mx.clear_cache()
            active, began = mx.get_active_memory(), time.monotonic()
            mx.reset_peak_memory()
            with memory.bound_chunk(tokens, kv.length, memory.usable_bytes):
                kv.prefill(served.model, [n % 250 for n in range(tokens)])
            taken, reckoned = mx.get_peak_memory() - active, memory.reckon_bytes(tokens, depth)
            print(
                f"{tokens} tokens after {depth}: reckoned with margin {reckoned / 1e9:.2f} GB, "
                f"taken {taken / 1e9:.2f} GB, {time.monotonic() - began:.2f} s",
                flush=True,
            )


def prefill_without_memory(served: ServedModel) -> None:
    prompt = [n * 7919 % 250 for n in range(PROMPT_TOKENS)]
    free = get_machine_bytes() - mx.get_active_memory() - int(FREE_GB * 1e9)
    filler = [mx.ones((1 << 30,), mx.uint8) for _ in range(free >> 30)]
    mx.eval(filler)
    driver = SchedulerDriver(served, step=STEP, budget=1 << 36)
    driver.scheduler = Scheduler(served, driver.scheduler.settings, ChunkMemory(None, 1 << 50))
    log = driver.run(prompt, 8, logprobs=True)
    del filler
    chunks = [end - start for start, end in pairwise([0, *log.chunks])]
    print(f"{FREE_GB:g} GB free: {log.result.finish} {log.result.error}; chunks of {chunks} tokens")
    print(f"{driver.scheduler.step_stats.failed_steps} chunks found no memory")
    expected = prefill_in_chunks(served, prompt, chunks)
    same = (log.generated, log.logprobs) == (expected.generated, expected.logprobs)
    print(f"same tokens and log-probabilities as with memory, in such chunks: {same}")


def prefill_in_chunks(served: ServedModel, prompt: list[int], chunks: list[int]) -> EventLog:
    driver, sizes = SchedulerDriver(served, step=STEP, budget=1 << 36), iter(chunks)
    driver.scheduler.chunk_memory.choose_tokens = lambda *_: next(sizes)  # type: ignore[method-assign]
    return driver.run(prompt, 8, logprobs=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    large_models.SHAPES["wide"] = {**large_models.SHAPES["llama"], **WIDE_HEADS, "max_position_embeddings": 1 << 18}
    with tempfile.TemporaryDirectory() as folder:
        large_models.build_model("wide", Path(folder))
        served = load_served_model(folder, "wide")
        machine_bytes = get_machine_bytes()
        limits = MemoryLimits(machine_bytes, compute_memory_budget(served.weight_bytes, machine_bytes))
        memory = make_chunk_memory(served, STEP, limits)
        measure_depths(served, memory)
        prefill_without_memory(served)


if __name__ == "__main__":
    main()
