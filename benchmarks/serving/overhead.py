"""CPU time of a small warm request, by the number of clients that ask at once.

Usage: PYTHONPATH=benchmarks .venv/bin/python benchmarks/serving/overhead.py [--requests 240] [--rounds 3] [--json FILE]
       [--quick]

Each client repeats a prompt of its own on a connection that it keeps, streamed and not in turn; all but the prompt's
last token is reused.  The last column is the backend's CPU where it is asked directly.  Linux only.
"""

import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from common.results import make_parser, write_json
from common.rows import StreamingTable
from common.servers import run_warmline, tiny_models
from common.sides import NO_AUDITS, measure_warm_request_ms
from rich.console import Console


@dataclass(frozen=True)
class OverheadRow:
    clients: int
    proxy_ms: list[float]  # CPU a request, one a round
    backend_ms: list[float]
    direct_ms: list[float]  # the backend's, without a proxy: each request computed cold


def main() -> None:
    parser = make_parser(__doc__, has_model=False, has_peer=False)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--requests", type=int, default=320, help="a round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.quick:
        options.clients, options.requests, options.rounds = [1, 2], 4, 1
    rows = {clients: OverheadRow(clients, [], [], []) for clients in options.clients}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_models.build("llama", folder / "model")
        with run_warmline(model, folder / "home", folder / "log", *NO_AUDITS) as (pair, direct):
            for clients in options.clients:  # warm up
                measure_warm_request_ms(pair, pair, clients, clients * 2)
            for _ in range(options.rounds):
                for clients, row in rows.items():  # in turn
                    paired = measure_warm_request_ms(pair, pair, clients, options.requests)
                    row.proxy_ms.append(paired["proxy"])
                    row.backend_ms.append(paired["backend"])
                    alone = measure_warm_request_ms(direct, pair, clients, options.requests)
                    row.direct_ms.append(alone["backend"])
    print_table(list(rows.values()))
    write_json(options.json, [asdict(row) for row in rows.values()])


def print_table(rows: list[OverheadRow]) -> None:
    columns = {"clients": 7, "proxy ms": 8, "ratio": 5, "backend ms": 10, "directly ms": 11}
    table = StreamingTable(Console(), "CPU a small warm request, medians of rounds", columns)
    for row in rows:
        proxy, backend, direct = (statistics.median(each) for each in (row.proxy_ms, row.backend_ms, row.direct_ms))
        ratio = proxy / statistics.median(rows[0].proxy_ms)
        table.add_row(str(row.clients), f"{proxy:.1f}", f"{ratio:.2f}", f"{backend:.1f}", f"{direct:.1f}")


if __name__ == "__main__":
    main()
