"""Time to the first token of new prompts, which nothing is reused for.

Warmline's pair and `mlx_lm.server` in turn, on models with random weights.  Each prompt is new, and the pair has saved
the one before when the next is sent.  The ratio is the median of the rounds' ratios: the machine's speed changes.

Usage: PYTHONPATH=benchmarks .venv/bin/python benchmarks/serving/cold.py [--model PATH] [--tokens 2048 ...] [--rounds 5]
"""

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path

from common.results import format_quartiles, make_parser, print_results, write_json
from common.servers import make_conversation, request_completion, tiny_models
from common.sides import run_both

HEADINGS = ("new prompt", "Warmline", "mlx_lm.server", "Warmline / mlx_lm.server, by round")
PROMPTS = {("bench", 2_048): 9, ("llama", 24_000): 5}  # rounds by model and length

Seconds = dict[str, list[float]]  # one a round, by server


def list_prompts(options: argparse.Namespace) -> dict[tuple[str, int], int]:
    if options.quick:
        return {("llama", 1_024): 1}
    if options.tokens or options.model:
        return {("bench", tokens): options.rounds or 5 for tokens in options.tokens or [2_048]}
    return {key: options.rounds or rounds for key, rounds in PROMPTS.items()}


def measure(model: Path, folder: Path, tokens: int, rounds: int, has_peer: bool) -> Seconds:
    seconds: Seconds = defaultdict(list)
    with run_both(model, folder, has_peer=has_peer) as sides:
        for number in range(rounds + 1):  # the first warms up
            for server in sides.take_turns(number):
                conversation = make_conversation(tokens, (server.name, number))
                ttft_s = request_completion(server, conversation, answer_tokens=1).ttft_s
                server.wait_until_saved()
                if number:
                    seconds[server.name].append(ttft_s)
    return seconds


def format_row(label: str, seconds: Seconds) -> list[str]:
    own, peer = seconds["Warmline"], seconds.get("mlx_lm.server", [])
    ratios = [mine / theirs for mine, theirs in zip(own, peer, strict=False)]
    shown = [format_quartiles(each, " s") if each else "" for each in (own, peer)]
    return [label, *shown, format_quartiles(ratios) if ratios else ""]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", help="prompt lengths, with the larger model or your own")
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args()
    rows, measured = [], {}
    with tempfile.TemporaryDirectory(prefix="warmline-bench-") as name:
        for (family, tokens), rounds in list_prompts(options).items():
            folder = Path(name, f"{family} {tokens}")
            folder.mkdir()
            model = options.model or tiny_models.build(family, folder / "model")
            seconds = measure(model, folder, tokens, rounds, not options.no_peer)
            shape = options.model or f"{tiny_models.FAMILIES[family]['num_hidden_layers']} layers"
            label = f"{tokens:,} tokens, {shape}"
            rows.append(format_row(label, seconds))
            measured[label] = seconds
            write_json(options.json, measured)
    print_results("Time to the first token of new prompts", HEADINGS, rows, "Medians, with quartiles.")


if __name__ == "__main__":
    main()
