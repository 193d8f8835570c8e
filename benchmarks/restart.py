"""What a restart costs: time to the first token cold, in session and after kill -9, beside mlx_lm.server.

Builds a small model with random weights (8 layers, 256 wide), finds the prompt length whose cold prefill takes
`--cold-s` seconds on this machine, and lets Warmline's pair and `mlx_lm.server` do the same work, one after the other:

  cold            a first turn with a long system prompt that the server has never seen
  in session      the next turn of that conversation
  after restart   the turn after that, when every process was killed with -9 and started again

Then it compares small requests through the proxy with the same sent to the backend directly, in turn.

Usage: .venv/bin/python benchmarks/restart.py [--quick]
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.servers import (
    BenchServer,
    Message,
    TimedAnswer,
    find_prompt_tokens,
    format_blas,
    make_conversation,
    make_text,
    median,
    request_completion,
    run_mlx_lm_server,
    run_warmline,
    tiny_models,
)
from rich.console import Console
from rich.table import Table


@dataclass
class RestartAnswers:
    """One conversation on one server."""

    cold: TimedAnswer
    in_session: TimedAnswer
    after_restart: TimedAnswer


def make_next_turn(messages: Sequence[Message], answer: TimedAnswer, question: str) -> list[Message]:
    return [*messages, {"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]


def run_turns(server: BenchServer, tokens: int, seed: object) -> RestartAnswers:
    first = make_conversation(tokens, seed)
    cold = request_completion(server, first)
    second = make_next_turn(first, cold, "And what is second?")
    in_session = request_completion(server, second)
    server.wait_until_saved()
    server.kill_and_start()
    third = make_next_turn(second, in_session, "And what is third?")
    return RestartAnswers(cold, in_session, request_completion(server, third))


def time_small_requests(servers: Sequence[BenchServer], count: int) -> dict[str, list[float]]:
    """TTFT of short, never-seen prompts, each server in turn so that all meet the same machine."""
    measured: dict[str, list[float]] = {server.name: [] for server in servers}
    for i in range(-3, count):  # three to warm up
        order = list(servers) if i % 2 else list(reversed(servers))
        for server in order:
            answer = request_completion(server, [{"role": "user", "content": make_text(40, (server.name, i))}], 4)
            server.wait_until_saved()
            if i >= 0:
                measured[server.name].append(answer.ttft_s)
    return measured


def render_turns_table(measured: dict[str, list[RestartAnswers]], tokens: int) -> Table:
    repeats = len(next(iter(measured.values())))
    table = Table(title=f"Time to first token, prompt of {tokens:,} tokens, median of {repeats}")
    for heading in (
        "",
        "cold",
        "in session",
        "after kill -9",
        "cold / after kill -9",
        "cached tokens in session",
        "after",
    ):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, all_turns in measured.items():
        cold, session, restart = (
            median([getattr(each, when).ttft_s for each in all_turns])
            for when in ("cold", "in_session", "after_restart")
        )
        last = all_turns[-1]
        table.add_row(
            name,
            *(f"{seconds:.3f} s" for seconds in (cold, session, restart)),
            f"{cold / restart:.1f}x",
            *(f"{each.cached_tokens:,} of {each.prompt_tokens:,}" for each in (last.in_session, last.after_restart)),
        )
    return table


def render_small_table(measured: dict[str, list[float]]) -> Table:
    count = len(next(iter(measured.values())))
    table = Table(title=f"Small request, time to first token, {count} each, in turn")
    for heading in ("", "median", "25% to 75%", "slowest"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, values in measured.items():
        low, _, high = statistics.quantiles(values, n=4)
        table.add_row(
            name,
            f"{median(values) * 1e3:.1f} ms",
            f"{low * 1e3:.1f} to {high * 1e3:.1f} ms",
            f"{max(values) * 1e3:.1f} ms",
        )
    return table


def format_added_latency(through: Sequence[float], direct: Sequence[float]) -> str:
    """Both are in the order of measuring, so what disturbs the machine for a while disturbs both of a pair."""
    medians_ms = (median(through) - median(direct)) * 1e3
    paired_ms = median([a - b for a, b in zip(through, direct, strict=True)]) * 1e3
    return f"Through the proxy: {medians_ms:+.1f} ms between the medians, {paired_ms:+.1f} ms in the median pair."


def run(options: argparse.Namespace, console: Console) -> None:
    with tempfile.TemporaryDirectory(prefix="warmline-bench-") as folder:
        place = Path(folder)
        logs = options.logs or place
        logs.mkdir(parents=True, exist_ok=True)
        model = options.model or tiny_models.build("bench", place / "model")
        measured: dict[str, list[RestartAnswers]] = {}
        what = options.model or "llama, 8 layers, 256 wide, float32"
        console.print(f"{format_blas()}\n{os.cpu_count()} cores; {what}")
        with run_warmline(model, place / "home", logs / "warmline.log") as (pair, direct):
            tokens = options.tokens or find_prompt_tokens(pair, options.cold_s)
            pair.wait_until_saved()
            measured[pair.name] = [run_turns(pair, tokens, repeat) for repeat in range(options.repeats)]
            pair.wait_until_saved()
            small = time_small_requests([pair, direct], options.small)
        if not options.no_peer:
            with run_mlx_lm_server(model, logs / "mlx_lm.log") as peer:
                measured[peer.name] = [run_turns(peer, tokens, repeat) for repeat in range(options.repeats)]
                small |= time_small_requests([peer], options.small)
        console.print(render_turns_table(measured, tokens))
        console.print(render_small_table(small))
        console.print(format_added_latency(small[pair.name], small[direct.name]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a 3 s prefill, once: whether it works, not how fast")
    parser.add_argument("--model", type=Path, help="a model of your own, instead of the small one")
    parser.add_argument("--cold-s", type=float, default=30.0, help="how long the cold prefill is to take (default: 30)")
    parser.add_argument("--tokens", type=int, default=0, help="prompt length, instead of calibrating")
    parser.add_argument("--repeats", type=int, default=3, help="conversations a server (default: 3)")
    parser.add_argument("--small", type=int, default=40, help="small requests a server (default: 40)")
    parser.add_argument("--no-peer", action="store_true", help="leave out mlx_lm.server")
    parser.add_argument("--logs", type=Path, help="keep the servers' output in this folder")
    options = parser.parse_args()
    if options.quick:
        options.cold_s, options.repeats = 3.0, 1
    run(options, Console(width=140))


if __name__ == "__main__":
    main()
