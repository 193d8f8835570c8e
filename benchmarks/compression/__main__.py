"""Codings of bfloat16 KV: how small, how fast on a core and on several, and restores from a slow disk.

  codings   candidates on KV of SmolLM2 (the demo model, over code) and of random weights: share of the bytes that is
            stored, GB/s of decoded bytes a core (of its own time), and with several threads (of wall time)
  restore   the product's loader on segments of SmolLM2's KV in an 8B model's shape, coded and plain, beside reading the
            plain files' bytes; disks of `--disk-gb-s` are simulated: each read sleeps until such a disk, shared by all
            readers, would have delivered.  Sides take turns; medians

Usage: .venv/bin/python benchmarks/compression [codings|restore] [--threads N] [--readers N] [--disk-gb-s GB ...]
       [--json FILE] [--quick]
"""

import sys
from pathlib import Path

import codings
import restore

from warmline_backend.engine.kv_transfer import READER_THREADS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from common.results import make_parser, write_json  # noqa: E402

COMMANDS = {"codings": codings.measure, "restore": restore.measure}


def main() -> None:
    parser = make_parser(__doc__, has_model=False, has_peer=False)
    parser.add_argument("command", nargs="?", choices=("all", *COMMANDS), default="all")
    parser.add_argument("--threads", type=int, default=2, help="codings: threads beside one")
    parser.add_argument("--readers", type=int, default=READER_THREADS, help="restore: default: as in the backend")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kv-tokens", type=int, default=512, help="tokens whose KV is coded")
    home = ROOT / "build" / "bench" / "demo"
    parser.add_argument(
        "--home", type=Path, default=home, help="where the demo model is, or goes; default: %(default)s"
    )
    parser.add_argument(
        "--disk-gb-s", type=float, nargs="+", default=[1.0], help="rates of simulated disks; 0: as it is"
    )
    parser.add_argument("--tokens", type=int, default=2048, help="restore: tokens of the restored segments")
    given = parser.parse_args()
    if given.quick:
        given.kv_tokens, given.repeats = 64, 1
    wanted = COMMANDS if given.command == "all" else [given.command]
    write_json(given.json, {command: COMMANDS[command](given) for command in wanted})


if __name__ == "__main__":
    main()
