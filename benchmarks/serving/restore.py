"""The cost of a restore: the first token after kill -9 against a plain read of the same bytes and the turn in session.

The model is small and has much KV, as large models have: 8 layers, 256 wide, 4 heads of keys and values 256 wide, 64 KB
a token.  One conversation goes on, and each round measures

  next turn        a turn while its KV is in memory
  after kill -9    a turn after both processes were killed and started again, and after another small request
  plain read       the conversation's files, read into fresh memory by one thread

The turn after a restart can hardly be sooner than the read and the turn in session together, so the least is about 1.0.
The files are in the page cache in both cases.

Usage: PYTHONPATH=benchmarks .venv/bin/python benchmarks/serving/restore.py [--tokens 4096] [--repeats 5]
"""

import argparse
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common.results import format_quartiles, make_parser, print_results, write_json
from common.servers import BenchServer, Message, make_conversation, make_text, request_completion, tiny_models
from common.sides import make_next_turn, run_both

FAMILY = "wide_kv"
WIDE_KV = {**tiny_models.FAMILIES["bench"], "num_key_value_heads": 4, "head_dim": 256}
HEADINGS = ("KV", "next turn", "after kill -9", "plain read", "after kill -9 / (plain read + next turn)")


@dataclass(frozen=True)
class RestoreRound:
    kv_bytes: int
    next_turn_s: float
    after_restart_s: float
    plain_read_s: float

    @property
    def ratio(self) -> float:
        return self.after_restart_s / (self.plain_read_s + self.next_turn_s)


def list_segment_files(home: Path) -> set[Path]:
    return {path for path in (home / "segments").rglob("*") if path.is_file()}


def read_files_s(paths: Collection[Path]) -> float:
    """Seconds of reading the files, each into memory that was never used before."""
    began = time.perf_counter()
    contents = []
    for path in paths:
        with path.open("rb", buffering=0) as file:
            contents.append(bytearray(path.stat().st_size))
            file.readinto(contents[-1])
    return time.perf_counter() - began


def measure_round(
    pair: BenchServer, home: Path, others: set[Path], messages: list[Message], number: int
) -> tuple[RestoreRound, list[Message]]:
    """One round; the conversation with its answers, whose last message is the next question.

    `others` are files that are not the conversation's.
    """
    next_turn = request_completion(pair, messages)
    messages = make_next_turn(messages, next_turn.text, f"And what is number {number}?")
    pair.wait_until_saved()
    pair.kill_and_start()
    request_completion(pair, [{"role": "user", "content": make_text(40, ("small", number))}], 4)
    after = request_completion(pair, messages)
    pair.wait_until_saved()
    files = list_segment_files(home) - others
    plain_read_s = read_files_s(files)
    size = sum(path.stat().st_size for path in files)
    following = make_next_turn(messages, after.text, f"And what follows number {number}?")
    return RestoreRound(size, next_turn.ttft_s, after.ttft_s, plain_read_s), following


def measure(pair: BenchServer, home: Path, tokens: int, repeats: int) -> list[RestoreRound]:
    others = list_segment_files(home)  # of conversations before
    messages = make_conversation(tokens, "restore")
    messages = make_next_turn(messages, request_completion(pair, messages).text, "And what is second?")
    pair.wait_until_saved()
    rounds = []
    for number in range(repeats):
        found, messages = measure_round(pair, home, others, messages, number)
        rounds.append(found)
    return rounds


def format_row(rounds: Sequence[RestoreRound]) -> list[str]:
    return [
        f"{rounds[-1].kv_bytes / 1e6:,.0f} MB",
        format_quartiles([each.next_turn_s for each in rounds], " ms", 1e3, 0),
        format_quartiles([each.after_restart_s for each in rounds], " ms", 1e3, 0),
        format_quartiles([each.plain_read_s for each in rounds], " ms", 1e3, 0),
        format_quartiles([each.ratio for each in rounds]),
    ]


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="warmline-bench-") as name:
        folder = Path(name)
        tiny_models.FAMILIES[FAMILY] = WIDE_KV
        model = options.model or tiny_models.build(FAMILY, folder / "model")
        with run_both(model, folder, has_peer=False) as sides:
            rounds = measure(sides.pair, sides.home, options.tokens, options.repeats)
    write_json(options.json, [{**asdict(each), "ratio": each.ratio} for each in rounds])
    title = f"Time to the first token after kill -9, {options.tokens:,} tokens of KV, {len(rounds)} rounds"
    print_results(title, HEADINGS, [format_row(rounds)], "Medians, with quartiles.")


def main() -> None:
    parser = make_parser(__doc__, has_peer=False)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.repeats = 512, 1
    run(options)


if __name__ == "__main__":
    main()
