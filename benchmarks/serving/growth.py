"""CPU time of a small warm request, by the number of conversations that the pair holds in memory and on disk.

Usage: PYTHONPATH=benchmarks .venv/bin/python benchmarks/serving/growth.py [--requests 240] [--rounds 3] [--json FILE]

A pair with a tiny model is filled with short conversations.  At each stage CLIENTS clients repeat a prompt of their
own, so that all but its last token is reused.  CPU time is both processes' own, saves included; Linux only.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from common.load import KeptConnection, ProcessCpu, read_cpu, repeat_prompts, run_clients, wait_until_saved
from common.rows import StreamingTable
from common.servers import BenchServer, run_warmline, tiny_models
from rich.console import Console

CLIENTS = 8
ANSWER_TOKENS = 4


@dataclass(frozen=True)
class GrowthRow:
    residents: int
    proxy_ms: list[float]  # CPU a request, one a round
    backend_ms: list[float]


def fill(pair: BenchServer, start: int, end: int) -> None:
    """Leave the conversations [start, end) in the pair's memory."""

    def ask_all(connection: KeptConnection, number: int) -> None:
        for each in range(start + number, end, CLIENTS):
            connection.ask(f"{each} is the number of a short conversation", 1)

    run_clients(pair, CLIENTS, ask_all)
    wait_until_saved(pair)


def measure(pair: BenchServer, home: Path, requests: int) -> ProcessCpu:
    """CPU seconds a warm request."""
    count_each = max(1, requests // CLIENTS)
    before = read_cpu(home)
    repeat_prompts(pair, CLIENTS, count_each, ANSWER_TOKENS)
    wait_until_saved(pair)
    return read_cpu(home).since(before, count_each * CLIENTS)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU of a warm request as conversations accumulate.")
    parser.add_argument("--residents", type=int, nargs="+", default=[10, 100, 500, 2000])
    parser.add_argument("--requests", type=int, default=200, help="a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value measured to this file")
    parser.add_argument("--quick", action="store_true", help="small and once: whether it works, not how fast")
    options = parser.parse_args()
    if options.quick:
        options.residents, options.requests, options.rounds = [8, 16], 16, 1
    columns = {"residents": 9, "proxy ms": 8, "ratio": 5, "backend ms": 10, "ratio ": 5}
    table = StreamingTable(Console(), f"CPU a small warm request, {CLIENTS} clients, medians of rounds", columns)
    rows: list[GrowthRow] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home, model = folder / "home", tiny_models.build("llama", folder / "model")
        with run_warmline(model, home, folder / "log", "--audit-fraction", "0") as (pair, _):
            measure(pair, home, CLIENTS * 5)  # warms up
            held = CLIENTS
            for residents in options.residents:
                fill(pair, held, residents)
                held = max(held, residents)
                rounds = [measure(pair, home, options.requests) for _ in range(options.rounds)]
                rows.append(
                    GrowthRow(held, [1e3 * each.proxy_s for each in rounds], [1e3 * each.backend_s for each in rounds])
                )
                add_row(table, rows)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def add_row(table: StreamingTable, rows: list[GrowthRow]) -> None:
    first, last = rows[0], rows[-1]
    cells = []
    for base, values in ((first.proxy_ms, last.proxy_ms), (first.backend_ms, last.backend_ms)):
        cells += [f"{statistics.median(values):.1f}", f"{statistics.median(values) / statistics.median(base):.2f}"]
    table.add_row(str(last.residents), *cells)


if __name__ == "__main__":
    sys.exit(main())
