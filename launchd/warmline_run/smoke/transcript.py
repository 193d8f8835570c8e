"""Transcript of a terminal agent's invented conversation: determined by its seed, of any length."""

import random
import time
from dataclasses import dataclass
from itertools import cycle, islice

from warmline_run.smoke.check import Target

INSTRUCTION = """You work in a Linux terminal on a task, step by step. Each turn you see what the terminal printed.
Answer with one JSON object: "analysis" (what you see), "plan" (what to do next), "commands" (a list of
{"keystrokes", "duration"}), "done".

The task: find out why the build of the project in /srv/app fails, mend it, and run its tests until all of them pass.
"""
NAMES = ("alpha", "cargo", "delta", "engine", "filter", "gateway", "handler", "index", "journal", "kernel", "ledger")
KINDS = ("c", "h", "py", "md", "toml", "log")
SAMPLE_BYTES = 2500  # lines of each kind
CONTEXT_SHARE_USED = 0.85  # of the context: texts differ
TURN_TOKENS = 48  # around a message, and around an answer


def _make_file_name(draw: random.Random) -> str:
    return f"{draw.choice(NAMES)}_{draw.choice(NAMES)}.{draw.choice(KINDS)}"


def _make_listing(draw: random.Random) -> list[str]:
    rows = [
        f"-rw-r--r-- 1 root root {draw.randrange(99_999):>6} Mar {draw.randrange(1, 29):>2} {_make_file_name(draw)}"
        for _ in range(6)
    ]
    return ["root@build:/srv/app# ls -l src", f"total {draw.randrange(900)}", *rows]


def _make_build(draw: random.Random) -> list[str]:
    rows = [
        f"src/{_make_file_name(draw)}:{draw.randrange(900)}:{draw.randrange(80)}: warning: "
        f"'{draw.choice(NAMES)}' is never used"
        for _ in range(4)
    ]
    return [
        "root@build:/srv/app# make -j4",
        *rows,
        f"make: *** [Makefile:{draw.randrange(200)}: {_make_file_name(draw)}] Error 1",
    ]


def _make_tests(draw: random.Random) -> list[str]:
    rows = [
        f"tests/test_{draw.choice(NAMES)}.py::test_{draw.choice(NAMES)} {draw.choice(['PASSED', 'FAILED'])} ({row}/6)"
        for row in range(6)
    ]
    return ["root@build:/srv/app# pytest -v", *rows, f"E   assert {draw.randrange(500)} == {draw.randrange(500)}"]


def _make_history(draw: random.Random) -> list[str]:
    rows = [
        f"{draw.getrandbits(40):010x} Make the {draw.choice(NAMES)} wait for the {draw.choice(NAMES)}" for _ in range(5)
    ]
    return ["root@build:/srv/app# git log --oneline", *rows]


def _make_dump(draw: random.Random) -> list[str]:
    rows = [f"{16 * row:08x}  " + " ".join(f"{draw.randrange(256):02x}" for _ in range(16)) for row in range(4)]
    return [f"root@build:/srv/app# hexdump {_make_file_name(draw)}", *rows]


MAKERS = (_make_listing, _make_build, _make_tests, _make_history, _make_dump)


def render_turn(seed: str, turn: int, turn_bytes: int) -> str:
    """The user's message of a turn, counted from 1: about `turn_bytes` long."""
    draw = random.Random(f"{seed} {turn}")
    head = f"[{seed} terminal] {INSTRUCTION}\n" if turn == 1 else ""
    screen = "Current terminal state:\n" if turn == 1 else "New terminal output:\n"
    lines: list[str] = []
    for make in islice(cycle(MAKERS), turn % len(MAKERS), None):
        if sum(map(len, lines)) + len(lines) >= turn_bytes - len(head):
            break
        lines += make(draw)
    return f"{head}{screen}" + "\n".join(lines) + f"\nroot@build:/srv/app# # step {turn}"


@dataclass(frozen=True)
class TextMeasurement:
    """Measurements of a sample of text."""

    bytes_per_token: float
    prefill_tokens_s: float  # rather too low, since the whole request's time is counted

    def estimate_bytes(self, tokens: int) -> int:
        return int(tokens * self.bytes_per_token)


async def measure_text(target: Target) -> TextMeasurement:
    """Have the server prefill a sample that no other request repeats."""
    text = render_turn(f"{target.seed} sample", 1, SAMPLE_BYTES)
    began_s = time.monotonic()
    answer = await target.client.complete([{"role": "user", "content": text}], max_tokens=1)
    tokens = max(1, answer.prompt_tokens)
    return TextMeasurement(len(text.encode()) / tokens, tokens / max(1e-6, time.monotonic() - began_s))


def compute_turn_bytes(target: Target, measurement: TextMeasurement) -> int:
    """Bytes of a turn of the transcript, so that all turns fit the context."""
    scale = target.scale
    if not target.context_tokens:
        return scale.turn_bytes
    room = int(CONTEXT_SHARE_USED * target.context_tokens) - scale.turns_count * (scale.answer_tokens + TURN_TOKENS)
    return min(scale.turn_bytes, measurement.estimate_bytes(max(0, room)) // scale.turns_count)


def compute_long_bytes(target: Target, measurement: TextMeasurement) -> int:
    """Bytes of the long prompt."""
    tokens, context = target.scale.long_tokens, target.context_tokens
    return measurement.estimate_bytes(min(tokens, int(CONTEXT_SHARE_USED * context)) if context else tokens)
