"""What a long prefill costs everybody else: a running stream and small requests, beside it and without it.

Warmline's pair and `mlx_lm.server` do the same work, one after the other, on a small model with random weights (8
layers, 256 wide) or one of your own:

  alone     a stream of `--answer` tokens, and small requests one after the other
  beside    the same while one long prompt prefills that takes about `--long-s` seconds

Usage: .venv/bin/python benchmarks/beside.py [--long-s 30] [--model FOLDER] [--tokens N]
"""

import argparse
import json
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path

from common.servers import (
    REQUEST_TIMEOUT_S,
    BenchServer,
    find_prompt_tokens,
    format_blas,
    make_conversation,
    make_text,
    median,
    read_events,
    request_completion,
    run_mlx_lm_server,
    run_warmline,
    tiny_models,
)
from rich.console import Console
from rich.table import Table

SMALL_PROMPT_TOKENS, SMALL_ANSWER_TOKENS = 40, 16
STREAM_TOKENS_ALONE = 100
STREAM_TOKENS_BESIDE = 20_000
SMALL_REQUESTS_ALONE = 20


@dataclass
class TimedStream:
    """One answer, read as it comes; `came` has the time.perf_counter() of each piece, which is a token, or a few where
    one alone is no text.
    """

    arrival_times: list[float] = field(default_factory=list)

    def read(self, server: BenchServer, tokens: int, stop: threading.Event) -> None:
        body = {
            "model": "default_model",
            "messages": [{"role": "user", "content": make_text(SMALL_PROMPT_TOKENS, "stream")}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
        }
        connection = HTTPConnection("127.0.0.1", server.port, timeout=REQUEST_TIMEOUT_S)
        headers = {"Content-Type": "application/json", **server.headers}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
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


def measure_server(server: BenchServer, tokens: int) -> BesideMeasurement:
    alone = TimedStream()
    alone.read(server, STREAM_TOKENS_ALONE, threading.Event())
    small_alone = [time_small_request(server, number) for number in range(SMALL_REQUESTS_ALONE)]
    prefill_alone_s = request_completion(server, make_conversation(tokens, "alone"), 1).ttft_s
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
        request_completion(server, make_conversation(tokens, "beside"), 1)
        ended = time.perf_counter()
        prefilled.set()

    threading.Thread(target=prefill).start()
    small_beside: list[float] = []
    while not prefilled.is_set():
        small_beside.append(time_small_request(server, f"beside {len(small_beside)}"))
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


def render_table(measurements: dict[str, BesideMeasurement], tokens: int) -> Table:
    shown = Table(title=f"Beside one prefill of {tokens:,} tokens")
    for heading in (
        "",
        "stream alone",
        "stream beside",
        "small alone",
        "small beside, p50",
        "p99",
        "n",
        "prefill alone",
        "prefill beside",
    ):
        shown.add_column(heading, justify="left" if not heading else "right")
    for name, each in measurements.items():
        shown.add_row(
            name,
            f"{each.stream_alone:.1f} tok/s",
            f"{each.stream_beside:.1f} tok/s",
            f"{median(each.small_alone):.2f} s",
            f"{median(each.small_beside):.2f} s",
            f"{percentile(each.small_beside, 99):.2f} s",
            str(len(each.small_beside)),
            f"{each.prefill_alone_s:.1f} s",
            f"{each.prefill_beside_s:.1f} s",
        )
    return shown


def run(options: argparse.Namespace, console: Console) -> None:
    with tempfile.TemporaryDirectory(prefix="warmline-bench-") as folder:
        place = Path(folder)
        model = options.model or tiny_models.build("bench", place / "model")
        console.print(f"{format_blas()}\n{options.model or 'llama, 8 layers, 256 wide, float32'}")
        measured: dict[str, BesideMeasurement] = {}
        with run_warmline(model, place / "home", place / "warmline.log") as (pair, _):
            tokens = options.tokens or find_prompt_tokens(pair, options.long_s)
            pair.wait_until_saved()
            measured[pair.name] = measure_server(pair, tokens)
        if not options.no_peer:
            with run_mlx_lm_server(model, place / "mlx_lm.log") as peer:
                measured[peer.name] = measure_server(peer, tokens)
        console.print(render_table(measured, tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model of your own, instead of the small one")
    parser.add_argument("--long-s", type=float, default=30.0, help="how long the prefill is to take (default: 30)")
    parser.add_argument("--tokens", type=int, default=0, help="prompt length, instead of calibrating")
    parser.add_argument("--no-peer", action="store_true", help="leave out mlx_lm.server")
    run(parser.parse_args(), Console(width=160))


if __name__ == "__main__":
    main()
