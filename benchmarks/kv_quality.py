"""Distance of a model's answers with quantized KV from those with its KV as computed.

Prompts are cut out of ordinary text: prose and Python sources that are on every machine.  For each format:

  KL          of the distribution of each next token of the prompts, from that without quantization, in nats
  same token  share of these places where the likeliest token is the same
  continues   tokens that a free greedy answer has in common with the one without quantization, of --answer-tokens

Rows are quantized and made plain numbers again as they are written, and attention is mlx's over plain numbers: the same
mathematics as the server's quantized products, and faster on a CPU.  The model is the demo one, or that of --model.
Bits a number include the scales and biases of groups, in 16-bit types.

Ctrl-C ends it with the table of what has been computed.

Usage: .venv/bin/python benchmarks/kv_quality.py [--quick | --model DIR] [--formats F ...] [--lengths N ...]
"""

import argparse
import platform
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import rounding
from common.kv_formats import count_number_bits, parse_format
from common.rows import StreamingTable
from mlx_lm.models.cache import KVCache
from numpy.typing import NDArray
from rich.console import Console

from warmline_backend import demo
from warmline_backend.model.model import ServedModel, load_served_model
from warmline_common.settings.quantization import KvFormat, KvQuantization, RowFormat
from warmline_common.storage.home import Home

CHUNK = 512
FORMATS = (
    *("8", "8/32", "8,6", "6", "8,5", "5", "8,4", "8,4/64,32", "8,4+2x8", "4,8"),
    *("4", "4/32", "4+2x8", "8,3", "3", "8,2", "2"),
)
WIDTHS = {
    "format": 10,
    "prompts": 0,
    "bits a number": 0,
    "bytes": 6,
    "KL: mean": 0,
    "99 %": 8,
    "same token": 0,
    "continues": 0,
}


class RoundedKVCache(KVCache):  # type: ignore[misc]  # mlx-lm has no types
    """Plain cache of rows that were quantized and are plain numbers again."""

    def __init__(self, kv_format: KvFormat) -> None:
        super().__init__()
        self._format = kv_format

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(_round(keys, self._format.keys), _round(values, self._format.values))


def _round(rows: mx.array, row_format: RowFormat) -> mx.array:
    options: Any = {"group_size": row_format.group_size, "bits": row_format.bits}
    return mx.dequantize(*mx.quantize(rows, **options), **options)


@dataclass
class Quality:
    """Results of a format over all prompts."""

    divergences: list[NDArray[np.float64]] = field(default_factory=list)  # nats, by place
    same: list[NDArray[np.bool_]] = field(default_factory=list)
    continued: list[int] = field(default_factory=list)

    def add(self, divergences: NDArray[np.float64], same: NDArray[np.bool_], continued: int) -> None:
        """Add a prompt's."""
        self.divergences.append(divergences)
        self.same.append(same)
        self.continued.append(continued)


def make_caches(quantization: KvQuantization | None, layers: int) -> list[Any]:
    if quantization is None:
        return [KVCache() for _ in range(layers)]
    return [RoundedKVCache(each) for each in quantization.list_formats(layers)]


def compute_chunks(served: ServedModel, prompt: Sequence[int], caches: list[Any]) -> Iterator[mx.array]:
    """Log-probabilities after each token of `prompt`, chunk by chunk."""
    for start in range(0, len(prompt), CHUNK):
        logits = served.model(mx.array([prompt[start : start + CHUNK]]), cache=caches)[0].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(logprobs, [layer.state for layer in caches])
        yield logprobs


def continue_greedily(served: ServedModel, caches: list[Any], token: int, count: int) -> list[int]:
    answer = [token]
    while len(answer) < count:
        answer.append(int(served.model(mx.array([answer[-1:]]), cache=caches)[0, -1].argmax()))
    return answer


