"""The cost of a restart: time to the first token cold, in session and after kill -9, beside mlx_lm.server.

Warmline's pair and `mlx_lm.server` take turns with conversations of the same length, on small models with random
weights: 8 layers, 256 wide, for prompts of 2,048 and 8,192 tokens, and 2 layers, 64 wide, for 32,768, which the larger
one would prefill for minutes on a CPU.

  cold             a first turn with a long system prompt that the server has never seen
  next turn        the next turn of that conversation
  after kill -9    the turn after that, when every process was killed with -9 and started again

Usage: PYTHONPATH=benchmarks .venv/bin/python benchmarks/serving/restart.py [--quick] [--model FOLDER --tokens 8000]
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common.results import format_quartiles, make_parser, print_results, write_json
from common.servers import (
    BenchServer,
    TimedAnswer,
    make_conversation,
    median,
    request_completion,
    tiny_models,
)
from common.sides import make_next_turn, run_both

CONVERSATIONS = {("bench", 2048): 3, ("bench", 8192): 1, ("llama", 32768): 1}  # of each side
HEADINGS = ("", "cold", "next turn", "after kill -9", "cold / after kill -9", "reused after it")


@dataclass
class RestartAnswers:
    """One conversation on one server."""

    cold: TimedAnswer
    next_turn: TimedAnswer
    after_restart: TimedAnswer

    def list_figures(self) -> dict[str, dict[str, float]]:
        return {name: answer.list_figures() for name, answer in vars(self).items()}


Measured = dict[str, list[RestartAnswers]]


def run_turns(server: BenchServer, tokens: int, seed: object) -> RestartAnswers:
    first = make_conversation(tokens, seed)
    cold = request_completion(server, first)
    second = make_next_turn(first, cold.text, "And what is second?")
    next_turn = request_completion(server, second)
    server.wait_until_saved()
    server.kill_and_start()
    third = make_next_turn(second, next_turn.text, "And what is third?")
    return RestartAnswers(cold, next_turn, request_completion(server, third))


def measure_conversations(model: Path, folder: Path, tokens: int, repeats: int, has_peer: bool) -> Measured:
    measured: Measured = {}
    with run_both(model, folder, has_peer=has_peer) as sides:
        for repeat in range(repeats):
            for server in sides.take_turns(repeat):
                measured.setdefault(server.name, []).append(run_turns(server, tokens, repeat))
    return dict(sorted(measured.items()))


def format_rows(label: str, measured: Measured) -> list[list[str]]:
    rows = []
    for name, conversations in measured.items():
        cold, next_turn, after = (
            [getattr(each, when).ttft_s for each in conversations] for when in ("cold", "next_turn", "after_restart")
        )
        last = conversations[-1].after_restart
        rows.append(
            [
                f"{label}, {name}, n = {len(conversations)}",
                *(format_quartiles(values, " s") for values in (cold, next_turn, after)),
                f"{median(cold) / median(after):.1f}",
                f"{last.cached_tokens:,} of {last.prompt_tokens:,}",
            ]
        )
    return rows


def list_conversations(options: argparse.Namespace) -> dict[tuple[str, int], int]:
    """Conversations of each side, by model and prompt length."""
    if options.quick:
        return {("llama", tokens): 1 for tokens in options.tokens or [1024]}
    if options.tokens or options.model:
        return {("bench", tokens): options.repeats or 3 for tokens in options.tokens or [8192]}
    return {key: options.repeats or count for key, count in CONVERSATIONS.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", help="prompt lengths, with the larger model or your own")
    parser.add_argument("--repeats", type=int, default=0, help="conversations of each side and length")
    options = parser.parse_args()
    rows, measured = [], {}
    with tempfile.TemporaryDirectory(prefix="warmline-bench-") as name:
        for (family, tokens), repeats in list_conversations(options).items():
            folder = Path(name, f"{family} {tokens}")
            folder.mkdir()
            model = options.model or tiny_models.build(family, folder / "model")
            found = measure_conversations(model, folder, tokens, repeats, not options.no_peer)
            shape = options.model or f"{tiny_models.FAMILIES[family]['num_hidden_layers']} layers"
            rows += format_rows(f"{tokens:,} tokens, {shape}", found)
            measured[f"{shape}, {tokens} tokens"] = {
                side: [each.list_figures() for each in all_] for side, all_ in found.items()
            }
            write_json(options.json, measured)
    print_results("Time to the first token, and a restart", HEADINGS, rows, "Medians, with quartiles.")


if __name__ == "__main__":
    main()
