"""Tokens per second with a JSON schema and without, in one process: what it costs to hold an answer to a form.

The scheduler is driven as the engine drives it, two of them in turn: some steps of sequences that decode together
freely, then as many of ones that are held to the schema, and so on, so that a machine's moods fall on both.  No answer
ends by itself: the schema asks for more items than there is room for.

Usage: .venv/bin/python benchmarks/constrained.py [--quick | --shape llama | --model DIR] [--checked]
       [--rounds N] [--steps N]
"""

import argparse
import copy
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
from common.rows import StreamingTable
from common.servers import format_blas, make_environment, tiny_models
from rich.console import Console

from warmline_backend import demo
from warmline_backend.generation.events import GenerationEvent, TokenEvent
from warmline_backend.generation.sequence import GenerationRequest
from warmline_backend.model.model import ServedModel, load_served_model
from warmline_backend.request.params import GenerationParams
from warmline_backend.scheduler.scheduler import Scheduler, SchedulerSettings
from warmline_backend.structured_output.compiler import GrammarCompiler
from warmline_backend.structured_output.constraint import Constraint
from warmline_common.storage.home import Home

BATCH_SIZES = (1, 4)
PROMPT_TOKENS = 64
WARM_UP_STEPS = 8
MEMORY_BYTES = 4 << 30
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "kind": {"enum": ["person", "animal", "machine"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
            "alive": {"type": "boolean"},
        },
        "required": ["name", "age", "kind", "tags", "alive"],
        "additionalProperties": False,
    },
}
UNIQUE_ITEMS = {"uniqueItems": True}  # which no grammar forces: the tags are checked, and drawn again


def make_schema(is_checked: bool) -> dict[str, Any]:
    made: dict[str, Any] = copy.deepcopy(SCHEMA)
    made["items"]["properties"]["tags"] |= UNIQUE_ITEMS if is_checked else {}
    return made


WIDTHS = {
    "model": 12,
    "vocabulary": 0,
    "together": 0,
    "free, tokens/s": 0,
    "with a schema": 0,
    "ratio: median": 0,
    "25 % to 75 %": 14,
    "compiled in": 0,
}


@dataclass(frozen=True)
class BenchModel:
    name: str
    served: ServedModel
    grammars: GrammarCompiler
    constraint: Constraint
    compiled_s: float  # the tokenizer converted, and the grammar

    @classmethod
    def load(cls, name: str, folder: Path, schema: dict[str, Any]) -> "BenchModel":
        served = load_served_model(str(folder), name)
        grammars, began = GrammarCompiler(served.tokenizer, served.vocabulary_size), time.perf_counter()
        constraint = grammars.build_constraint("completion", {"structured_outputs": {"json": schema}}, None, "")
        assert constraint is not None
        return cls(name, served, grammars, constraint, time.perf_counter() - began)


def load_models(options: argparse.Namespace, place: Path) -> Iterator[BenchModel]:
    schema = make_schema(options.checked)
    if options.model:
        yield BenchModel.load(options.model.name, options.model, schema)
        return
    if options.shape:
        from common import large_models  # which makes arrays on the device as it is imported

        large_models.build_model(options.shape, place / options.shape)
        yield BenchModel.load(options.shape, place / options.shape, schema)
        return
    yield BenchModel.load("tiny", tiny_models.build("bench", place / "tiny"), schema)
    try:
        yield BenchModel.load("demo", demo.prepare_demo_model(Home(place / "home"), "float32"), schema)
    except demo.DemoUnavailableError as problem:
        print(f"no demo model: {problem}", file=sys.stderr)


