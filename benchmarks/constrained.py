"""Tokens per second with a JSON schema and without, in one process: what it costs to hold an answer to a form.

The scheduler is driven as the engine drives it, two of them in turn: some steps of sequences that decode together
freely, then as many of ones that are held to the schema, and so on, so that a machine's moods fall on both.  No answer
ends by itself: the schema asks for more items than there is room for.

Usage: .venv/bin/python benchmarks/constrained.py [--quick | --shape llama | --model DIR] [--rounds N] [--steps N]
"""

import argparse
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
from rich.console import Console
from rows import Rows
from servers import blas_line, environment, tiny_models

from warmline_backend import demo
from warmline_backend.generation.sequence import Event, Generation, Piece
from warmline_backend.model.model import ServedModel, load
from warmline_backend.request.params import GenerationParams
from warmline_backend.scheduler.scheduler import Scheduler, SchedulerSettings
from warmline_backend.structured_output.compiler import Grammars
from warmline_backend.structured_output.constraint import Constraint
from warmline_common.storage.home import Home

TOGETHER = (1, 4)
PROMPT_TOKENS = 64
WARMED_STEPS = 8
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
class Subject:
    name: str
    served: ServedModel
    grammars: Grammars
    constraint: Constraint
    compiled_s: float  # the tokenizer converted, and the grammar

    @classmethod
    def of(cls, name: str, folder: Path) -> "Subject":
        served = load(str(folder), name)
        grammars, began = Grammars(served.tokenizer, served.vocabulary_size), time.perf_counter()
        constraint = grammars.constraint("completion", {"structured_outputs": {"json": SCHEMA}}, None, "")
        assert constraint is not None
        return cls(name, served, grammars, constraint, time.perf_counter() - began)


def subjects(options: argparse.Namespace, place: Path) -> Iterator[Subject]:
    if options.model:
        yield Subject.of(options.model.name, options.model)
        return
    if options.shape:
        import large_models  # which makes arrays on the device as it is imported

        large_models.build(options.shape, place / options.shape)
        yield Subject.of(options.shape, place / options.shape)
        return
    yield Subject.of("tiny", tiny_models.build("bench", place / "tiny"))
    try:
        yield Subject.of("demo", demo.prepare(Home(place / "home"), "float32"))
    except demo.DemoUnavailable as problem:
        print(f"no demo model: {problem}", file=sys.stderr)


class Side:
    """Sequences that decode together, all free or all held to the schema."""

    def __init__(self, subject: Subject, together: int, tokens: int, *, held: bool) -> None:
        settings = SchedulerSettings(
            boot="bench",
            memory_budget_bytes=MEMORY_BYTES,
            prefill_step_size=2048,
            running_count_max=together,
            keeps_residents=False,
        )
        self._scheduler, self._heard = Scheduler(subject.served, settings), [0] * together
        for number in range(together):
            self._scheduler.submit(self._generation(subject, number, tokens, held=held))
        self._steps = self._endless()
        while not all(self._heard):
            next(self._steps)

    def _generation(self, subject: Subject, number: int, tokens: int, *, held: bool) -> Generation:
        def listener(event: Event) -> None:
            self._heard[number] += isinstance(event, Piece)

        return Generation(
            id=f"{number}",
            prompt=[33 + number] * PROMPT_TOKENS,
            params=GenerationParams(max_tokens=tokens, temperature=0.7, seed=number, ignore_eos=True),
            listener=listener,
            guide=subject.grammars.guide(subject.constraint) if held else None,
            kept=False,
        )

    def _endless(self) -> Iterator[None]:
        while True:
            yield from self._scheduler.turn()

    def rate(self, steps: int) -> float:
        """Tokens per second over some steps, the work that they leave on its way included."""
        began, before = time.perf_counter(), sum(self._heard)
        for _ in range(steps):
            next(self._steps)
        mx.synchronize()
        return (sum(self._heard) - before) / (time.perf_counter() - began)


def measure(subject: Subject, options: argparse.Namespace, rows: Rows) -> None:
    for together in TOGETHER:
        tokens = (options.rounds + 2) * options.steps + 2 * WARMED_STEPS
        sides = [Side(subject, together, tokens, held=held) for held in (False, True)]
        for side in sides:
            side.rate(WARMED_STEPS)
        pairs = [_pair(sides, options.steps, number) for number in range(options.rounds)]
        free, held = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratios = sorted(one_held / one_free for one_free, one_held in pairs)
        rows.add(
            subject.name,
            str(subject.served.vocabulary_size),
            str(together),
            f"{free:.1f}",
            f"{held:.1f}",
            f"{statistics.median(ratios):.3f}",
            _quartiles(ratios),
            f"{subject.compiled_s * 1e3:.0f} ms",
        )


def _pair(sides: Sequence[Side], steps: int, number: int) -> tuple[float, float]:
    """Without and with; which goes first alternates."""
    first = number % 2
    rates = {place: sides[place].rate(steps) for place in (first, 1 - first)}
    return rates[0], rates[1]


def _quartiles(ratios: Sequence[float]) -> str:
    if len(ratios) < 2:
        return ""
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{low:.3f} to {high:.3f}"


def have_fast_blas() -> None:
    """Start this script anew with it where it isn't loaded: it has to be before mlx."""
    if environment().get("LD_PRELOAD") != os.environ.get("LD_PRELOAD"):
        os.execve(sys.executable, sys.orig_argv, environment())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few short rounds: shows that it runs, and no more")
    parser.add_argument("--shape", default="", help="random bfloat16 weights, see large_models: for a GPU")
    parser.add_argument("--model", type=Path, help="a model of your own")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=16, help="a round, of either side")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 4, 8
    have_fast_blas()
    console = Console(width=150)
    device = mx.device_info().get("device_name") or platform.machine()
    versions = f"mlx {metadata.version('mlx')}; llguidance {metadata.version('llguidance')}"
    console.print(f"{device}; {versions}; {blas_line()}")
    with tempfile.TemporaryDirectory(prefix="warmline-constrained-") as place:
        rows = Rows(console, "decoding, free and with a schema", WIDTHS)
        for subject in subjects(options, Path(place)):
            measure(subject, options, rows)
            mx.clear_cache()


if __name__ == "__main__":
    main()
