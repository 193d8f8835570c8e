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
import json
import math
import os
import random
import signal
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from warmline_run import openblas

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import tiny_models  # noqa: E402  (lives with the tests, which own it)

START_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 900.0
POLL_S = 0.02
ANSWER_TOKENS = 16
PREFILL_STEP_SIZE = 2048
CALIBRATION_TOKENS = (1024, 3072)

Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    ttft_s: float
    total_s: float
    text: str
    cached_tokens: int
    prompt_tokens: int


@dataclass
class Turns:
    """One conversation on one server."""

    cold: Answer
    in_session: Answer
    after_restart: Answer


@dataclass
class Server:
    """Something that answers chat completions on a port of this machine, and can be killed and started again."""

    name: str
    port: int
    headers: dict[str, str] = field(default_factory=dict)
    kill_and_start: Callable[[], None] = lambda: None
    settle: Callable[[], None] = lambda: None  # returns when nothing of earlier turns is left to do


def ask(server: Server, messages: Sequence[Message], answer_tokens: int = ANSWER_TOKENS) -> Answer:
    """One streamed, greedy request on a new connection; time runs from before the connection."""
    body = {
        "model": "default_model",
        "messages": messages,
        "max_tokens": answer_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    connection = HTTPConnection("127.0.0.1", server.port, timeout=REQUEST_TIMEOUT_S)
    headers = {"Content-Type": "application/json", **server.headers}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{server.name} answered {response.status}: {response.read(2000).decode(errors='replace')}")
    first_s, text, usage = math.nan, "", {}
    for chunk in events(response):
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices") or ():
            content = choice.get("delta", {}).get("content") or ""
            if content and not text:
                first_s = time.perf_counter() - started
            text += content
    connection.close()
    return Answer(
        ttft_s=first_s,
        total_s=time.perf_counter() - started,
        text=text,
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        prompt_tokens=usage.get("prompt_tokens") or 0,
    )


def events(lines: Any) -> Iterator[dict[str, Any]]:
    """The JSON of each unnamed SSE event, up to [DONE] or the end."""
    name = b""
    for line in lines:
        kind, _, value = line.rstrip(b"\r\n").partition(b":")
        if kind == b"event":
            name = value.strip()
        elif kind == b"data" and not name and value.strip() != b"[DONE]":
            yield json.loads(value)
        elif not line.strip():
            name = b""


def status_of(port: int, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, HTTPException):
        return 0, b""
    finally:
        connection.close()


def until(condition: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"waited {timeout_s:g} s in vain: {what}")
        time.sleep(POLL_S)


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@contextmanager
def warmline(model: Path, home: Path, log: Path) -> Iterator[tuple[Server, Server]]:
    """The pair under `warmline serve` with an empty home: (through the proxy, the backend directly)."""
    port, backend_port = free_ports(2)
    command = [
        *(sys.executable, "-m", "warmline_run.cli", "serve"),
        *("--home", str(home), "--model", str(model), "--port", str(port), "--backend-port", str(backend_port)),
        *("--prefill-step-size", str(PREFILL_STEP_SIZE)),
    ]
    pair = Server("Warmline", port)
    direct = Server("Warmline's backend", backend_port)

    def ready() -> bool:
        return status_of(port, "/ready")[0] == 200

    def owner() -> dict[str, str]:
        return {"Authorization": f"Bearer {(home / 'secret').read_text().strip()}"}

    def settle() -> None:
        until(lambda: json.loads(status_of(port, "/warmline/status", owner())[1])["settling"] == 0, "the pair settles")

    def kill_and_start() -> None:
        """serve starts again what dies; the wait for it is no part of any measurement."""
        pids = [int((home / "run" / f"{name}.pid").read_text()) for name in ("proxy", "backend")]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(alive(pid) for pid in pids), "the pair dies")
        until(ready, "the pair is ready again")

    pair.settle, pair.kill_and_start = settle, kill_and_start
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            until(lambda: ready() or process.poll() is not None, "the pair is ready")
            if process.poll() is not None:
                raise SystemExit(f"warmline serve ended; see {log}")
            direct.headers = owner()
            yield pair, direct
        finally:
            process.terminate()
            process.wait()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def mlx_lm_server(model: Path, log: Path) -> Iterator[Server]:
    """The peer, with the same BLAS and the same prefill step."""
    (port,) = free_ports(1)
    command = [
        *(sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port)),
        *("--prefill-step-size", str(PREFILL_STEP_SIZE)),
    ]
    server = Server("mlx_lm.server", port)
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        with log.open("ab") as output:
            running.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment()))
        until(lambda: status_of(port, "/health")[0] == 200, "mlx_lm.server is ready")
        ask(server, [{"role": "user", "content": "hello"}], 1)  # it loads the model with its first request

    def kill_and_start() -> None:
        running[-1].kill()
        running[-1].wait()
        start()

    server.kill_and_start = kill_and_start
    try:
        start()
        yield server
    finally:
        running[-1].kill()
        running[-1].wait()


