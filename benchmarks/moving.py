"""How long a conversation takes out of a home, off it and into it again, beside the disk; and whether it is warm after.

Two conversations begin alike and part halfway.  Each round the first one is taken out, purged and put back, with
`cachectl`, while the pair runs:

  export    all that is stored of it, into one file              limit: copying that file, and syncing it
  purge     its files; those that the other one needs are cut    -
  import    read, checked, written (the second half: the first is the other one's)
  verify    `--deep`: every byte of every file                   limit: reading the same files into one buffer
  ls        what any command takes: starting Python and opening the index

At last the next turn of both is asked for, and of the backend directly, which starts cold.  In 16-bit types and fast
mode the two answers may part by rounding; with `--exact` they may not.

Usage: .venv/bin/python benchmarks/moving.py [--quick | --shape llama | --model DIR] [--exact] [--tokens N]
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from io import FileIO
from pathlib import Path
from typing import Any

import mlx.core as mx
from common.rows import StreamingTable
from common.servers import (
    BenchServer,
    Message,
    format_blas,
    make_text,
    median,
    request_completion,
    run_warmline,
    tiny_models,
)
from common.sides import make_next_turn
from rich.console import Console

from warmline_common.storage import disk

CACHECTL = "from warmline_cachectl.cli import main; main()"
BLOCK_BYTES = 8 << 20
WIDTHS = {"": 32, "median": 10, "fastest": 10, "slowest": 10, "bytes": 10, "a second": 10}


class BenchHome:
    """A home under a running pair, and the commands that are measured on it."""

    def __init__(self, home: Path, place: Path) -> None:
        self._home, self.archive, self._copy = home, place / "talk.warmline", place / "copy"

    def run_cachectl(self, *arguments: str) -> Any:
        command = [sys.executable, "-c", CACHECTL, *arguments, "--home", str(self._home), "--json"]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            raise SystemExit(f"cachectl {' '.join(arguments)} ended with {done.returncode}: {done.stderr.decode()}")
        return json.loads(done.stdout)

    @property
    def files(self) -> list[Path]:
        return [path for path in (self._home / "segments").rglob("*") if path.is_file()]

    @property
    def bytes_stored(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def copy_archive(self) -> None:
        with self.archive.open("rb") as source, FileIO(self._copy, "wb") as target:
            while block := source.read(BLOCK_BYTES):
                disk.write(target, block)
            disk.sync(target)

    def read_segments(self) -> None:
        buffer = bytearray(BLOCK_BYTES)
        for path in self.files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


class StepTimings:
    """Seconds and bytes of each thing that is done each round."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.bytes: dict[str, int] = {}

    def measure(self, step: str, action: Callable[[], object], bytes_count: Callable[[], int] = lambda: 0) -> None:
        before, began = bytes_count(), time.perf_counter()
        action()
        self.seconds.setdefault(step, []).append(time.perf_counter() - began)
        self.bytes[step] = abs(bytes_count() - before)

    def print_table(self, console: Console, title: str) -> None:
        rows = StreamingTable(console, title, WIDTHS)
        for what, seconds in self.seconds.items():
            middle, size = median(seconds), self.bytes[what]
            times = (f"{each:.3f} s" for each in (middle, min(seconds), max(seconds)))
            rows.add_row(
                what, *times, *((f"{size / 1e6:.1f} MB", f"{size / middle / 1e9:.2f} GB") if size else ("", ""))
            )


