"""CPU time of a small warm request, by the number of clients that ask at once.

Usage: PYTHONPATH=benchmarks .venv/bin/python benchmarks/serving/overhead.py [--requests 240] [--rounds 3] [--json FILE]

Each client repeats a prompt of its own on a connection that it keeps, streamed and not in turn; all but the prompt's
last token is reused.  The last column is the backend's CPU where it is asked directly.  Linux only.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from common.load import ProcessCpu, read_cpu, repeat_prompts, wait_until_saved
from common.rows import StreamingTable
from common.servers import BenchServer, run_warmline, tiny_models
from rich.console import Console

ANSWER_TOKENS = 4


@dataclass(frozen=True)
class OverheadRow:
    clients: int
    proxy_ms: list[float]  # CPU a request, one a round
    backend_ms: list[float]
    direct_ms: list[float]  # the backend's, without a proxy: each request computed cold


def measure(server: BenchServer, pair: BenchServer, home: Path, clients: int, requests: int) -> ProcessCpu:
    """CPU seconds a request to `server`: the pair, or its backend alone."""
    count_each = max(1, requests // clients)
    before = read_cpu(home)
    repeat_prompts(server, clients, count_each, ANSWER_TOKENS)
    wait_until_saved(pair)
    return read_cpu(home).since(before, count_each * clients)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU of a warm request by the number of clients.")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--requests", type=int, default=320, help="a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value measured to this file")
    parser.add_argument("--quick", action="store_true", help="small and once: whether it works, not how fast")
    options = parser.parse_args()
    if options.quick:
        options.clients, options.requests, options.rounds = [1, 2], 4, 1
    columns = {"clients": 7, "proxy ms": 8, "ratio": 5, "backend ms": 10, "directly ms": 11}
    table = StreamingTable(Console(), "CPU a small warm request, medians of rounds", columns)
    rows: list[OverheadRow] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home, model = folder / "home", tiny_models.build("llama", folder / "model")
        with run_warmline(model, home, folder / "log", "--audit-fraction", "0") as (pair, direct):
            for clients in options.clients:  # warm up
                measure(pair, pair, home, clients, clients * 2)
            rounds = {clients: ([], []) for clients in options.clients}
            for _ in range(options.rounds):  # in turn
                for clients, (paired, alone) in rounds.items():
                    paired.append(measure(pair, pair, home, clients, options.requests))
                    alone.append(measure(direct, pair, home, clients, options.requests))
            for clients, (paired, alone) in rounds.items():
                rows.append(
                    OverheadRow(
                        clients,
                        [1e3 * each.proxy_s for each in paired],
                        [1e3 * each.backend_s for each in paired],
                        [1e3 * each.backend_s for each in alone],
                    )
                )
                medians = [statistics.median(v) for v in (rows[-1].proxy_ms, rows[-1].backend_ms, rows[-1].direct_ms)]
                ratio = medians[0] / statistics.median(rows[0].proxy_ms)
                table.add_row(
                    str(clients), f"{medians[0]:.1f}", f"{ratio:.2f}", f"{medians[1]:.1f}", f"{medians[2]:.1f}"
                )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    sys.exit(main())
