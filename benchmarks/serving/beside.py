"""The cost of a long prefill to other requests: a running stream and small requests, beside it and without it.

Warmline's pair and `mlx_lm.server` do the same work in turn, on a small model with random weights (8 layers, 256 wide)
or one of your own:

  alone     a stream of `--answer` tokens, and small requests one after the other
  beside    the same while one long prompt prefills that takes about `--long-s` seconds

Usage: PYTHONPATH=benchmarks .venv/bin/python benchmarks/serving/beside.py [--long-s 10] [--model FOLDER] [--tokens N]
"""

import argparse
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.results import format_quartiles, make_parser, print_results, write_json
from common.servers import (
    BenchServer,
    find_prompt_tokens,
    make_conversation,
    make_text,
    open_connection,
    read_events,
    request_completion,
    send_completion,
    tiny_models,
)
from common.sides import run_both

SMALL_PROMPT_TOKENS, SMALL_ANSWER_TOKENS = 40, 16
STREAM_TOKENS_ALONE = 100
STREAM_TOKENS_BESIDE = 20_000
SMALL_REQUESTS_ALONE = 20
HEADINGS = (
    "",
    "stream alone",
    "stream beside",
    "small alone",
    "small beside",
    "slowest 1 %",
    "n",
    "prefill alone",
    "prefill beside",
)


@dataclass
class TimedStream:
    """One answer, read as it comes, with the time.perf_counter() of each piece: a token, or a few where one alone is no
    text.
    """

    arrival_times: list[float] = field(default_factory=list)

    def read(self, server: BenchServer, tokens: int, stop: threading.Event) -> None:
        connection = open_connection(server)
        messages = [{"role": "user", "content": make_text(SMALL_PROMPT_TOKENS, ("stream", time.time()))}]
        send_completion(server, connection, messages, tokens)
        for chunk in read_events(connection.getresponse()):
            self.arrival_times += [time.perf_counter() for choice in chunk.get("choices") or () if choice.get("delta")]
            if stop.is_set():
                break
        connection.close()

    def tokens_per_s(self, since: float = 0.0, until: float = math.inf) -> float:
        within = [at for at in self.arrival_times if since <= at <= until]
        seconds = min(until, within[-1]) - max(since, within[0]) if len(within) > 1 else math.inf
        return (len(within) - 1) / seconds if seconds else math.nan


@dataclass(frozen=True)
class BesideMeasurement:
    stream_alone: float  # tokens/s
    stream_beside: float
    small_alone: list[float]  # seconds for a whole small answer
    small_beside: list[float]
    prefill_alone_s: float
    prefill_beside_s: float


def time_small_request(server: BenchServer, seed: object) -> float:
    question = [{"role": "user", "content": make_text(SMALL_PROMPT_TOKENS, (server.name, seed))}]
    return request_completion(server, question, SMALL_ANSWER_TOKENS).total_s


def measure_server(server: BenchServer, tokens: int, seed: object) -> BesideMeasurement:
    alone = TimedStream()
    alone.read(server, STREAM_TOKENS_ALONE, threading.Event())
    small_alone = [time_small_request(server, (seed, number)) for number in range(SMALL_REQUESTS_ALONE)]
    prefill_alone_s = request_completion(server, make_conversation(tokens, (server.name, seed, "alone")), 1).ttft_s
    server.wait_until_saved()

    stream, over = TimedStream(), threading.Event()
    streaming = threading.Thread(target=stream.read, args=(server, STREAM_TOKENS_BESIDE, over))
    streaming.start()
    while not stream.arrival_times:
        time.sleep(0.01)
    began, ended = time.perf_counter(), math.nan
    prefilled = threading.Event()

    def prefill() -> None:
        nonlocal ended
        try:
            request_completion(server, make_conversation(tokens, (server.name, seed, "beside")), 1)
            ended = time.perf_counter()
        finally:
            prefilled.set()

    threading.Thread(target=prefill).start()
    small_beside: list[float] = []
    while not prefilled.is_set():
        small_beside.append(time_small_request(server, (seed, "beside", len(small_beside))))
    over.set()
    streaming.join()
    return BesideMeasurement(
        alone.tokens_per_s(),
        stream.tokens_per_s(began, ended),
        small_alone,
        small_beside,
        prefill_alone_s,
        ended - began,
    )


def percentile(values: Sequence[float], share: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1] if len(values) > 1 else values[0]


def format_row(name: str, rounds: Sequence[BesideMeasurement]) -> list[str]:
    small = [seconds for each in rounds for seconds in each.small_beside]
    alone = [seconds for each in rounds for seconds in each.small_alone]
    return [
        name,
        format_quartiles([each.stream_alone for each in rounds], " tok/s", digits=1),
        format_quartiles([each.stream_beside for each in rounds], " tok/s", digits=1),
        format_quartiles(alone, " s"),
        format_quartiles(small, " s"),
        f"{percentile(small, 99):.2f} s",
        str(len(small)),
        format_quartiles([each.prefill_alone_s for each in rounds], " s", digits=1),
        format_quartiles([each.prefill_beside_s for each in rounds], " s", digits=1),
    ]


def run(options: argparse.Namespace) -> None:
    measured: dict[str, list[BesideMeasurement]] = {}
    with tempfile.TemporaryDirectory(prefix="warmline-bench-") as name:
        folder = Path(name)
        model = options.model or tiny_models.build("bench", folder / "model")
        with run_both(model, folder, has_peer=not options.no_peer) as sides:
            tokens = options.tokens or find_prompt_tokens(sides.pair, options.long_s)
            sides.pair.wait_until_saved()
            for repeat in range(options.repeats):
                for server in sides.take_turns(repeat):
                    measured.setdefault(server.name, []).append(measure_server(server, tokens, repeat))
                    server.wait_until_saved()
    write_json(
        options.json, {"tokens": tokens, **{side: [vars(each) for each in all_] for side, all_ in measured.items()}}
    )
    rows = [format_row(side, measured[side]) for side in sorted(measured)]
    print_results(f"Beside one prefill of {tokens:,} tokens, {options.repeats} times", HEADINGS, rows, "Medians.")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--long-s", type=float, default=10.0, help="how long the prefill is to take (default: 10)")
    parser.add_argument("--tokens", type=int, default=0, help="prompt length, instead of calibrating")
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    if options.quick:
        options.tokens = 1024
    run(options)


if __name__ == "__main__":
    main()
