"""Real JSON schemas: how many are served, what of them is held to, and random answers validated.

Usage: .venv/bin/python benchmarks/schemas fetch|table|conformance|walk [--cache DIR] [--sources NAME ...]
"""

import argparse
import os
import sys
from pathlib import Path

import conformance
import table
import walk
from corpus import fetch
from corpus.sources import UnknownSourceError

DEFAULT_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warmline-schemas"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("fetch", "table", "conformance", "walk"))
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="folder for packages, schemas and results")
    parser.add_argument(
        "--sources",
        nargs="*",
        default=[],
        metavar="NAME",
        help="folders of the corpus (vega, mcp, mcp/nx-mcp ...), and suite-draft2020-12, suite-draft7; all by default",
    )
    parser.add_argument("--processes", type=int, default=2, help="processes that measure; 2 by default, not for fetch")
    parser.add_argument(
        "--walks", type=int, default=20_000, help="walk: answers sampled in all, over all schemas; 20,000 by default"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="walk, conformance: seed of all that is drawn; 1 by default"
    )
    options = parser.parse_args()
    options.cache = options.cache.resolve()
    sys.path.append(str(options.cache / "python"))  # what jsonschema checks formats with
    commands = {"table": table.run, "conformance": conformance.run, "walk": walk.run}
    try:
        if options.command == "fetch":
            fetch.fetch_corpus(options.cache, options.sources)
        else:
            commands[options.command](options)
    except UnknownSourceError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
