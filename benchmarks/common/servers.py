"""What benchmarks measure: Warmline's pair and mlx_lm.server, started alike, asked alike, killed alike."""

import json
import math
import os
import random
import shutil
import signal
import socket
import statistics
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from warmline_run import openblas

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from support import tiny_models  # noqa: E402  (lives with the tests, which own it)

START_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 900.0
POLL_S = 0.02
ANSWER_TOKENS = 16
PREFILL_STEP_SIZE = 2048

PACKAGES = ("proxy", "backend", "cachectl", "launchd")  # folders of a checkout

CALIBRATION_TOKENS = (1024, 3072)

Message = dict[str, str]
TopLogprobs = tuple[
    tuple[str, float], ...
]  # the token and its log-probability; then the likeliest ones, likeliest first


@dataclass(frozen=True)
class TimedAnswer:
    ttft_s: float
    total_s: float
    text: str
    cached_tokens: int
    prompt_tokens: int
    logprobs: tuple[TopLogprobs, ...] = ()  # where they were asked for

    def list_figures(self) -> dict[str, float]:
        names = ("ttft_s", "total_s", "cached_tokens", "prompt_tokens")
        return {name: getattr(self, name) for name in names}


@dataclass
class BenchServer:
    """Something that answers chat completions on a port of this machine, and can be killed and started again."""

    name: str
    port: int
    headers: dict[str, str] = field(default_factory=dict)
    kill_and_start: Callable[[], None] = lambda: None
    wait_until_saved: Callable[[], None] = lambda: None  # returns when nothing of earlier turns is left to do
    find_pids: Callable[[], dict[str, int]] = dict  # of its processes, by their names
    timeout_s: float = REQUEST_TIMEOUT_S  # without a byte


def request_completion(
    server: BenchServer,
    messages: Sequence[Message],
    answer_tokens: int = ANSWER_TOKENS,
    connection: HTTPConnection | None = None,
    **options: Any,
) -> TimedAnswer:
    """One streamed request, greedy unless `options` say otherwise; time runs from before it.

    Without a `connection` it opens one of its own, within the time; one that is given is closed, too.
    """
    started = time.perf_counter()
    connection = connection or open_connection(server)
    send_completion(server, connection, messages, answer_tokens, **options)
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{server.name} answered {response.status}: {response.read(2000).decode(errors='replace')}")
    first_s, text, usage, logprobs = math.nan, "", {}, list[TopLogprobs]()
    for chunk in read_events(response):
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta", {})
            content = delta.get("content") or ""
            if math.isnan(first_s) and (content or delta.get("reasoning")):
                first_s = time.perf_counter() - started
            text += content
            for entries in (choice.get("logprobs") or {}).values():  # of reasoning, or of content
                logprobs += [_parse_top_logprobs(entry) for entry in entries or ()]
    connection.close()
    return TimedAnswer(
        ttft_s=first_s,
        total_s=time.perf_counter() - started,
        text=text,
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        prompt_tokens=usage.get("prompt_tokens") or 0,
        logprobs=tuple(logprobs),
    )


def open_connection(server: BenchServer) -> HTTPConnection:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=server.timeout_s)
    connection.connect()
    return connection


def send_completion(
    server: BenchServer, connection: HTTPConnection, messages: Sequence[Message], answer_tokens: int, **options: Any
) -> None:
    """Send a streamed request and do not read its answer."""
    body = {
        "model": "default_model",
        "messages": messages,
        "max_tokens": answer_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }
    headers = {"Content-Type": "application/json", **server.headers}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)


def _parse_top_logprobs(entry: dict[str, Any]) -> TopLogprobs:
    return tuple((each["token"], each["logprob"]) for each in (entry, *entry["top_logprobs"]))


def read_events(lines: Any) -> Iterator[dict[str, Any]]:
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


def get_status(port: int, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, HTTPException):
        return 0, b""
    finally:
        connection.close()


def wait_until(condition: Callable[[], bool], description: str, timeout_s: float = START_TIMEOUT_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"waited {timeout_s:g} s in vain: {description}")
        time.sleep(POLL_S)


