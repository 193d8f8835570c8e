"""benchmarks/models/swap.py on one GPU, with two models of an 8B llama's shape: made once, then served under two names.

Usage: PYTHONPATH=benchmarks .venv/bin/python benchmarks/gpu/swap.py [--tokens 4000 24000] [--json FILE]
"""

import argparse
from pathlib import Path

from common.large_models import build_model_once
from models import swap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4000, 24000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", type=Path, default=Path.home() / "warmline-llama-8b", help="made on the first run")
    parser.add_argument("--no-peer", action="store_true", help="leave out mlx_lm.server")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value measured to this file")
    options = parser.parse_args()
    build_model_once("llama_8b", options.model)
    options.models = [options.model, options.model]
    swap.print_and_write(options, swap.measure(options))


if __name__ == "__main__":
    main()
