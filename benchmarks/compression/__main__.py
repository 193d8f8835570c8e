"""Codings of bfloat16 KV: how small, how fast on a core and on several, and restores from a slow disk.

  codings   candidates on KV of SmolLM2 (the demo model, over code) and of random weights: share of the bytes that is
            stored, GB/s of decoded bytes a core (of its own time), and with several threads (of wall time)
  restore   the product's loader on segments of SmolLM2's KV in an 8B model's shape, coded and plain, beside reading the
            plain files' bytes; disks of `--disk-gb-s` are simulated: each read sleeps until such a disk, shared by all
            readers, would have delivered.  Sides take turns; medians

Usage: .venv/bin/python benchmarks/compression codings|restore [--threads N] [--disk-gb-s GB ...] [--json FILE]
"""

import argparse
import json
from pathlib import Path

import codings
import restore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("codings", "restore"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kv-tokens", type=int, default=512, help="tokens whose KV is coded")
    parser.add_argument("--home", type=Path, default=Path.home() / ".warmline", help="where the demo model is, or goes")
    parser.add_argument(
        "--disk-gb-s", type=float, nargs="+", default=[1.0], help="rates of simulated disks; 0: as it is"
    )
    parser.add_argument("--tokens", type=int, default=2048, help="restore: tokens of the restored segments")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = codings.measure(given) if given.command == "codings" else restore.measure(given)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
