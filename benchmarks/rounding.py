"""How far rounding moves what a first token is chosen from: what audits in fast mode have to tolerate.

Prompts are cut out of ordinary text.  Each is computed cold in chunks of 2,048 tokens, as the engine does, and compared
with that, by the measure that audits use:

  noise   cold in other chunks: of 37, of 500, and cut where the warm run's reuse ends, as an audit's second cold run is
  warm    the first half prefilled; then a part decoded token by token, as an answer is; then the rest prefilled

A false alarm is a prompt of which an audit would say that it differs: by more than is tolerated, and by more than the
second cold run explains.

The model is the demo one, its weights cast to each type (4-bit weights: as its file has them, scales cast), with KV of
the same type, of 8 bits and of 4 bits.  Numbers are nats; rows are printed as they come.  On an NVIDIA GPU products of
float32 have ten bits of mantissa (TF32) unless MLX_ENABLE_TF32=0.

Usage: .venv/bin/python benchmarks/rounding.py [--quick | --model DIR] [--prompts N] [--lengths N ...] [--kv-bits N ...]
"""

import argparse
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import chain, islice
from pathlib import Path
from typing import Any

import guard
import mlx.core as mx
from common.rows import StreamingTable
from common.servers import format_blas, make_environment
from rich.console import Console

from warmline_backend import demo
from warmline_backend.generation.sampling import make_first_logits
from warmline_backend.generation.sequence import find_chunk_end
from warmline_backend.model.loader import ModelError
from warmline_backend.model.model import ServedModel, load_served_model
from warmline_common.protocol.messages import FirstLogits
from warmline_common.settings.quantization import make_quantization, parse_bits
from warmline_common.storage.home import Home
from warmline_proxy.audit.comparison import DIFFERS, Verdict, compare, judge

COLD_CHUNK = 2048
OTHER_CHUNKS = (37, 500)
TEXT_CHARACTERS_MAX = 8_000  # of one file
FILES_MAX = 200
CORPUS_TOKENS = 150_000
CORPORA = (guard.read_prose, guard.read_python_sources)
TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
WIDTHS = {
    "weights": 17,
    "KV": 6,
    "prompt": 6,
    "n": 4,
    "noise: median": 0,
    "95 %": 8,
    "largest": 8,
    "warm: median": 0,
    "95 % ": 8,
    "largest ": 8,
    "tolerance": 0,
    "within": 8,
    "false alarms": 0,
}


# ---- models


def make_models(options: argparse.Namespace, place: Path) -> Iterator[tuple[str, Path]]:
    """(what its weights are, its folder), one after the other; what is made of the demo model is removed again."""
    if options.model:
        yield "as it is", options.model
        return
    for bits in options.weight_bits:
        source = demo.prepare_demo_model(Home(place / "home"), "q4" if bits else "float32")
        for name in options.types:
            if bits and name == "float32":
                continue
            folder = place / f"{name}-{bits}"
            cast_weights(source, folder, TYPES[name])
            yield f"{name}, {bits} bits" if bits else name, folder
            shutil.rmtree(folder)


def cast_weights(source: Path, folder: Path, dtype: mx.Dtype) -> None:
    """A copy of the model with all its floating weights in `dtype`."""
    shutil.copytree(source, folder)
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    weights = {
        name: array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
        for name, array in loaded.items()
    }
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


# ---- prompts


def read_corpora() -> list[list[str]]:
    """The beginnings of files, for each corpus."""
    return [[text[:TEXT_CHARACTERS_MAX] for text in islice(texts(), FILES_MAX)] for texts in CORPORA]