def measure_prompt(
    served: ServedModel, prompt: Sequence[int], formats: dict[str, KvQuantization | None], answer_tokens: int
) -> Iterator[tuple[str, NDArray[np.float64], NDArray[np.bool_], int]]:
    """(format, divergences, same tokens, length of the common answer) for each format."""
    layers = len(served.layout.template)
    caches = make_caches(None, layers)
    plain = list(compute_chunks(served, prompt, caches))
    plain_answer = continue_greedily(served, caches, int(plain[-1][-1].argmax()), answer_tokens)
    for label, quantization in formats.items():
        caches = make_caches(quantization, layers)
        divergences, same = [], []
        for expected, found in zip(plain, compute_chunks(served, prompt, caches), strict=True):
            divergences.append(np.array((mx.exp(expected) * (expected - found)).sum(axis=-1), np.float64))
            same.append(np.array(expected.argmax(axis=-1) == found.argmax(axis=-1)))
            last = int(found[-1].argmax())
        answer = continue_greedily(served, caches, last, answer_tokens)
        common = next((n for n, pair in enumerate(zip(plain_answer, answer, strict=True)) if len(set(pair)) > 1), None)
        yield label, np.concatenate(divergences), np.concatenate(same), answer_tokens if common is None else common
        mx.clear_cache()


def measure(served: ServedModel, options: argparse.Namespace, console: Console) -> None:
    corpora = [rounding.encode_corpus(texts, served) for texts in rounding.read_corpora()]
    formats = {label: parse_format(label) for label in options.formats}
    results = {label: Quality() for label in formats}
    with suppress(KeyboardInterrupt):
        for number, length in enumerate(options.lengths):
            tokens = corpora[number % len(corpora)]
            start = random.Random(f"{length} {number}").randrange(len(tokens) - length)
            prompt = tokens[start : start + length]
            for label, divergences, same, continued in measure_prompt(served, prompt, formats, options.answer_tokens):
                results[label].add(divergences, same, continued)
                console.print(f"prompt {number + 1}, {label}: {divergences.mean():.5f} nats", style="dim")
    rows = StreamingTable(console, "against KV as computed", WIDTHS)
    for label, result in results.items():
        if result.same:
            rows.add_row(*format_row(label, result, formats[label], served))


def format_row(label: str, result: Quality, quantization: KvQuantization | None, served: ServedModel) -> list[str]:
    bits = count_number_bits(quantization, len(served.layout.template))
    numbers = sum(array.shape[1] * array.shape[3] for array in _sample_rows(served))
    divergences, same = np.concatenate(result.divergences), np.concatenate(result.same)
    return [
        label,
        str(len(result.same)),
        f"{bits:.2f}",
        f"{numbers * bits / 8:,.0f}",
        f"{divergences.mean():.5f}",
        f"{np.quantile(divergences, 0.99):.4f}",
        f"{same.mean():.1%}",
        f"{statistics.median(result.continued):g} ({min(result.continued)} to {max(result.continued)})",
    ]


def _sample_rows(served: ServedModel) -> Iterator[mx.array]:
    layers = make_caches(None, len(served.layout.template))
    served.model(mx.array([[1]]), cache=layers)
    for layer in layers:
        yield from (layer.keys, layer.values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one prompt of 300 tokens, three formats")
    parser.add_argument("--model", type=Path, help="a model of your own")
    parser.add_argument("--formats", nargs="+", default=FORMATS, help="such as 8 8,4 8,4/64,32 8,4+2x8,8")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2000, 2800, 3600, 4400, 5200, 6000], help="tokens")
    parser.add_argument("--answer-tokens", type=int, default=128)
    options = parser.parse_args()
    if options.quick:
        options.lengths, options.formats, options.answer_tokens = [300], ["8", "8,4", "4"], 16
    rounding.ensure_fast_blas()
    console = Console(width=150)
    console.print(f"{mx.device_info().get('device_name') or platform.machine()}; mlx {metadata.version('mlx')}")
    with tempfile.TemporaryDirectory(prefix="warmline-quality-") as place:
        folder = options.model or demo.prepare_demo_model(Home(Path(place) / "home"), "float32")
        measure(load_served_model(str(folder), folder.name), options, console)


if __name__ == "__main__":
    main()
