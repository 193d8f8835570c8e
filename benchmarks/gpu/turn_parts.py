"""Parts of one turn on a long context, without HTTP: where the time to its second token goes, beside mlx-lm's own.

Both sides take turns in one process, with one model of a llama's shape with random bfloat16 weights: a prompt of
`--context` tokens is in memory, and `--new` tokens come.  Ours is a scheduler that is driven step by step, and its
parts; mlx-lm's is its batch classes with the same chunk.  The times of a cold prompt of `--cold` tokens follow.

Usage: PYTHONPATH=benchmarks:tests .venv/bin/python benchmarks/gpu/turn_parts.py [--context 24000] [--layers 32]
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache

from common import large_models
from support.backend.engine_driver import SchedulerDriver
from warmline_backend.engine.warm_up import warm_up
from warmline_backend.generation.events import TokenEvent
from warmline_backend.generation.sequence import Sequence
from warmline_backend.kv_cache.kv import KV
from warmline_backend.kv_cache.residents import Residents
from warmline_backend.model.model import ServedModel, load_served_model
from warmline_backend.scheduler.decoding import decode_group
from warmline_backend.scheduler.decoding.decode_group import DecodeGroup
from warmline_backend.scheduler.finish import Finisher

ANSWER_TOKENS = 2
BUDGET_BYTES = 1 << 36
Timings = defaultdict[str, list[float]]  # milliseconds of each run by part


def list_parts() -> list[tuple[object, str, str]]:
    """Owner and name of each function that is timed, and the part that it is; a part includes those within it."""
    return [
        (Residents, "take", "take the resident"),
        (KV, "reserve_rows", "room for new rows"),
        (Sequence, "prefill_chunk", "chunk"),
        (decode_group, "make_decode_batch", "first decode step, sent"),
        (DecodeGroup, "read_sampled", "first token"),
        (DecodeGroup, "step", "decode steps"),
        (Finisher, "finish_sequences", "end"),
    ]


@contextmanager
def time_parts(parts: Timings) -> Iterator[None]:
    """Add up the milliseconds of each part."""
    spent: dict[str, float] = {}
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in list_parts()]
    for owner, name, part in list_parts():
        setattr(owner, name, _wrap(getattr(owner, name), part, spent))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
    for part, seconds in spent.items():
        parts[part].append(seconds * 1e3)


def _wrap(real: Callable[..., Any], part: str, spent: dict[str, float]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return real(*arguments, **options)
        finally:
            spent[part] = spent.get(part, 0.0) + time.perf_counter() - began

    return wrapped


def make_tokens(count: int, seed: int) -> list[int]:
    return [(n * 7919 + seed * 31) % 250 for n in range(count)]


class OurSide:
    """A scheduler whose conversation grows by a turn each time."""

    def __init__(self, served: ServedModel, context: int, step: int) -> None:
        self._driver = SchedulerDriver(served, step=step, budget=BUDGET_BYTES)
        warm_up(served, self._driver.scheduler.settings)
        self._tokens = make_tokens(context, 1)
        self._log = self._driver.run(self._tokens, 1)

    def run_turn(self, count: int, seed: int, timings: Timings) -> None:
        """Time the turn to its first token and to its end, and its parts."""
        driver, last = self._driver, self._log
        self._tokens = [*self._tokens, *last.generated, *make_tokens(count, seed)]
        resident = driver.mark_saved(last)
        began = time.perf_counter()
        with time_parts(timings):
            _, self._log = driver.submit(
                self._tokens, ANSWER_TOKENS, resident=resident, reuse=last.result.prefilled_until
            )
            driver.run_until(lambda: any(isinstance(event, TokenEvent) for event in self._log.events))
            timings["ours: first token"].append((time.perf_counter() - began) * 1e3)
            driver.run_until(lambda: self._log.is_ended)
        timings["ours: end"].append((time.perf_counter() - began) * 1e3)

    def run_cold(self, count: int, seed: int) -> float:
        """Milliseconds to the first token of a prompt that shares nothing."""
        began = time.perf_counter()
        _, log = self._driver.submit(make_tokens(count, seed), 1)
        self._driver.run_until(lambda: any(isinstance(event, TokenEvent) for event in log.events))
        seconds = time.perf_counter() - began
        self._driver.run_until(lambda: log.is_ended)
        self._driver.scheduler.residents.delete(self._driver.mark_saved(log))
        return seconds * 1e3


class PeerSide:
    """mlx-lm's batch classes, with a cache that grows by a turn each time."""

    def __init__(self, served: ServedModel, context: int, step: int) -> None:
        self._model, self._step, self._cache = served.model, step, make_prompt_cache(served.model)
        self._run(make_tokens(context, 1), self._cache)

    def _run(self, tokens: list[int], cache: list[Any]) -> list[Any]:
        batch = PromptProcessingBatch(self._model, [0], [cache], prefill_step_size=self._step, max_tokens=[2])
        batch.prompt([tokens[:-1]])
        decode = batch.generate([tokens[-1:]])
        (response,) = decode.next()
        assert isinstance(response.token, int)
        return decode.extract_cache(0)

    def run_turn(self, count: int, seed: int) -> float:
        """Milliseconds to the turn's first token."""
        began = time.perf_counter()
        self._cache = self._run(make_tokens(count, seed), self._cache)
        return (time.perf_counter() - began) * 1e3

    def run_cold(self, count: int, seed: int) -> float:
        began = time.perf_counter()
        self._run(make_tokens(count, seed), make_prompt_cache(self._model))
        return (time.perf_counter() - began) * 1e3


def report(timings: Timings) -> None:
    for part, values in timings.items():
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(f"{part:28} {statistics.median(values):8.1f} ms (median of {len(values)}, {spread})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=24_000)
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--cold", type=int, nargs="*", default=[2_000, 24_000])
    parser.add_argument("--step", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--model", type=Path, help="a model of your own, instead of the random one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="warmline-bench-") as folder:
        path = options.model or Path(folder)
        if options.model is None:
            sizes = {"num_hidden_layers": options.layers, "hidden_size": options.hidden}
            large_models.SHAPES["turn"] = {**large_models.SHAPES["llama"], **sizes}
            large_models.build_model("turn", path)
        served = load_served_model(str(path), "bench")
    timings: Timings = defaultdict(list)
    ours, peer = OurSide(served, options.context, options.step), PeerSide(served, options.context, options.step)
    for number in range(options.rounds + 1):
        turn: Timings = defaultdict(list)
        ours.run_turn(options.new, number, turn)
        turn["mlx-lm: first token"].append(peer.run_turn(options.new, number))
        for part, values in turn.items() if number else ():  # the first warms up
            timings[part] += values
    print(f"{options.new} new tokens on {options.context}, {mx.default_device()}")
    report(timings)
    for count in options.cold:
        cold: Timings = defaultdict(list)
        for number in range(3):
            cold[f"ours: {count} cold"].append(ours.run_cold(count, 100 + number))
            cold[f"mlx-lm: {count} cold"].append(peer.run_cold(count, 100 + number))
        report(cold)


if __name__ == "__main__":
    main()
