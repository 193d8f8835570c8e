"""Latency of small warm requests on two checkouts, both pairs up at once and asked in turn.

Usage: python benchmarks/hot_path.py OLD_WARMLINE NEW_WARMLINE [--rounds 5] [--requests 40]

The arguments are the `warmline` executables of two environments.  Each round asks both pairs the same requests,
alternating: a repeated short prompt, and one with 50 kB of messages whose last one is new.  Medians of medians.
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40)
    options = parser.parse_args()
    columns = {"request": 8, "old ms": 8, "spread": 13, "new ms": 8, "spread ": 13, "new/old": 8}
    table = StreamingTable(Console(), "small warm requests, medians of rounds", columns)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = tiny_models.build("llama", folder / "model")
        programs = (options.old, options.new)
        urls = [stack.enter_context(run_pair(each, folder / f"home{i}", model)) for i, each in enumerate(programs)]
        for kind in ("short", "long"):
            medians: list[list[float]] = [[], []]
            for round_number in range(options.rounds + 1):
                times: list[list[float]] = [[], []]
                for number in range(options.requests):
                    for side in (0, 1) if number % 2 else (1, 0):
                        times[side].append(time_request(urls[side], build_messages(kind, number)))
                if round_number:  # the first round warms up
                    for side in (0, 1):
                        medians[side].append(1000 * statistics.median(times[side]))
            old, new = map(statistics.median, medians)
            spreads = [f"{min(each):.1f} to {max(each):.1f}" for each in medians]
            table.add_row(kind, f"{old:.1f}", spreads[0], f"{new:.1f}", spreads[1], f"{new / old:.2f}")


if __name__ == "__main__":
    sys.exit(main())
