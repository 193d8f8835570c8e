"""Warmline's pair and mlx_lm.server on one GPU, in turn, with a model of an 8B llama's shape.

Makes the model with random bfloat16 weights, once, and starts both sides.  The parts:

  concurrency  1, 4 and 8 clients at once, new prompts of 700 tokens, answers of 160
  turn         a turn of 40 new tokens on a conversation of `--tokens` tokens in memory
  cold         new prompts of 2,048 and of `--tokens` tokens
  save         a stream beside the save of a prompt of `--tokens` tokens, and the rate of the save; the pair alone
  restart      a turn after kill -9 of the pair, against a plain read of the same bytes and the turn in session

Each part prints its table as soon as it has ended, and `--json` has all parts so far.  All parts take about eight
minutes on an H200; where one command may not take that long, name some of them with `--parts`.

Usage: PYTHONPATH=benchmarks .venv/bin/python benchmarks/gpu/side_by_side.py [--parts concurrency,turn] [--json FILE]
"""

import argparse
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.large_models import build_model_once
from common.results import format_quartiles, print_results, write_json
from common.servers import (
    BenchServer,
    get_status,
    make_conversation,
    make_text,
    median,
    request_completion,
    wait_until,
)
from common.sides import Sides, make_next_turn, request_together, run_both
from serving import restore
from serving.beside import TimedStream

from support.metrics_text import MetricsText

PROMPT_TOKENS, ANSWER_TOKENS = 700, 160
TURN_TOKENS = 40
COLD_TOKENS = 2048
STREAM_TOKENS = 20_000  # more than it decodes before it is stopped
STREAM_ALONE_TOKENS = 200
PEER = "mlx_lm.server"

Values = dict[str, list[float]]  # by server


@dataclass
class Run:
    sides: Sides
    tokens: int
    repeats: int
    figures: dict[str, Any] = field(default_factory=dict)  # by part

    def measure_in_turn(self, measure: Callable[[BenchServer, int], float]) -> Values:
        """One value a repeat and side; the first of each warms up and is not kept."""
        values: Values = defaultdict(list)
        for number in range(self.repeats + 1):
            for server in self.sides.take_turns(number):
                value = measure(server, number)
                if number:
                    values[server.name].append(value)
        return values


def format_sides(label: str, values: Values, unit: str, digits: int = 3) -> list[str]:
    own, peer = values["Warmline"], values.get(PEER, [])
    ratio = f"{median(own) / median(peer):.2f}" if peer else ""
    shown = [format_quartiles(each, unit, digits=digits) if each else "" for each in (own, peer)]
    return [label, *shown, ratio]


def print_sides(title: str, rows: list[list[str]]) -> None:
    print_results(title, ("", "Warmline", PEER, "Warmline / mlx_lm.server"), rows, "Medians, with quartiles.")


def measure_concurrency(run: Run) -> None:
    rows, figures = [], {}
    for clients in (1, 4, 8):
        ttfts: Values = defaultdict(list)

        def measure(server: BenchServer, number: int, clients: int = clients, ttfts: Values = ttfts) -> float:
            seeds = [(server.name, clients, number, client) for client in range(clients)]
            prompts = [[{"role": "user", "content": make_text(PROMPT_TOKENS, seed)}] for seed in seeds]
            began = time.perf_counter()
            answers = request_together(server, prompts, ANSWER_TOKENS)
            wall_s = time.perf_counter() - began
            if number:
                ttfts[server.name] += [answer.ttft_s for answer in answers]
            server.wait_until_saved()
            return clients * ANSWER_TOKENS / wall_s

        rates = run.measure_in_turn(measure)
        rows.append(format_sides(f"{clients} at once, tokens/s", rates, "", 0))
        rows.append(format_sides(f"{clients} at once, first token", ttfts, " s"))
        figures[clients] = {"tokens_per_s": rates, "ttft_s": ttfts}
    run.figures["concurrency"] = figures
    print_sides(f"Prompts of {PROMPT_TOKENS} tokens, answers of {ANSWER_TOKENS}", rows)


def measure_turn(run: Run) -> None:
    conversations = {}
    for server in run.sides.take_turns(0):
        messages = make_conversation(run.tokens, (server.name, "turn"))
        conversations[server.name] = make_next_turn(messages, request_completion(server, messages).text, "Go on.")
        server.wait_until_saved()

    def measure(server: BenchServer, number: int) -> float:
        messages = conversations[server.name]
        answer = request_completion(server, messages)
        question = make_text(TURN_TOKENS, (server.name, number))
        conversations[server.name] = make_next_turn(messages, answer.text, question)
        server.wait_until_saved()
        return answer.ttft_s

    values = run.measure_in_turn(measure)
    run.figures["turn"] = values
    print_sides(
        f"A turn of {TURN_TOKENS} new tokens on {run.tokens:,} in memory",
        [format_sides("first token", values, " s")],
    )