class DecodeBench:
    """Sequences that decode together, all free or all held to the schema."""

    def __init__(self, subject: BenchModel, batch_size: int, tokens: int, *, is_constrained: bool) -> None:
        settings = SchedulerSettings(
            boot="bench",
            memory_budget_bytes=MEMORY_BYTES,
            prefill_step_size=2048,
            running_count_max=batch_size,
            keeps_residents=False,
        )
        self._scheduler, self._token_counts = Scheduler(subject.served, settings), [0] * batch_size
        for number in range(batch_size):
            self._scheduler.submit(self._make_generation(subject, number, tokens, is_constrained=is_constrained))
        self._steps = self._run_steps()
        while not all(self._token_counts):
            next(self._steps)

    def _make_generation(
        self, subject: BenchModel, number: int, tokens: int, *, is_constrained: bool
    ) -> GenerationRequest:
        def listener(event: GenerationEvent) -> None:
            self._token_counts[number] += isinstance(event, TokenEvent)

        return GenerationRequest(
            id=f"{number}",
            prompt=[33 + number] * PROMPT_TOKENS,
            params=GenerationParams(max_tokens=tokens, temperature=0.7, seed=number, ignore_eos=True),
            listener=listener,
            matcher=subject.grammars.create_matcher(subject.constraint) if is_constrained else None,
            leaves_resident=False,
        )

    def _run_steps(self) -> Iterator[None]:
        while True:
            yield from self._scheduler.step()

    def measure_rate(self, steps: int) -> float:
        """Tokens per second over some steps, the work that they leave on its way included."""
        began, before = time.perf_counter(), sum(self._token_counts)
        for _ in range(steps):
            next(self._steps)
        mx.synchronize()
        return (sum(self._token_counts) - before) / (time.perf_counter() - began)


def measure_model(subject: BenchModel, options: argparse.Namespace, rows: StreamingTable) -> None:
    for together in BATCH_SIZES:
        tokens = (options.rounds + 2) * options.steps + 2 * WARM_UP_STEPS
        sides = [DecodeBench(subject, together, tokens, is_constrained=held) for held in (False, True)]
        for side in sides:
            side.measure_rate(WARM_UP_STEPS)
        pairs = [_measure_pair(sides, options.steps, number) for number in range(options.rounds)]
        free, held = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratios = sorted(one_held / one_free for one_free, one_held in pairs)
        rows.add_row(
            subject.name,
            str(subject.served.vocabulary_size),
            str(together),
            f"{free:.1f}",
            f"{held:.1f}",
            f"{statistics.median(ratios):.3f}",
            _format_quartiles(ratios),
            f"{subject.compiled_s * 1e3:.0f} ms",
        )


def _measure_pair(sides: Sequence[DecodeBench], steps: int, number: int) -> tuple[float, float]:
    """Without and with; which goes first alternates."""
    first = number % 2
    rates = {place: sides[place].measure_rate(steps) for place in (first, 1 - first)}
    return rates[0], rates[1]


def _format_quartiles(ratios: Sequence[float]) -> str:
    if len(ratios) < 2:
        return ""
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{low:.3f} to {high:.3f}"


def ensure_fast_blas() -> None:
    """Start this script anew with it where it isn't loaded: it has to be before mlx."""
    if make_environment().get("LD_PRELOAD") != os.environ.get("LD_PRELOAD"):
        os.execve(sys.executable, sys.orig_argv, make_environment())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few short rounds: shows that it runs, and no more")
    parser.add_argument("--shape", default="", help="random bfloat16 weights, see large_models: for a GPU")
    parser.add_argument("--checked", action="store_true", help="a schema with a part that is checked")
    parser.add_argument("--model", type=Path, help="a model of your own")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=16, help="a round, of either side")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 4, 8
    ensure_fast_blas()
    console = Console(width=150)
    device = mx.device_info().get("device_name") or platform.machine()
    versions = f"mlx {metadata.version('mlx')}; llguidance {metadata.version('llguidance')}"
    console.print(f"{device}; {versions}; {format_blas()}")
    with tempfile.TemporaryDirectory(prefix="warmline-constrained-") as place:
        rows = StreamingTable(console, "decoding, free and with a schema", WIDTHS)
        for subject in load_models(options, Path(place)):
            measure_model(subject, options, rows)
            mx.clear_cache()


if __name__ == "__main__":
    main()