def run_rounds(home: BenchHome, repeats: int) -> StepTimings:
    """The conversation with the most tokens is taken out and put back."""
    measured = StepTimings()
    for _ in range(repeats):
        session = max(home.run_cachectl("ls")["sessions"], key=lambda each: each["tokens"])["id"]
        measured.measure("ls", lambda: home.run_cachectl("ls"))
        home.archive.unlink(missing_ok=True)

        def size() -> int:
            return home.archive.stat().st_size if home.archive.exists() else 0

        measured.measure("export", lambda name=session: home.run_cachectl("export", name, str(home.archive)), size)
        measured.measure("  limit: copy and sync", home.copy_archive)
        measured.bytes["  limit: copy and sync"] = size()
        measured.measure(
            "purge",
            lambda name=session: home.run_cachectl("purge", "--session", name, "--yes"),
            lambda: home.bytes_stored,
        )
        measured.measure("import", lambda: home.run_cachectl("import", str(home.archive)), lambda: home.bytes_stored)
        for what, act in (
            ("verify --deep", lambda: home.run_cachectl("verify", "--deep")),
            ("  limit: read", home.read_segments),
        ):
            measured.measure(what, act)
            measured.bytes[what] = home.bytes_stored
    return measured


def make_conversations(tokens: int) -> tuple[list[Message], list[Message]]:
    """The first is a little longer, so that it can be told from the other by its length."""
    shared = make_text(tokens // 2, "shared")
    texts = (shared + make_text(tokens // 2 + 64, "first"), shared + make_text(tokens // 2, "second"))
    first, second = ([{"role": "system", "content": each}, {"role": "user", "content": "And?"}] for each in texts)
    return first, second


def print_next_turns(console: Console, pair: BenchServer, direct: BenchServer, turns: dict[str, list[Message]]) -> None:
    rows = StreamingTable(
        console, "the next turn", {"": 10, "first token": 0, "cold": 10, "cached": 18, "same answer": 0}
    )
    for name, messages in turns.items():
        warm, cold = request_completion(pair, messages), request_completion(direct, messages)
        rows.add_row(
            name,
            f"{warm.ttft_s:.3f} s",
            f"{cold.ttft_s:.3f} s",
            f"{warm.cached_tokens:,} of {warm.prompt_tokens:,}",
            "yes" if warm.text == cold.text else "no",
        )


def run(options: argparse.Namespace, console: Console) -> None:
    with tempfile.TemporaryDirectory(prefix="warmline-moving-", dir=options.place) as folder:
        place = Path(folder)
        model = options.model or place / "model"
        if options.shape:
            import large_models  # which makes arrays on the device as it is imported

            large_models.build_model(options.shape, model)
            mx.clear_cache()
        elif not options.model:
            tiny_models.build("bench", model)
        mode = ("--reuse", "exact" if options.exact else "fast")
        with run_warmline(model, place / "home", options.log or place / "log", *mode) as (pair, direct):
            home, talks = BenchHome(place / "home", place), make_conversations(options.tokens)
            answers = [request_completion(pair, messages) for messages in talks]
            pair.wait_until_saved()
            measured = run_rounds(home, options.repeats)
            what = f"{mode[1]} mode; {options.tokens:,} tokens, half of them shared; median of {options.repeats}"
            measured.print_table(console, what)
            names = ("moved", "the other")
            turns = {
                name: make_next_turn(messages, answer.text, "And then?")
                for name, messages, answer in zip(names, talks, answers, strict=True)
            }
            print_next_turns(console, pair, direct, turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few tokens, once: shows that it runs, and no more")
    parser.add_argument("--shape", default="", help="random bfloat16 weights, see large_models: for a GPU")
    parser.add_argument("--model", type=Path, help="a model of your own")
    parser.add_argument("--exact", action="store_true", help="in exact mode: what is warm is cold, bit for bit")
    parser.add_argument("--tokens", type=int, default=8192, help="a conversation (default: 8192)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--place", type=Path, help="a folder on the disk that is to be measured")
    parser.add_argument("--log", type=Path, help="keep the pair's output in this file")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.repeats = 1024, 1
    console = Console(width=150)
    device = mx.device_info().get("device_name") or platform.machine()
    console.print(f"{device}; mlx {metadata.version('mlx')}; {format_blas()}")
    run(options, console)


if __name__ == "__main__":
    main()
