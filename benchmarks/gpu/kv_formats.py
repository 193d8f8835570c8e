"""Milliseconds a pass by format of the KV and by context: of one token, as in a decode step, and of more.

The model has random weights in a real shape, or is that of a folder; its context is random rows.  Each figure is a
median over passes in which all formats take turns, with its ratio to KV as computed (`0`).  Formats that the device has
no kernel for are said.

Usage: PYTHONPATH=benchmarks .venv/bin/python benchmarks/gpu/kv_formats.py [--shape 8b|experts|small | --model FOLDER]
           [--formats 0 8 8,4 8,4+2x8] [--contexts 1000 8000 32000] [--widths 1 8 512] [--sequences 1] [--rounds 15]
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from common.kv_formats import count_number_bits, parse_format
from common.rows import StreamingTable
from drafts.models import SHAPES, make_random_model
from rich.console import Console

from warmline_backend.kv_cache.codecs import CacheLayout
from warmline_backend.model.kv_quantization import make_cache_factory
from warmline_backend.model.loader import load_lazy_model
from warmline_backend.model.model import measure_kv, run_probe

PLAIN = "0"
FORMATS = (PLAIN, "8", "8,4", "4", "8,4/64,32", "8,4+2x8", "8,3")
WARM_UP_PASSES = 3
ERROR_CHARS_MAX = 60
WIDTHS = {"context": 8, "tokens": 6, "format": 10, "bits a number": 0, "KV bytes a token": 0, "ms": 9, "ratio": 6}


class FormatSide:
    """A model's cache of one format, filled with random rows."""

    def __init__(self, model: nn.Module, label: str, context: int, sequences: int) -> None:
        self.label, quantization = label, parse_format(label)
        layout = CacheLayout.from_factory(make_cache_factory(model, quantization))
        logits, probed = run_probe(model, layout)
        mx.eval(logits)
        self.row_bytes = measure_kv(layout, probed).row_bytes
        self.number_bits = count_number_bits(quantization, len(layout.template))
        self._model = model
        sample = CacheLayout.from_factory(make_cache_factory(model, None))
        rows = [layer.keys for layer in run_probe(model, sample)[1]]
        self._layers = fill_caches(layout, rows, context, sequences)
        self._sequences = sequences

    def time_pass(self, width: int) -> float:
        """Seconds of a pass of `width` tokens, which the cache then forgets."""
        tokens = mx.ones((self._sequences, width), mx.int32)
        mx.synchronize()
        began = time.perf_counter()
        mx.eval(self._model(tokens, cache=self._layers)[:, -1])
        seconds = time.perf_counter() - began
        for layer in self._layers:
            layer.trim(width)
        return seconds


def fill_caches(layout: CacheLayout, rows: Sequence[mx.array], context: int, sequences: int) -> list[Any]:
    """Batched caches with `context` random rows a sequence, of the shape and type of `rows`, one array a layer."""
    filled: list[Any] = []
    for _ in range(sequences):
        layers = layout.make_empty_cache()
        for leaf, like in zip(layers, rows, strict=True):
            keys, values = mx.random.normal((2, 1, like.shape[1], context, like.shape[3])).astype(like.dtype)
            leaf.update_and_fetch(keys, values)
            mx.eval(leaf.keys, leaf.values)
        for leaf, other in zip(filled, layers, strict=False):
            leaf.extend(other)
            mx.eval(leaf.keys, leaf.values)
        filled = filled or layers
    return filled


def measure(model: nn.Module, options: argparse.Namespace, console: Console) -> None:
    rows = StreamingTable(console, f"{options.sequences} at once; ms a pass", WIDTHS)
    for context in options.contexts:
        sides = make_sides(model, options, context, console)
        for width in options.widths:
            seconds: dict[str, list[float]] = {side.label: [] for side in sides}
            for number in range(WARM_UP_PASSES + options.rounds):
                for side in sides:
                    taken = side.time_pass(width)
                    if number >= WARM_UP_PASSES:
                        seconds[side.label].append(taken)
            medians = {label: statistics.median(each) for label, each in seconds.items()}
            for side in sides:
                rows.add_row(f"{context:,}", str(width), *format_cells(side, medians))
        del sides
        mx.clear_cache()


def make_sides(model: nn.Module, options: argparse.Namespace, context: int, console: Console) -> list[FormatSide]:
    sides = []
    for label in options.formats:
        try:
            side = FormatSide(model, label, context, options.sequences)
            for width in options.widths:
                side.time_pass(width)
            sides.append(side)
        except (RuntimeError, ValueError) as error:  # a product that mlx has no kernel for on this device
            reason = str(error).splitlines()[0][:ERROR_CHARS_MAX]
            console.print(f"{label}: not computed at {context:,}: {reason}", markup=False, highlight=False)
    return sides


def format_cells(side: FormatSide, medians: dict[str, float]) -> Sequence[str]:
    seconds, plain = medians[side.label], medians.get(PLAIN)
    ratio = f"{seconds / plain:.2f}" if plain else ""
    return side.label, f"{side.number_bits:.2f}", f"{side.row_bytes:,}", f"{seconds * 1e3:.2f}", ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--model", type=Path, help="a folder, in place of a shape")
    parser.add_argument("--formats", nargs="+", default=FORMATS, help="0: as computed; 8, 8,4, 8,4/64,32, 8,4+2x8 ...")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 8000, 32_000])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 8, 512], help="tokens of a pass")
    parser.add_argument("--sequences", type=int, default=1, help="in a batch")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    console = Console(width=150)
    if options.model:
        model, _ = load_lazy_model(options.model, trust_remote_code=False)
    else:
        model = make_random_model(options.shape)
    mx.eval(model.parameters())
    console.print(f"{options.model or options.shape} on {mx.device_info().get('device_name', 'CPU')}", highlight=False)
    measure(model, options, console)


if __name__ == "__main__":
    main()
