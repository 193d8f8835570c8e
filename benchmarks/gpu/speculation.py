"""Tokens a second with drafts and without, of texts that repeat and of prose, at one request and at several.

A model of a real shape has random weights; its answers are made to follow given texts (drafts/scripted.py), so what is
drafted and accepted is the text's, and the work of each pass the device's.  Both sides take turns.  Decoding alone is
timed: from the first token of the last request to begin to the end of the first to end.

Usage: PYTHONPATH=benchmarks:tests .venv/bin/python benchmarks/gpu/speculation.py TOKENIZER-FOLDER
           [--shape 8b|experts|small] [--clients 1,4] [--rounds 3] [--tokens 400] [--kinds rewrite,edits,prose]
"""

import argparse
import statistics
import time
from pathlib import Path

import mlx.core as mx
from common.results import format_table
from drafts.models import SHAPES, make_served_model
from drafts.scripted import scripted_answers
from drafts.tasks import KINDS, Task, make_tasks

from support.backend.engine_driver import EventLog, SchedulerDriver
from warmline_backend.engine.pass_costs import measure_seconds
from warmline_backend.generation.events import TokenEvent
from warmline_backend.model.model import ServedModel
from warmline_backend.speculation.pass_costs import PassCosts
from warmline_backend.speculation.speculation import Speculation

BUDGET_BYTES = 1 << 35


class Side:
    """Runs of one scheduler, with drafts or without."""

    def __init__(self, served: ServedModel, costs: PassCosts | None) -> None:
        self._driver = SchedulerDriver(
            served, budget=BUDGET_BYTES, keeps=False, speculation=None if costs is None else Speculation(costs)
        )

    def run(self, tasks: list[Task], tokens: int) -> tuple[float, float]:
        """Tokens a second while all of these decode, and tokens a pass of the first one."""
        texts = {seed: task.answer for seed, task in enumerate(tasks)}
        with scripted_answers(texts):
            logs = [
                self._driver.submit(task.prompt, min(tokens, len(task.answer)), temperature=1.0, seed=seed)[1]
                for seed, task in enumerate(tasks)
            ]
            self._driver.run_until(lambda: all(_count_tokens(log) > 0 for log in logs))
            began, before = time.perf_counter(), sum(map(_count_tokens, logs))
            self._driver.run_until(lambda: any(log.is_ended for log in logs))
            seconds, count = time.perf_counter() - began, sum(map(_count_tokens, logs)) - before
            self._driver.run_until(lambda: all(log.is_ended for log in logs))
        for log, task in zip(logs, tasks, strict=True):
            said = [event.token for event in log.events if isinstance(event, TokenEvent)]
            assert said == task.answer[: len(said)], "the answer is not the text"
        timings = logs[0].result.timings
        return count / seconds, timings.decoded / timings.passes


def _count_tokens(log: EventLog) -> int:
    return sum(isinstance(event, TokenEvent) for event in log.events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--clients", default="1,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--kinds", default=",".join(KINDS))
    options = parser.parse_args()
    served = make_served_model(options.shape, options.tokenizer)
    device = mx.device_info().get("device_name", "CPU")
    print(f"{options.shape}: {served.weight_bytes / 1e9:.1f} GB of weights on {device}")
    measure_seconds(served)  # kernels are compiled
    costs = dict(measure_seconds(served))
    widths = ", ".join(f"{width}: {seconds * 1e3:.2f}" for width, seconds in costs.items())
    print(f"ms a pass by width: {widths}", flush=True)
    rows = []
    for kind in options.kinds.split(","):
        for clients in map(int, options.clients.split(",")):
            tasks = make_tasks(lambda text: served.tokenizer.encode(text, add_special_tokens=False), kind, clients)
            rows.append([kind, str(clients), *compare(served, PassCosts(costs), tasks, options.rounds, options.tokens)])
            print(" ".join(rows[-1]), flush=True)
    headings = ["text", "requests", "off, tokens/s", "auto, tokens/s", "ratio", "of the rounds", "tokens a pass"]
    print(format_table(headings, rows))


def compare(served: ServedModel, costs: PassCosts, tasks: list[Task], rounds: int, tokens: int) -> list[str]:
    """Cells of one row; the first round warms up.  Each side begins without what it learned in the round before."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    tokens_a_pass: list[float] = []
    for turn in range(rounds + 1):
        for drafts in (False, True) if turn % 2 else (True, False):
            speed, each = Side(served, costs if drafts else None).run(tasks, tokens)
            mx.clear_cache()
            if turn:
                speeds[drafts].append(speed)
            if turn and drafts:
                tokens_a_pass.append(each)
    off, on = (statistics.median(speeds[drafts]) for drafts in (False, True))
    ratios = [on_speed / off_speed for off_speed, on_speed in zip(speeds[False], speeds[True], strict=True)]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return [f"{off:.0f}", f"{on:.0f}", f"{on / off:.2f}", spread, f"{statistics.median(tokens_a_pass):.2f}"]


if __name__ == "__main__":
    main()