def encode_corpus(texts: Iterable[str], served: ServedModel) -> list[int]:
    """Its first tokens."""
    tokens = (served.tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return list(islice(chain.from_iterable(tokens), CORPUS_TOKENS))


def cut_prompts(corpora: Sequence[list[int]], length: int, count: int) -> Iterator[list[int]]:
    """Cut out anywhere, of each corpus in turn."""
    for number in range(count):
        tokens = corpora[number % len(corpora)]
        start = random.Random(f"{length} {number}").randrange(len(tokens) - length)
        yield tokens[start : start + length]


# ---- runs


def compute_first_logits(
    served: ServedModel, prompt: list[int], step: int = COLD_CHUNK, cuts: Iterable[int] = ()
) -> FirstLogits:
    """What the token after `prompt` is chosen from; chunks are of `step` tokens at most, and end at each of `cuts`.

    As in the engine, the prompt's last token is the first decode step's.
    """
    kv, end, cuts = served.make_kv(journals=False), len(prompt) - 1, list(cuts)
    while kv.length < end:
        chunk = prompt[kv.length : find_chunk_end(kv.length, end, step, cuts)]
        logits = served.model(mx.array([chunk]), cache=kv.layers)
        if len(chunk) > 1:
            mx.eval([layer.state for layer in kv.layers])
        else:
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
        kv.tokens += chunk
    logits = served.model(mx.array([prompt[-1:]]), cache=kv.layers)[:, -1, :]
    return make_first_logits((logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0])


@dataclass(frozen=True)
class PromptComparison:
    """One prompt's other runs, each against its cold one."""

    noise: list[Verdict]
    warm: Verdict
    audit_verdict: Verdict  # what an audit would come to


def compare_prompt(served: ServedModel, answer_tokens_max: int, prompt: list[int]) -> PromptComparison:
    answer, layout = len(prompt) // 2, served.describe_layout()
    reuse = answer + min(len(prompt) // 4, answer_tokens_max)
    cold, again = compute_first_logits(served, prompt), compute_first_logits(served, prompt, cuts=[reuse])
    warm = compute_first_logits(served, prompt, cuts=range(answer, reuse + 1))
    others = [*(compute_first_logits(served, prompt, step) for step in OTHER_CHUNKS), again]
    noise = [compare(cold, other, layout) for other in others]
    return PromptComparison(noise, compare(warm, cold, layout), judge(warm, cold, again, layout))


# ---- tables


def format_spread(verdicts: Iterable[Verdict]) -> list[str]:
    """Median, 95 % and largest difference."""
    differences = sorted(verdict.difference for verdict in verdicts)
    most = differences[min(int(len(differences) * 0.95), len(differences) - 1)]
    return [f"{value:.1e}" if value else "0" for value in (statistics.median(differences), most, differences[-1])]


def format_row(results: Sequence[PromptComparison]) -> list[str]:
    noise, warm = [verdict for each in results for verdict in each.noise], [each.warm for each in results]
    tolerance = max(verdict.tolerance for verdict in (*noise, *warm))  # those that are equal have none
    within, alarms = (
        sum(verdict.agrees for verdict in warm),
        sum(each.audit_verdict.outcome == DIFFERS for each in results),
    )
    tolerance_cell = f"{tolerance:g}" if tolerance else ""
    return [
        str(len(results)),
        *format_spread(noise),
        *format_spread(warm),
        tolerance_cell,
        f"{within} of {len(warm)}",
        str(alarms),
    ]


def measure_models(options: argparse.Namespace, place: Path, console: Console) -> None:
    texts, rows = read_corpora(), StreamingTable(console, "nats, against a cold run", WIDTHS)
    for weights, folder in make_models(options, place):
        for bits in options.kv_bits:
            model_cells = weights, f"{bits} bits" if bits else "plain"
            try:
                served = load_served_model(str(folder), weights, quantization=make_quantization(bits))
                measure_model(
                    served, texts, options, lambda *cells, model_cells=model_cells: rows.add_row(*model_cells, *cells)
                )
            except (ModelError, RuntimeError) as error:  # a product of types that mlx can't compute on this device
                console.print(f"{' '.join(model_cells)}: not computed: {str(error).splitlines()[0]}", markup=False)
            mx.clear_cache()


def measure_model(
    served: ServedModel, texts: list[list[str]], options: argparse.Namespace, add_row: Callable[..., None]
) -> None:
    corpora = [encode_corpus(each, served) for each in texts]
    for length in options.lengths:
        cut = cut_prompts(corpora, length, options.prompts)
        add_row(f"{length:,}", *format_row([compare_prompt(served, options.answer_tokens, prompt) for prompt in cut]))


def ensure_fast_blas() -> None:
    """Start this script anew with it where it isn't loaded: it has to be before mlx."""
    if make_environment().get("LD_PRELOAD") != os.environ.get("LD_PRELOAD"):
        os.execve(sys.executable, sys.orig_argv, make_environment())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two prompts of 100 tokens, two types: for a CPU")
    parser.add_argument("--model", type=Path, help="a model of your own, its weights as they are")
    parser.add_argument("--prompts", type=int, default=20, help="of each length (default: 20)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 1000, 4000], help="of a prompt, in tokens")
    parser.add_argument("--answer-tokens", type=int, default=500, help="decoded, at most; and a quarter of the prompt")
    parser.add_argument("--types", nargs="+", choices=list(TYPES), default=list(TYPES))
    parser.add_argument("--weight-bits", type=int, nargs="+", choices=(0, 4), default=[0, 4], help="0: of the type's")
    parser.add_argument(
        "--kv-bits", nargs="+", type=parse_bits, default=[0, 8, 4], help="as the setting; 0: of the type's"
    )
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.lengths, options.weight_bits = 2, [100], [0]
        options.types = ["float32", "bfloat16"]
    ensure_fast_blas()
    console = Console(width=150)
    device = mx.device_info().get("device_name") or platform.machine()
    tf32 = os.environ.get("MLX_ENABLE_TF32", "not set")
    console.print(f"{device}; mlx {metadata.version('mlx')}; MLX_ENABLE_TF32 {tf32}; {format_blas()}")
    with tempfile.TemporaryDirectory(prefix="warmline-rounding-") as place:
        measure_models(options, Path(place), console)


if __name__ == "__main__":
    main()
