"""A long prompt beside short requests on a GPU, cold and after kill -9, with the most memory that the device held.

Makes a model of a 1.6B llama's shape with random bfloat16 weights, sends one prompt of `--tokens` tokens to Warmline's
pair, and short requests one after the other until its first token is there.  Then every process is killed with -9, and
the conversation's next turn is timed.

Usage: PYTHONPATH=benchmarks .venv/bin/python benchmarks/gpu/long_prompt.py [--tokens 200000] [--reuse exact]
"""

import argparse
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.large_models import build_model_once
from common.servers import (
    BenchServer,
    Message,
    TimedAnswer,
    make_conversation,
    make_text,
    median,
    request_completion,
    run_warmline,
)

SHORT_TOKENS, SHORT_ANSWER_TOKENS = 200, 16
POLL_S = 0.2
LOG_PARTS = ("PERF", "prefill step", "tokens a chunk", "no memory", "failed", "ERROR")  # shown of the pair's log


@dataclass
class MemoryPoll:
    """The most memory in use on the device, as nvidia-smi counts it, polled on a thread."""

    bytes_max: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._stop.wait(POLL_S):
            used = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
            self.bytes_max = max(self.bytes_max, int(used or 0) << 20)

    def __enter__(self) -> "MemoryPoll":
        threading.Thread(target=self.run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()


def request_beside_short_ones(server: BenchServer, messages: list[Message]) -> tuple[TimedAnswer, list[TimedAnswer]]:
    """The answer to a long prompt, and those to short prompts sent meanwhile."""
    answers: list[TimedAnswer] = []
    thread = threading.Thread(target=lambda: answers.append(request_completion(server, messages)))
    thread.start()
    short = []
    while thread.is_alive():
        prompt = make_text(SHORT_TOKENS, ("short", len(short), time.time()))
        short.append(request_completion(server, [{"role": "user", "content": prompt}], SHORT_ANSWER_TOKENS))
    return answers[0], short


def report(name: str, answer: TimedAnswer, short: list[TimedAnswer]) -> None:
    print(
        f"{name}: first token after {answer.ttft_s:.1f} s, {answer.cached_tokens} of {answer.prompt_tokens} tokens "
        f"reused; {len(short)} short requests beside it, first token after {median([a.ttft_s for a in short]):.2f} s "
        f"(median), {max(a.ttft_s for a in short):.2f} s at most",
        flush=True,
    )


def measure(server: BenchServer, tokens: int) -> None:
    request_completion(server, [{"role": "user", "content": make_text(SHORT_TOKENS, "first")}], 32)
    messages = make_conversation(tokens, ("long", tokens))
    cold, short = request_beside_short_ones(server, messages)
    report("cold", cold, short)
    server.wait_until_saved()
    server.kill_and_start()
    request_completion(server, [{"role": "user", "content": make_text(SHORT_TOKENS, "again")}], 4)
    answer = {"role": "assistant", "content": cold.text}
    messages = [*messages, answer, {"role": "user", "content": "And what is second?"}]
    warm, short = request_beside_short_ones(server, messages)
    report("after kill -9", warm, short)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--reuse", default="fast", choices=("fast", "exact"))
    parser.add_argument("--model", type=Path, default=Path.home() / "long-model", help="made there on the first run")
    options = parser.parse_args(arguments)
    build_model_once("llama", options.model, max_position_embeddings=options.tokens + (1 << 16))
    with tempfile.TemporaryDirectory(dir=options.model.parent) as folder, MemoryPoll() as memory:
        log = Path(folder) / "log"
        with run_warmline(options.model, Path(folder) / "home", log, "--reuse", options.reuse) as (server, _):
            measure(server, options.tokens)
        print(f"{options.reuse}: the GPU held {memory.bytes_max / 1e9:.1f} GB at most")
        for line in log.read_text(errors="replace").splitlines():
            if any(part in line for part in LOG_PARTS) and (
                "PERF" not in line or f"prompt={options.tokens // 1000}" in line
            ):
                print(line[:300])


if __name__ == "__main__":
    main()
