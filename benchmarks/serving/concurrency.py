"""Many clients at once: tokens and requests a second, time to the first token, CPU time a request.

On a small model with random weights (8 layers, 256 wide), Warmline's pair and `mlx_lm.server` in turn.  1, 4, 8 and 16
clients begin at the same moment, and each sends new prompts of 40 tokens, one after the other, for answers of 1, 16 and
64 tokens.  Then 1 and 8 clients send prompts of 700 tokens, and once more 8 clients prompts of 700 tokens that differ
in their last 40 tokens only ("shared").  One client asks the backend directly, too, which shows what the proxy adds.

CPU time is that of all processes of a side, user and system, what they do after the answer included (Linux only).

Usage: PYTHONPATH=benchmarks .venv/bin/python benchmarks/serving/concurrency.py [--clients 1 8] [--answers 16]
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from common.results import format_quartiles, make_parser, print_results, write_json
from common.servers import BenchServer, Message, make_text, median, tiny_models
from common.sides import Sides, compute_request_ms, read_cpu_s, request_in_turns, run_both

SHORT_TOKENS, LONG_TOKENS, END_TOKENS = 40, 700, 40
HEADINGS = (
    "clients, prompt, answer",
    "tokens/s",
    "mlx_lm.server",
    "ratio",
    "requests/s",
    "mlx_lm.server",
    "first token",
    "mlx_lm.server",
    "CPU a request",
    "mlx_lm.server",
)


@dataclass(frozen=True)
class Load:
    """Clients that begin at the same moment; each sends `requests_each` requests, one after the other."""

    clients: int
    prompt_tokens: int
    answer_tokens: int
    requests_each: int = 1
    shares_prefix: bool = False

    @property
    def requests(self) -> int:
        return self.clients * self.requests_each

    @property
    def label(self) -> str:
        shared = ", shared" if self.shares_prefix else ""
        return f"{self.clients}, {self.prompt_tokens}{shared}, {self.answer_tokens}"

    def make_prompts(self, seed: object) -> list[list[Message]]:
        head = make_text(self.prompt_tokens - END_TOKENS, seed) if self.shares_prefix else ""
        ends = (make_text(self.prompt_tokens - len(head), (seed, number)) for number in range(self.requests))
        return [[{"role": "user", "content": head + end}] for end in ends]


@dataclass(frozen=True)
class Burst:
    wall_s: float  # until the last answer was complete
    ttfts_s: list[float]
    cpu_ms: dict[str, float]  # a request, by process
    load: Load

    @property
    def tokens_per_s(self) -> float:
        return self.load.requests * self.load.answer_tokens / self.wall_s

    @property
    def requests_per_s(self) -> float:
        return self.load.requests / self.wall_s


def measure_burst(server: BenchServer, settled: BenchServer, load: Load, seed: object) -> Burst:
    """`settled` is asked whether all work of the requests is done; a backend's own port does not tell."""
    prompts = load.make_prompts((seed, server.name, load.label))
    before = read_cpu_s(settled)
    began = time.perf_counter()
    answers = request_in_turns(server, prompts, load.answer_tokens, load.clients)
    wall_s = time.perf_counter() - began
    settled.wait_until_saved()
    cpu_ms = compute_request_ms(before, read_cpu_s(settled), load.requests)
    return Burst(wall_s, [answer.ttft_s for answer in answers], cpu_ms, load)


def list_loads(options: argparse.Namespace) -> list[tuple[Load, int]]:
    """Loads and how often each is measured; those that take long are measured less often."""
    loads = [
        (Load(clients, SHORT_TOKENS, answer, max(2, 8 // clients)), options.rounds)
        for clients, answer in product(options.clients, options.answers)
    ]
    if options.quick:
        return [*loads, (Load(max(options.clients), LONG_TOKENS, max(options.answers), shares_prefix=True), 1)]
    loads += [
        (Load(clients, LONG_TOKENS, answer, max(1, 4 // clients)), 1)
        for clients, answer in product(options.clients[::2], options.answers)
    ]
    return [*loads, (Load(8, LONG_TOKENS, 16, shares_prefix=True), options.rounds)]


Measured = dict[Load, dict[str, list[Burst]]]


def measure(sides: Sides, loads: Sequence[tuple[Load, int]]) -> Measured:
    """Bursts by load and server's name."""
    measured: Measured = {load: defaultdict(list) for load, _ in loads}
    for server in sides.take_turns(0):  # warms up
        measure_burst(server, server, Load(2, SHORT_TOKENS, 16), "warm-up")
    for load, rounds in loads:
        for number in range(rounds):
            for server in sides.take_turns(number):
                measured[load][server.name].append(measure_burst(server, server, load, number))
            if load.clients == 1:
                measured[load][sides.direct.name].append(measure_burst(sides.direct, sides.pair, load, number))
    return measured


def format_row(load: Load, bursts: dict[str, list[Burst]]) -> list[str]:
    own, peer = bursts["Warmline"], bursts.get("mlx_lm.server", [])
    cells = [load.label]
    rates = [[burst.tokens_per_s for burst in side] for side in (own, peer)]
    cells += [format_quartiles(each, digits=0) if each else "" for each in rates]
    cells.append(f"{median(rates[0]) / median(rates[1]):.2f}" if peer else "")
    for side in (own, peer):
        cells.append(format_quartiles([burst.requests_per_s for burst in side], digits=1) if side else "")
    for side in (own, peer):
        cells.append(format_quartiles([s for burst in side for s in burst.ttfts_s], " ms", 1e3, 0) if side else "")
    for side in (own, peer):
        cells.append(" + ".join(format_cpu(side, name) for name in side[0].cpu_ms) if side else "")
    return cells


def format_cpu(bursts: Sequence[Burst], process: str) -> str:
    return f"{process} {median([burst.cpu_ms[process] for burst in bursts]):.0f} ms"


def format_added_latency(measured: Measured) -> str:
    """The first token through the proxy, against the backend asked directly, medians of each load."""
    parts = []
    for load, bursts in measured.items():
        if direct := bursts.get("Warmline's backend"):
            through_s, direct_s = (
                median([s for burst in side for s in burst.ttfts_s]) for side in (bursts["Warmline"], direct)
            )
            parts.append(f"{1e3 * (through_s - direct_s):.1f} ms ({load.label})")
    return (
        f"Through the proxy the first token comes later than from the backend by {', '.join(parts)}." if parts else ""
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--answers", type=int, nargs="+", default=[1, 16, 64], help="tokens of the answers")
    parser.add_argument("--rounds", type=int, default=3, help="times that each load of short prompts is sent")
    options = parser.parse_args()
    if options.quick:
        options.clients, options.answers, options.rounds = [1, 4], [1, 16], 1
    with tempfile.TemporaryDirectory(prefix="warmline-bench-") as name:
        folder = Path(name)
        model = options.model or tiny_models.build("bench", folder / "model")
        with run_both(model, folder, has_peer=not options.no_peer) as sides:
            measured = measure(sides, list_loads(options))
    rows = [
        {"server": name, "tokens_per_s": burst.tokens_per_s, "requests_per_s": burst.requests_per_s, **asdict(burst)}
        for bursts in measured.values()
        for name, all_ in bursts.items()
        for burst in all_
    ]
    write_json(options.json, rows)
    print_results(
        "Many clients at once",
        HEADINGS,
        [format_row(load, bursts) for load, bursts in measured.items()],
        f"Medians, with quartiles; of two columns the first is Warmline's. {format_added_latency(measured)}",
    )


if __name__ == "__main__":
    main()
