"""Whether warm equals cold, bit for bit, and what that costs: one long conversation in exact and in fast mode.

Ten turns of about 2,000 tokens each, every second one sampled with a seed, the others greedy; the whole pair is killed
with -9 and started again twice on the way.  Each turn is asked through the proxy, and then of the backend directly,
which reuses nothing.  All numbers of both answers are compared: the log-probabilities of the 20 likeliest tokens at
every place.

Usage: python benchmarks/exact.py [--quick | --shape llama | --model DIR]
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.rows import StreamingTable
from common.servers import (
    BenchServer,
    Message,
    TimedAnswer,
    format_blas,
    make_text,
    median,
    request_completion,
    run_warmline,
    tiny_models,
)
from rich.console import Console

from common import large_models

KILLED_AFTER = (4, 7)  # turns
TOP_LOGPROBS = 20
WIDTHS = {
    "turn": 15,
    "prompt": 7,
    "cached": 7,
    "first token warm": 0,
    "cold": 8,
    "numbers": 0,
    "largest difference": 0,
    "equal": 11,
}


@dataclass(frozen=True)
class TurnPair:
    warm: TimedAnswer
    cold: TimedAnswer
    is_after_kill: bool  # everything was killed just before it

    @property
    def logprob_count(self) -> int:
        return sum(len(place) for place in self.warm.logprobs)

    @property
    def common_tokens(self) -> int:
        """Up to the first token that differs: from there on the two answer different prompts."""
        tokens = ([place[0][0] for place in answer.logprobs] for answer in (self.warm, self.cold))
        alike = 0
        for one, other in zip(*tokens, strict=False):
            if one != other:
                return alike
            alike += 1
        return alike

    @property
    def largest_difference(self) -> float:
        """Of a log-probability, over the places that are alike and the next one."""
        pairs = list(zip(self.warm.logprobs, self.cold.logprobs, strict=False))[: self.common_tokens + 1]
        return max((logprob_difference(one, other) for one, other in pairs), default=0.0)

    @property
    def is_equal(self) -> bool:
        return self.warm.text == self.cold.text and self.warm.logprobs == self.cold.logprobs


def logprob_difference(one: Sequence[tuple[str, float]], other: Sequence[tuple[str, float]]) -> float:
    """The largest, over the likeliest tokens that both name."""
    theirs = dict(other[1:])
    return max((abs(value - theirs[token]) for token, value in one[1:] if token in theirs), default=0.0)


def run_conversation(
    pair: BenchServer, direct: BenchServer, turns: int, tokens_a_turn: int, answer_tokens: int
) -> Iterator[TurnPair]:
    messages: list[Message] = [{"role": "system", "content": make_text(200, "system")}]
    for number in range(turns):
        killed = number in KILLED_AFTER
        if killed:
            pair.wait_until_saved()
            pair.kill_and_start()
        messages.append({"role": "user", "content": make_text(tokens_a_turn, number)})
        sampling = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
        options = {**sampling, "logprobs": True, "top_logprobs": TOP_LOGPROBS, "ignore_eos": True}
        warm = request_completion(pair, messages, answer_tokens, **options)
        pair.wait_until_saved()
        cold = request_completion(direct, messages, answer_tokens, **options)
        messages.append({"role": "assistant", "content": warm.text})
        yield TurnPair(warm, cold, killed)


def format_cells(number: int, turn: TurnPair) -> list[str]:
    """One row of WIDTHS."""
    return [
        f"{number}{' after kill -9' if turn.is_after_kill else ''}",
        f"{turn.warm.prompt_tokens:,}",
        f"{turn.warm.cached_tokens:,}",
        f"{turn.warm.ttft_s:.2f} s",
        f"{turn.cold.ttft_s:.2f} s",
        f"{turn.logprob_count:,}",
        f"{turn.largest_difference:.1e}" if turn.largest_difference else "0",
        "bit for bit" if turn.is_equal else "text" if turn.warm.text == turn.cold.text else "no",
    ]


def format_summary(mode: str, turns: Sequence[TurnPair]) -> str:
    equal = sum(turn.is_equal for turn in turns)
    warm, cold = (median([getattr(turn, name).ttft_s for turn in turns[1:]]) for name in ("warm", "cold"))
    computed = median([turn.warm.prompt_tokens - turn.warm.cached_tokens for turn in turns[1:]])
    return (
        f"{mode}: {equal} of {len(turns)} turns equal bit for bit; from the second on, medians: "
        f"first token {warm:.2f} s warm, {cold:.2f} s cold, {computed:,.0f} tokens computed a turn"
    )


def run(options: argparse.Namespace, console: Console) -> None:
    with tempfile.TemporaryDirectory(prefix="warmline-exact-") as folder:
        place, what = Path(folder), str(options.model)
        logs = options.logs or place
        logs.mkdir(parents=True, exist_ok=True)
        model = options.model or place / "model"
        if options.quick:
            tiny_models.build("bench", model)
            what = "llama, 8 layers, 256 wide, float32"
        elif not options.model:
            parameters = large_models.build_model(options.shape, model)
            what = f"{options.shape}, {parameters / 1e9:.2f}B parameters, bfloat16, random weights"
        console.print(f"{format_blas()}\n{os.cpu_count()} cores; {what}")
        for mode in options.modes:
            flags = ("--reuse", mode, "--audit-fraction", "0")
            rows, turns = StreamingTable(console, f"reuse = {mode}", WIDTHS), list[TurnPair]()
            with run_warmline(model, place / f"home-{mode}", logs / f"{mode}.log", *flags) as (pair, direct):
                tokens = options.tokens // options.turns
                for turn in run_conversation(pair, direct, options.turns, tokens, options.answer_tokens):
                    turns.append(turn)
                    rows.add_row(*format_cells(len(turns), turn))
            console.print(format_summary(mode, turns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and 6,000 tokens, for a CPU")
    parser.add_argument("--model", type=Path, help="a model of your own")
    parser.add_argument("--shape", choices=sorted(large_models.SHAPES), default="llama", help="of a random model")
    parser.add_argument("--modes", nargs="+", choices=("exact", "fast"), default=["exact", "fast"])
    parser.add_argument("--tokens", type=int, default=20_000, help="of the whole conversation (default: 20,000)")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--answer-tokens", type=int, default=48)
    parser.add_argument("--logs", type=Path, help="keep the servers' output in this folder")
    options = parser.parse_args()
    if options.quick:
        options.tokens = min(options.tokens, 6_000)
    run(options, Console(width=150))


if __name__ == "__main__":
    main()
