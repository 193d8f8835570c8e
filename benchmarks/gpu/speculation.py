"""Tokens a second with drafts and without, of texts that repeat and of prose, at one request and at several.

A model of a real shape has random weights; its answers are made to follow given texts (drafts/scripted.py), so what is
drafted and accepted is the text's, and the work of each pass the device's.  Decoding alone is timed: all prompts but
their last tokens are computed before; from the moment when each request has its first token to the end of the last one,
where all answers are equally long.  The sides take turns: off, auto, off again.  A ratio compares auto with the two
beside it; the same of the second off to the first one shows how much the machine varies.

With --draft-model, the same model with a draft model of about half a billion parameters is timed, too.  With --peer,
mlx_lm's own drafts by such a model (drafts/peer.py): three tokens a pass.  They are timed at one request: where it
drafts, mlx_lm.server answers one after the other, so several get the same tokens a second together.  How often the
draft model is right is given, since random weights are right at nothing: 0.8 says four tokens of five, 1 all of them,
the most that it can gain.

Usage: PYTHONPATH=tests:backend:launchd:benchmarks .venv/bin/python benchmarks/gpu/speculation.py TOKENIZER-FOLDER
           [--shape 8b|experts|small] [--clients 1,4] [--rounds 3] [--warm-up 1] [--tokens 400]
           [--kinds rewrite,edits,prose] [--peer] [--draft-model] [--agreement 0.8,1] [--draft-model-shape 0.5b]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from common.results import format_table
from drafts.models import DRAFT_SHAPES, SHAPES, add_draft_model, make_random_model, make_served_model
from drafts.peer import measure_peer
from drafts.scripted import ScriptedModelDrafter, scripted_answers
from drafts.tasks import KINDS, Task, make_tasks

from support.backend.engine_driver import SchedulerDriver
from warmline_backend.engine.pass_costs import make_pass_costs, measure_draft_step, measure_seconds
from warmline_backend.model.cuda_graphs import set_graph_defaults
from warmline_backend.model.model import ServedModel
from warmline_backend.speculation.pass_costs import PassCosts
from warmline_backend.speculation.speculation import Speculation

BUDGET_BYTES = 1 << 35
OFF_AGAIN = "off again"


class Side:
    """Runs of one scheduler, with drafts or without."""

    def __init__(self, served: ServedModel, speculation: Speculation | None) -> None:
        self._driver = SchedulerDriver(served, budget=BUDGET_BYTES, speculation=speculation)

    def run(self, tasks: list[Task], tokens: int) -> tuple[float, float]:
        """Tokens a second while all of these decode, and tokens a pass of the first one."""
        texts = {seed: task.answer for seed, task in enumerate(tasks)}
        with scripted_answers(texts):
            residents = [self._prefill(task.prompt, seed) for seed, task in enumerate(tasks)]
            logs = [
                self._driver.submit(
                    task.prompt, tokens, temperature=1.0, seed=seed, resident=resident, reuse=len(task.prompt) - 1
                )[1]
                for seed, (task, resident) in enumerate(zip(tasks, residents, strict=True))
            ]
            self._driver.run_until(lambda: all(log.tokens for log in logs))
            began, before = time.perf_counter(), sum(len(log.tokens) for log in logs)
            self._driver.run_until(lambda: all(log.is_ended for log in logs))
            seconds = time.perf_counter() - began
        for log, task in zip(logs, tasks, strict=True):
            assert log.tokens == task.answer[:tokens], "the answer is not the text"
        timings = logs[0].result.timings
        return (tokens * len(tasks) - before) / seconds, timings.decoded / timings.passes

    def _prefill(self, prompt: list[int], seed: int) -> str:
        """Compute a prompt; returns the resident that holds it."""
        return self._driver.run(prompt, 1, temperature=1.0, seed=seed).result.resident


def measure_speed(served: ServedModel, speculation: Speculation | None, tasks: list[Task], tokens: int) -> float:
    """Tokens a second of a new scheduler."""
    return Side(served, speculation).run(tasks, tokens)[0]


@dataclass
class Sides:
    """Sides of a comparison, and the speeds of each by its heading."""

    served: ServedModel
    drafted: ServedModel | None  # with a draft model
    peer_model: nn.Module | None  # the peer's draft model
    agreements: list[float]
    speeds: dict[str, list[float]] = field(default_factory=dict)
    tokens_a_pass: list[float] = field(default_factory=list)

    @property
    def headings(self) -> list[str]:
        ours = ["text", "requests", "off, tokens/s", "auto, tokens/s", "ratio", "of the rounds", "off to off"]
        ours.append("tokens a pass")
        return [*ours, *self._more_names]

    @property
    def _more_names(self) -> list[str]:
        names = [_name_drafted(agreement) for agreement in self.agreements if self.drafted is not None]
        return names + [_name_peer(agreement) for agreement in self.agreements if self.peer_model is not None]

    def compare(self, costs: PassCosts, tasks: list[Task], rounds: int, warm_up: int, tokens: int) -> list[str]:
        """Cells of one row, without the first rounds.  As in a server, what is learned stays for the rounds after."""
        tokens = min(tokens, *(len(task.answer) for task in tasks))
        sides: dict[str, Callable[[], float]] = {
            "off": partial(measure_speed, self.served, None, tasks, tokens),
            "auto": partial(self._run_auto, Speculation(costs), tasks, tokens),
            OFF_AGAIN: partial(measure_speed, self.served, None, tasks, tokens),
        }
        for agreement in self.agreements:
            if self.drafted is not None:
                drafting = _make_drafted_speculation(self.drafted, costs, tasks, agreement)
                sides[_name_drafted(agreement)] = partial(measure_speed, self.drafted, drafting, tasks, tokens)
            if self.peer_model is not None and len(tasks) == 1:
                measure = partial(measure_peer, self.served.model, self.peer_model, tasks, tokens, agreement)
                sides[_name_peer(agreement)] = measure
        self.speeds = {name: [] for name in sides}
        for turn in range(warm_up + rounds):
            if turn == warm_up:
                self.tokens_a_pass.clear()
            for name, measure in sides.items():
                speed = measure()
                mx.clear_cache()
                if turn >= warm_up:
                    self.speeds[name].append(speed)
                print(f"    {'round' if turn >= warm_up else 'warm-up'} {turn}, {name}: {speed:.0f}", flush=True)
        return self._format_cells()

    def _run_auto(self, speculation: Speculation, tasks: list[Task], tokens: int) -> float:
        speed, each = Side(self.served, speculation).run(tasks, tokens)
        self.tokens_a_pass.append(each)
        return speed

    def _format_cells(self) -> list[str]:
        medians = {name: statistics.median(speeds) for name, speeds in self.speeds.items()}
        rounds = list(zip(self.speeds["off"], self.speeds["auto"], self.speeds[OFF_AGAIN], strict=True))
        ratios = [auto / statistics.mean([before, after]) for before, auto, after in rounds]
        control = [after / before for before, _, after in rounds]
        off = statistics.median([*self.speeds["off"], *self.speeds[OFF_AGAIN]])
        cells = [f"{off:.0f}", f"{medians['auto']:.0f}", f"{statistics.median(ratios):.2f}", _format_range(ratios)]
        cells += [_format_range(control), f"{statistics.median(self.tokens_a_pass):.2f}"]
        return [*cells, *(f"{medians[name]:.0f}" if name in medians else "" for name in self._more_names)]


def _make_drafted_speculation(
    drafted: ServedModel, costs: PassCosts, tasks: list[Task], agreement: float
) -> Speculation:
    assert drafted.draft is not None
    drafter = ScriptedModelDrafter(drafted.draft, drafted.vocabulary_size, agreement)
    drafter.texts = [[*task.prompt, *task.answer] for task in tasks]
    return Speculation(costs, drafter)


def _format_range(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _name_drafted(agreement: float) -> str:
    return f"draft model, {agreement:.0%} right, tokens/s"


def _name_peer(agreement: float) -> str:
    return f"mlx_lm drafts, {agreement:.0%} right, tokens/s"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--shape", choices=DRAFT_SHAPES, default="8b")
    parser.add_argument("--clients", default="1,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that are not counted: they compile kernels")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--peer", action="store_true", help="mlx_lm's drafts by a draft model, too")
    parser.add_argument("--draft-model", action="store_true", help="our drafts by a draft model, too")
    parser.add_argument("--agreement", default="0.8,1", help="how often a draft model is right, a column each")
    parser.add_argument("--draft-model-shape", choices=SHAPES, help="of the draft model; by default by --shape")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    set_graph_defaults()
    served = make_served_model(options.shape, options.tokenizer)
    draft_shape = options.draft_model_shape or DRAFT_SHAPES[options.shape]
    drafted = add_draft_model(served, draft_shape) if options.draft_model else None
    peer_model = make_random_model(draft_shape) if options.peer else None
    agreements = [float(share) for share in options.agreement.split(",")]
    device = mx.device_info().get("device_name", "CPU")
    print(f"{options.shape}: {served.weight_bytes / 1e9:.1f} GB of weights on {device}")
    measure_seconds(served)  # kernels are compiled
    pairs = measure_seconds(served)
    widths = ", ".join(f"{width}: {seconds * 1e3:.2f}" for width, seconds in pairs)
    draft_step_s = measure_draft_step(drafted, drafted.draft) if drafted is not None and drafted.draft else 0.0
    print(f"ms a pass by width: {widths}; ms a token of the draft model: {draft_step_s * 1e3:.2f}", flush=True)
    costs = make_pass_costs(pairs, draft_step_s)
    sides, rows = Sides(served, drafted, peer_model, agreements), []
    for kind in options.kinds.split(","):
        for clients in map(int, options.clients.split(",")):
            tasks = make_tasks(lambda text: served.tokenizer.encode(text, add_special_tokens=False), kind, clients)
            cells = sides.compare(costs, tasks, options.rounds, options.warm_up, options.tokens)
            rows.append([kind, str(clients), *cells])
            print(" | ".join(rows[-1]), flush=True)
    print(format_table(sides.headings, rows))


if __name__ == "__main__":
    main()
