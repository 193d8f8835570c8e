"""CPU time of a small warm request, by the number of conversations that the pair holds in memory and on disk.

Usage: PYTHONPATH=benchmarks .venv/bin/python benchmarks/serving/growth.py [--requests 240] [--rounds 3] [--json FILE]
       [--quick]

A pair with a tiny model is filled with short conversations.  At each stage CLIENTS clients repeat a prompt of their
own, so that all but its last token is reused.  CPU time is both processes' own, saves included; Linux only.
"""

import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from common.load import KeptConnection, run_clients, wait_until_saved
from common.results import make_parser, write_json
from common.rows import StreamingTable
from common.servers import BenchServer, run_warmline, tiny_models
from common.sides import NO_AUDITS, measure_warm_request_ms
from rich.console import Console

CLIENTS = 8


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


def main() -> None:
    parser = make_parser(__doc__, has_model=False, has_peer=False)
    parser.add_argument("--residents", type=int, nargs="+", default=[10, 100, 500, 2000])
    parser.add_argument("--requests", type=int, default=200, help="a round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.quick:
        options.residents, options.requests, options.rounds = [8, 16], 16, 1
    columns = {"residents": 9, "proxy ms": 8, "ratio": 5, "backend ms": 10, "ratio ": 5}
    table = StreamingTable(Console(), f"CPU a small warm request, {CLIENTS} clients, medians of rounds", columns)
    rows: list[GrowthRow] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_models.build("llama", folder / "model")
        with run_warmline(model, folder / "home", folder / "log", *NO_AUDITS) as (pair, _):
            measure_warm_request_ms(pair, pair, CLIENTS, CLIENTS * 5)  # warms up
            held = CLIENTS
            for residents in options.residents:
                fill(pair, held, residents)
                held = max(held, residents)
                rounds = [measure_warm_request_ms(pair, pair, CLIENTS, options.requests) for _ in range(options.rounds)]
                rows.append(GrowthRow(held, *([each[name] for each in rounds] for name in ("proxy", "backend"))))
                add_row(table, rows)
    write_json(options.json, [asdict(row) for row in rows])


def add_row(table: StreamingTable, rows: list[GrowthRow]) -> None:
    first, last = rows[0], rows[-1]
    cells = []
    for base, values in ((first.proxy_ms, last.proxy_ms), (first.backend_ms, last.backend_ms)):
        cells += [f"{statistics.median(values):.1f}", f"{statistics.median(values) / statistics.median(base):.2f}"]
    table.add_row(str(last.residents), *cells)


if __name__ == "__main__":
    main()