def find_free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@contextmanager
def run_warmline(
    model: Path,
    home: Path,
    log: Path,
    *flags: str,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    checkout: Path | None = None,
) -> Iterator[tuple[BenchServer, BenchServer]]:
    """The pair under `warmline serve` with a home of its own: (through the proxy, the backend or keeper directly).

    `checkout`: folder whose packages are run, with the libraries of this environment.
    """
    port, backend_port = find_free_ports(2)
    command = [
        *(sys.executable, "-m", "warmline_run.cli", "serve"),
        *("--home", str(home), "--model", str(model), "--port", str(port), "--backend-port", str(backend_port)),
        *("--prefill-step-size", str(prefill_step_size), *flags),
    ]
    pair = BenchServer("Warmline", port)
    direct = BenchServer("Warmline's backend", backend_port)

    def ready() -> bool:
        return get_status(port, "/ready")[0] == 200

    def owner() -> dict[str, str]:
        return {"Authorization": f"Bearer {(home / 'secret').read_text().strip()}"}

    def settle() -> None:
        wait_until(
            lambda: json.loads(get_status(port, "/warmline/status", owner())[1])["settling"] == 0, "the pair settles"
        )

    def find_pids() -> dict[str, int]:
        return {name: int((home / "run" / f"{name}.pid").read_text()) for name in ("proxy", "backend")}

    def kill_and_start() -> None:
        """serve starts again what dies; the wait for it is no part of any measurement."""
        pids = list(find_pids().values())
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(is_alive(pid) for pid in pids), "the pair dies")
        wait_until(ready, "the pair is ready again")

    pair.wait_until_saved, pair.kill_and_start, pair.find_pids = settle, kill_and_start, find_pids
    with log.open("ab") as output:
        environment = make_checkout_environment(checkout) if checkout else None
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            wait_until(lambda: ready() or process.poll() is not None, "the pair is ready")
            if process.poll() is not None:
                raise SystemExit(f"warmline serve ended:\n{log.read_text(errors='replace')[-2000:]}")
            direct.headers = owner()
            yield pair, direct
        finally:
            process.terminate()
            process.wait()
            keep_log(log)


def make_checkout_environment(checkout: Path) -> dict[str, str]:
    """Variables that have Python take Warmline's packages from a checkout; raises SystemExit where it doesn't."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(checkout / folder) for folder in PACKAGES)}
    packages = [path.parent for folder in PACKAGES for path in (checkout / folder).glob("warmline_*/__init__.py")]
    names = ", ".join(path.name for path in packages)
    program = f"import {names}; print(*(each.__path__[0] for each in ({names})), sep='\\n')"
    command = [sys.executable, "-P", "-c", program]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    if not packages or [Path(each) for each in found] != packages:
        raise SystemExit(f"the packages of {checkout} would not be run: {found}")
    return environment


def keep_log(log: Path) -> None:
    """Copy a pair's log to the folder that BENCHMARK_LOGS names, if it does: what it logged of its requests."""
    if folder := os.environ.get("BENCHMARK_LOGS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(log, Path(folder, f"{os.getpid()}-{time.time_ns()}.log"))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def run_mlx_lm_server(model: Path, log: Path, prefill_step_size: int = PREFILL_STEP_SIZE) -> Iterator[BenchServer]:
    """The peer, with the same BLAS and the same prefill step."""
    (port,) = find_free_ports(1)
    command = [
        *(sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port)),
        *("--prefill-step-size", str(prefill_step_size)),
    ]
    server = BenchServer("mlx_lm.server", port)
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        with log.open("ab") as output:
            running.append(subprocess.Popen(command, stdout=output, stderr=output, env=make_environment()))
        wait_until(lambda: get_status(port, "/health")[0] == 200, "mlx_lm.server is ready")
        request_completion(
            server, [{"role": "user", "content": "hello"}], 1
        )  # it loads the model with its first request

    def kill_and_start() -> None:
        running[-1].kill()
        running[-1].wait()
        start()

    server.kill_and_start = kill_and_start
    server.find_pids = lambda: {"server": running[-1].pid}
    try:
        start()
        yield server
    finally:
        running[-1].kill()
        running[-1].wait()


def make_environment() -> dict[str, str]:
    preload, _ = openblas.choose_preload(os.environ.get("LD_PRELOAD", ""))
    return {**os.environ, **({"LD_PRELOAD": preload} if preload else {})}


def make_text(count: int, seed: object) -> str:
    """Text of `count` tokens of the byte-level tokenizer."""
    return "".join(random.Random(str(seed)).choices(string.ascii_letters + string.digits, k=count))


def make_conversation(tokens: int, seed: object) -> list[Message]:
    return [{"role": "system", "content": make_text(tokens, seed)}, {"role": "user", "content": "What comes first?"}]


def find_prompt_tokens(server: BenchServer, cold_s: float) -> int:
    """The prompt length whose cold prefill takes `cold_s`, from two measurements: time = a * n + b * n^2."""
    (n1, t1), (n2, t2) = (
        (n, request_completion(server, make_conversation(n, f"calibrate {n}"), 1).ttft_s) for n in CALIBRATION_TOKENS
    )
    b = max((t2 / n2 - t1 / n1) / (n2 - n1), 1e-12)
    a = max(t1 / n1 - b * n1, 1e-9)
    tokens = (math.sqrt(a * a + 4 * b * cold_s) - a) / (2 * b)
    return max(512, min(int(tokens), tiny_models.CONTEXT_TOKENS - 2048))


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def format_blas() -> str:
    if not openblas.is_openblas_needed():
        return "BLAS: mlx's own (Metal or CUDA)"
    preload, advice = openblas.choose_preload(os.environ.get("LD_PRELOAD", ""))
    return f"BLAS: {preload}" if preload else f"BLAS: the reference one ({advice})"
