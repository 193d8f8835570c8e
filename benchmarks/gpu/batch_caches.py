"""Milliseconds a decode step of several sequences takes with our batch caches, and with mlx-lm's.

A model of a real shape has random weights, and its context is random rows.  Both kinds of cache take turns; steps are
sent ahead of each other, as a server does.  Sequences are equally long, or each is 7 tokens shorter than the one
before.

Usage: PYTHONPATH=tests:backend:launchd:benchmarks .venv/bin/python benchmarks/gpu/batch_caches.py TOKENIZER-FOLDER
           [--shape 8b] [--cases 1x2000,4x2000,8x2000,32x1000,8x12000] [--rounds 3] [--steps 40]
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from common.results import format_table
from drafts.models import SHAPES, make_served_model
from mlx_lm.models.cache import BatchKVCache

from warmline_backend.kv_cache.batch_caches import BatchFloatKVCache, round_up_to_buffer
from warmline_backend.kv_cache.codecs import flatten
from warmline_backend.model.model import ServedModel, run_probe

SHORTER_BY = 7  # tokens, each sequence than the one before
WARM_UP_STEPS = 5


def make_caches(served: ServedModel, lengths: Sequence[int], *, ours: bool) -> list[Any]:
    """Caches of sequences of these lengths, with random rows."""
    _, probed = run_probe(served.model, served.layout)
    return [_make_cache(held, lengths, ours=ours) for _, held in flatten(probed)]


def _make_cache(like: BatchFloatKVCache, lengths: Sequence[int], *, ours: bool) -> Any:
    longest = max(lengths)
    rows = round_up_to_buffer(longest + 64)
    if ours:
        cache: Any = BatchFloatKVCache(lengths)
        cache.masks_decode_steps = False  # as the server decodes
    else:
        cache = BatchKVCache([longest - length for length in lengths])
        cache._idx, cache.offset = longest, mx.array(list(lengths))
    keys, values = like.keys, like.values
    assert keys is not None and values is not None
    shapes = ((len(lengths), half.shape[1], rows, half.shape[3]) for half in (keys, values))
    cache.keys, cache.values = (mx.random.normal(shape).astype(keys.dtype) for shape in shapes)
    mx.eval(cache.keys, cache.values)
    return cache


def time_steps(model: nn.Module, caches: list[Any], sequences: int, steps: int) -> float:
    """Milliseconds a step."""

    def send(tokens: mx.array) -> mx.array:
        drawn = mx.argmax(model(tokens, cache=caches)[:, -1], axis=-1)[:, None]
        mx.async_eval(drawn)  # type: ignore[no-untyped-call]
        return drawn

    tokens, began = mx.arange(5, 5 + sequences)[:, None], 0.0
    for step in range(WARM_UP_STEPS + steps):
        if step == WARM_UP_STEPS:
            mx.eval(tokens)
            began = time.perf_counter()
        following = send(tokens)
        mx.eval(tokens)
        tokens = following
    mx.eval(tokens)
    return (time.perf_counter() - began) / steps * 1e3


def compare(served: ServedModel, lengths: Sequence[int], rounds: int, steps: int) -> list[str]:
    """Cells of a row: medians of both, and their ratio with its range."""
    found: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(rounds):
        for ours in (True, False) if turn % 2 else (False, True):
            caches = make_caches(served, lengths, ours=ours)
            found[ours].append(time_steps(served.model, caches, len(lengths), steps))
            del caches
            mx.clear_cache()
    mine, theirs = (statistics.median(found[ours]) for ours in (True, False))
    ratios = [one / other for one, other in zip(found[True], found[False], strict=True)]
    return [f"{mine:.1f}", f"{theirs:.1f}", f"{mine / theirs:.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--cases", default="1x2000,4x2000,8x2000,32x1000,8x12000", help="sequences x tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    served = make_served_model(options.shape, options.tokenizer)
    rows = []
    for case in options.cases.split(","):
        sequences, tokens = map(int, case.split("x"))
        for shorter_by in (0, SHORTER_BY) if sequences > 1 else (0,):
            lengths = [tokens - shorter_by * n for n in range(sequences)]
            kind = "unlike" if shorter_by else "equal"
            cells = compare(served, lengths, options.rounds, options.steps)
            rows.append([str(sequences), f"{tokens:,}", kind, *cells])
            print(" | ".join(rows[-1]), flush=True)
    print(
        format_table(
            ["sequences", "tokens of each", "lengths", "ours, ms", "mlx-lm, ms", "ratio", "of the rounds"], rows
        )
    )


if __name__ == "__main__":
    main()
