"""Both sides of a comparison, which take turns; requests at the same time, their CPU time and computed tokens."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from itertools import chain
from pathlib import Path
from typing import TypeVar

from common.load import repeat_prompts, wait_until_saved
from common.servers import (
    PREFILL_STEP_SIZE,
    BenchServer,
    Message,
    TimedAnswer,
    get_status,
    open_connection,
    request_completion,
    run_mlx_lm_server,
    run_warmline,
)
from support.metrics_text import MetricsText

Result = TypeVar("Result")

ANSWER_TOKENS = 4  # of a small warm request

NO_AUDITS = ("--audit-fraction", "0")  # an audit would run while the other side is measured


@dataclass(frozen=True)
class Sides:
    pair: BenchServer
    direct: BenchServer  # the pair's backend, which reuses nothing
    home: Path
    peer: BenchServer | None

    def take_turns(self, turn: int) -> list[BenchServer]:
        """The pair and the peer, every second turn in the other order, so that none always follows the other."""
        servers = [self.pair, *([self.peer] if self.peer else [])]
        return servers if turn % 2 == 0 else servers[::-1]


@contextmanager
def run_both(
    model: Path, folder: Path, *flags: str, has_peer: bool = True, prefill_step_size: int = PREFILL_STEP_SIZE
) -> Iterator[Sides]:
    """Start the pair with `flags` and, unless unwanted, mlx_lm.server; one is idle while the other is measured."""
    home = folder / "home"
    pair = run_warmline(model, home, folder / "warmline.log", *NO_AUDITS, *flags, prefill_step_size=prefill_step_size)
    with ExitStack() as stack:
        through, direct = stack.enter_context(pair)
        peer = None
        if has_peer:
            peer = stack.enter_context(run_mlx_lm_server(model, folder / "mlx_lm.log", prefill_step_size))
        yield Sides(through, direct, home, peer)


def make_next_turn(messages: Sequence[Message], answer: str, question: str) -> list[Message]:
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


def call_together(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """The results in the order of `calls`; raises what the first failed one raised, after all have ended."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def request_together(
    server: BenchServer, conversations: Sequence[Sequence[Message]], answer_tokens: int
) -> list[TimedAnswer]:
    """Send all at the same moment, on connections that are open: a listener's backlog is not what is measured."""
    return request_in_turns(server, conversations, answer_tokens, len(conversations))


def request_in_turns(
    server: BenchServer, conversations: Sequence[Sequence[Message]], answer_tokens: int, clients: int
) -> list[TimedAnswer]:
    """`clients` begin at the same moment, and each sends the next conversation as soon as it has its last answer."""
    waiting = iter(conversations[clients:])

    def follow(first: Sequence[Message], connection: HTTPConnection) -> list[TimedAnswer]:
        answers = [request_completion(server, first, answer_tokens, connection=connection)]
        while (messages := next(waiting, None)) is not None:
            answers.append(request_completion(server, messages, answer_tokens))
        return answers

    connections = [open_connection(server) for _ in range(clients)]
    first = zip(conversations[:clients], connections, strict=True)
    return list(chain.from_iterable(call_together([partial(follow, *each) for each in first])))


def read_cpu_s(server: BenchServer) -> dict[str, float]:
    """User and system time of each process of the server so far, by its name; nan where there is no /proc."""
    return {name: _read_process_cpu_s(pid) for name, pid in server.find_pids().items()}


def compute_request_ms(before: Mapping[str, float], after: Mapping[str, float], requests: int) -> dict[str, float]:
    """CPU time a request between two results of `read_cpu_s`, in milliseconds, by process."""
    return {name: 1e3 * (cpu_s - before[name]) / requests for name, cpu_s in after.items()}


def measure_warm_request_ms(server: BenchServer, pair: BenchServer, clients: int, requests: int) -> dict[str, float]:
    """CPU milliseconds of the pair's processes a small warm request to `server`, the pair or its backend alone."""
    count_each = max(1, requests // clients)
    before = read_cpu_s(pair)
    repeat_prompts(server, clients, count_each, ANSWER_TOKENS)
    wait_until_saved(pair)
    return compute_request_ms(before, read_cpu_s(pair), count_each * clients)


def _read_process_cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_computed_tokens(pair: BenchServer) -> float:
    """Prompt tokens that the pair has computed since its proxy started; a request counts once it is saved."""
    pair.wait_until_saved()
    status, text = get_status(pair.port, "/metrics")
    if status != 200:
        raise SystemExit(f"GET /metrics answered {status}: {text[:500].decode(errors='replace')}")
    return MetricsText(text.decode()).total("warmline_prompt_tokens_total", source="computed")