def measure_cold(run: Run) -> None:
    rows, figures = [], {}
    for tokens in (COLD_TOKENS, run.tokens):

        def measure(server: BenchServer, number: int, tokens: int = tokens) -> float:
            answer = request_completion(server, make_conversation(tokens, (server.name, "cold", tokens, number)), 1)
            server.wait_until_saved()
            return answer.ttft_s

        values = run.measure_in_turn(measure)
        rows.append(format_sides(f"{tokens:,} tokens, first token", values, " s"))
        figures[tokens] = values
    run.figures["cold"] = figures
    print_sides("Cold prompts", rows)


def read_saves(server: BenchServer) -> tuple[float, float]:
    """(bytes, seconds) of the backend's saves so far."""
    metrics = MetricsText(get_status(server.port, "/metrics", server.headers)[1].decode())
    return metrics.total("warmline_backend_save_bytes_total"), metrics.total("warmline_backend_save_seconds_sum")


def read_saved_tokens(pair: BenchServer) -> float:
    return MetricsText(get_status(pair.port, "/metrics")[1].decode()).total("warmline_saved_tokens_total")


def find_longest_pause_s(stream: TimedStream, since: float, until: float) -> float:
    within = [since, *(at for at in stream.arrival_times if since <= at <= until), until]
    return max(later - earlier for earlier, later in pairwise(within))


def measure_save(run: Run) -> None:
    """The part of the prompt that was not saved while it was computed is saved after the answer, beside the stream."""
    pair, direct = run.sides.pair, run.sides.direct
    before, saved_before = read_saves(direct), read_saved_tokens(pair)
    stream, over = TimedStream(), threading.Event()
    streaming = threading.Thread(target=stream.read, args=(pair, STREAM_TOKENS, over))
    streaming.start()
    while len(stream.arrival_times) < STREAM_ALONE_TOKENS and streaming.is_alive():
        time.sleep(0.01)
    alone_until = time.perf_counter()
    request_completion(pair, make_conversation(run.tokens, "save"), 1)
    answered = time.perf_counter()
    wait_until(lambda: read_saved_tokens(pair) - saved_before >= run.tokens, "the prompt is saved")  # not the stream
    saved = time.perf_counter()
    over.set()
    streaming.join()
    pair.wait_until_saved()
    size, seconds = (after - earlier for after, earlier in zip(read_saves(direct), before, strict=True))
    began = stream.arrival_times[0]
    figures: dict[str, Any] = {
        "bytes": size,
        "seconds": seconds,
        "tokens_per_s": {
            "alone": stream.tokens_per_s(began, alone_until),
            "while prefilling": stream.tokens_per_s(alone_until, answered),
            "while saving": stream.tokens_per_s(answered, saved),
        },
        "longest_pause_s": {
            "alone": find_longest_pause_s(stream, began, alone_until),
            "while saving": find_longest_pause_s(stream, answered, saved),
        },
    }
    run.figures["save"] = figures
    headings = ["saved", "rate", *(f"stream {when}" for when in figures["tokens_per_s"])]
    headings += [f"longest pause {when}" for when in figures["longest_pause_s"]]
    row = [f"{size / 1e9:.2f} GB", f"{size / 1e9 / seconds:.2f} GB/s"]
    row += [f"{rate:.1f} tok/s" for rate in figures["tokens_per_s"].values()]
    row += [f"{1e3 * pause_s:.0f} ms" for pause_s in figures["longest_pause_s"].values()]
    print_results(f"A stream beside the save of {run.tokens:,} tokens, Warmline", headings, [row], "Once.")


def measure_restart(run: Run) -> None:
    rounds = restore.measure(run.sides.pair, run.sides.home, run.tokens, run.repeats)
    run.figures["restart"] = [{**vars(each), "ratio": each.ratio} for each in rounds]
    title = f"Time to the first token after kill -9, {run.tokens:,} tokens, Warmline"
    print_results(title, restore.HEADINGS, [restore.format_row(rounds)], "Medians, with quartiles.")


PARTS = {
    "concurrency": measure_concurrency,
    "turn": measure_turn,
    "cold": measure_cold,
    "save": measure_save,
    "restart": measure_restart,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--tokens", type=int, default=24_000, help="of long prompts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", type=Path, default=Path.home() / "warmline-llama-8b", help="made on the first run")
    parser.add_argument("--no-peer", action="store_true", help="leave out mlx_lm.server")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value measured to this file")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := sorted({*parts} - {*PARTS}):
        parser.error(f"there is no part {', '.join(unknown)}")
    build_model_once("llama_8b", options.model)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.model.parent, prefix="warmline-bench-"))
        sides = stack.enter_context(run_both(options.model, Path(folder), has_peer=not options.no_peer))
        run = Run(sides, options.tokens, options.repeats)
        for part in (each for each in PARTS if each in parts):
            began = time.monotonic()
            PARTS[part](run)
            write_json(options.json, run.figures)
            print(f"{part} took {time.monotonic() - began:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
