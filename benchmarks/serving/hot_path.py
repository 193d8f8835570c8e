"""Latency of small warm requests on two checkouts, both pairs up at once and asked in turn.

Usage: PYTHONPATH=benchmarks python benchmarks/serving/hot_path.py OLD_WARMLINE NEW_WARMLINE [--short 1500] [--long 200]

The arguments are the `warmline` executables of two environments.  Both pairs get the same requests in turn: a repeated
short prompt, and one with 50 kB of messages whose last one is new.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from common.rows import StreamingTable
from common.servers import find_free_ports, tiny_models
from rich.console import Console

START_TIMEOUT_S = 120.0
LONG_MESSAGES, LONG_CHARS = 25, 2_000
ANSWER_TOKENS = 4


@contextmanager
def run_pair(warmline: str, home: Path, model: Path) -> Iterator[str]:
    """Base URL of a pair."""
    port, backend_port = find_free_ports(2)
    command = [warmline, "serve", "--home", str(home), "--model", str(model), "--port", str(port)]
    command += ["--backend-port", str(backend_port), "--audit-fraction", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url)
            yield url
        finally:
            process.terminate()


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def time_request(url: str, messages: list[dict[str, str]]) -> float:
    """Seconds of one request that is not streamed."""
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as response:
        response.read()
    return time.perf_counter() - began


def build_messages(kind: str, number: int) -> list[dict[str, str]]:
    if kind == "short":
        return [{"role": "user", "content": "Hello, who are you?"}]
    history = [
        {"role": ("user", "assistant")[index % 2], "content": f"{index} " * (LONG_CHARS // 3)}
        for index in range(LONG_MESSAGES)
    ]
    return [*history[:-1], {"role": "user", "content": f"question {number}"}]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the latency of two checkouts.")
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--short", type=int, default=1500, help="short requests to each side")
    parser.add_argument("--long", type=int, default=200, help="long requests to each side")
    options = parser.parse_args()
    columns = {"request": 8, "old ms": 8, "quartiles": 13, "new ms": 8, "quartiles ": 13, "new/old": 8}
    table = StreamingTable(Console(), "small warm requests, medians", columns)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = tiny_models.build("llama", folder / "model")
        programs = (options.old, options.new)
        urls = [stack.enter_context(run_pair(each, folder / f"home{i}", model)) for i, each in enumerate(programs)]
        for kind, count in (("short", options.short), ("long", options.long)):
            times: list[list[float]] = [[], []]
            for number in range(count):
                for side in (0, 1) if number % 2 else (1, 0):
                    times[side].append(1000 * time_request(urls[side], build_messages(kind, number)))
            # the first requests warm up
            old, new = (statistics.quantiles(each[count // 10 :], n=4) for each in times)
            spreads = [f"{low:.1f} to {high:.1f}" for low, _, high in (old, new)]
            table.add_row(kind, f"{old[1]:.1f}", spreads[0], f"{new[1]:.1f}", spreads[1], f"{new[1] / old[1]:.2f}")


if __name__ == "__main__":
    sys.exit(main())