def environment() -> dict[str, str]:
    preload, _ = openblas.preload(os.environ.get("LD_PRELOAD", ""))
    return {**os.environ, **({"LD_PRELOAD": preload} if preload else {})}


def noise(count: int, seed: object) -> str:
    """Text of `count` tokens of the byte-level tokenizer."""
    return "".join(random.Random(str(seed)).choices(string.ascii_letters + string.digits, k=count))


def conversation(tokens: int, seed: object) -> list[Message]:
    return [{"role": "system", "content": noise(tokens, seed)}, {"role": "user", "content": "What comes first?"}]


def next_turn(messages: Sequence[Message], answer: Answer, question: str) -> list[Message]:
    return [*messages, {"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]


def calibrate(server: Server, cold_s: float) -> int:
    """The prompt length whose cold prefill takes `cold_s`, from two measurements: time = a * n + b * n^2."""
    (n1, t1), (n2, t2) = ((n, ask(server, conversation(n, f"calibrate {n}"), 1).ttft_s) for n in CALIBRATION_TOKENS)
    b = max((t2 / n2 - t1 / n1) / (n2 - n1), 1e-12)
    a = max(t1 / n1 - b * n1, 1e-9)
    tokens = (math.sqrt(a * a + 4 * b * cold_s) - a) / (2 * b)
    return max(512, min(int(tokens), tiny_models.CONTEXT_TOKENS - 2048))


def turns(server: Server, tokens: int, seed: object) -> Turns:
    first = conversation(tokens, seed)
    cold = ask(server, first)
    second = next_turn(first, cold, "And what is second?")
    in_session = ask(server, second)
    server.settle()
    server.kill_and_start()
    third = next_turn(second, in_session, "And what is third?")
    return Turns(cold, in_session, ask(server, third))


def small_requests(servers: Sequence[Server], count: int) -> dict[str, list[float]]:
    """TTFT of short, never-seen prompts, each server in turn so that all meet the same machine."""
    measured: dict[str, list[float]] = {server.name: [] for server in servers}
    for i in range(-3, count):  # three to warm up
        order = list(servers) if i % 2 else list(reversed(servers))
        for server in order:
            answer = ask(server, [{"role": "user", "content": noise(40, (server.name, i))}], 4)
            server.settle()
            if i >= 0:
                measured[server.name].append(answer.ttft_s)
    return measured


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def turns_table(measured: dict[str, list[Turns]], tokens: int) -> Table:
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


def small_table(measured: dict[str, list[float]]) -> Table:
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


def added_line(through: Sequence[float], direct: Sequence[float]) -> str:
    """Both are in the order of measuring, so what disturbs the machine for a while disturbs both of a pair."""
    medians_ms = (median(through) - median(direct)) * 1e3
    paired_ms = median([a - b for a, b in zip(through, direct, strict=True)]) * 1e3
    return f"Through the proxy: {medians_ms:+.1f} ms between the medians, {paired_ms:+.1f} ms in the median pair."


def blas_line() -> str:
    if not openblas.wanted():
        return "BLAS: mlx's own (Metal or CUDA)"
    preload, advice = openblas.preload(os.environ.get("LD_PRELOAD", ""))
    return f"BLAS: {preload}" if preload else f"BLAS: the reference one ({advice})"


def run(options: argparse.Namespace, console: Console) -> None:
    with tempfile.TemporaryDirectory(prefix="warmline-bench-") as folder:
        place = Path(folder)
        logs = options.logs or place
        logs.mkdir(parents=True, exist_ok=True)
        model = options.model or tiny_models.build("bench", place / "model")
        measured: dict[str, list[Turns]] = {}
        what = options.model or "llama, 8 layers, 256 wide, float32"
        console.print(f"{blas_line()}\n{os.cpu_count()} cores; {what}")
        with warmline(model, place / "home", logs / "warmline.log") as (pair, direct):
            tokens = options.tokens or calibrate(pair, options.cold_s)
            pair.settle()
            measured[pair.name] = [turns(pair, tokens, repeat) for repeat in range(options.repeats)]
            pair.settle()
            small = small_requests([pair, direct], options.small)
        if not options.no_peer:
            with mlx_lm_server(model, logs / "mlx_lm.log") as peer:
                measured[peer.name] = [turns(peer, tokens, repeat) for repeat in range(options.repeats)]
                small |= small_requests([peer], options.small)
        console.print(turns_table(measured, tokens))
        console.print(small_table(small))
        console.print(added_line(small[pair.name], small[direct.name]))


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
