"""A terminal agent's conversation, made up: the same for the same seed, of any length.  Pure."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

from warmline_run.smoke.check import Target

INSTRUCTION = """You work in a Linux terminal on a task, step by step. Each turn you see what the terminal printed.
Answer with one JSON object: "analysis" (what you see), "plan" (what to do next), "commands" (a list of
{"keystrokes", "duration"}), "done".

The task: find out why the build of the project in /srv/app fails, mend it, and run its tests until all of them pass.
"""
NAMES = ("alpha", "cargo", "delta", "engine", "filter", "gateway", "handler", "index", "journal", "kernel", "ledger")
KINDS = ("c", "h", "py", "md", "toml", "log")


class Transcript:
    """Turns of a terminal session."""

    def __init__(self, seed: str, turn_bytes: int) -> None:
        self._seed, self._turn_bytes = seed, turn_bytes

    def render_turn(self, turn: int) -> str:
        """The user's message of a turn, counted from 1: about `turn_bytes` long."""
        draw = random.Random(f"{self._seed} {turn}")
        head = f"[{self._seed} terminal] {INSTRUCTION}\n" if turn == 1 else ""
        screen = "Current terminal state:\n" if turn == 1 else "New terminal output:\n"
        makers: list[Callable[[random.Random], list[str]]] = [
            _make_listing,
            _make_build,
            _make_tests,
            _make_history,
            _make_dump,
        ]
        lines: list[str] = []
        for make in cycle(makers[turn % len(makers) :] + makers[: turn % len(makers)]):
            if sum(map(len, lines)) + len(lines) >= self._turn_bytes - len(head):
                break
            lines += make(draw)
        return f"{head}{screen}" + "\n".join(lines) + f"\nroot@build:/srv/app# # step {turn}"


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


SAMPLE_BYTES = 2500  # some of all that transcripts are made of
CONTEXT_SHARE_USED = 0.85  # of the context that is used: texts differ
TURN_TOKENS = 48  # around a message, and around an answer


@dataclass(frozen=True)
class TextMeasurement:
    """Measurements of a sample of text."""

    bytes_per_token: float
    prefill_tokens_s: float  # too low rather than too high: with all that a request takes

    def estimate_bytes(self, tokens: int) -> int:
        return int(tokens * self.bytes_per_token)


async def measure_text(target: Target) -> TextMeasurement:
    """Has the server read a text that nothing is kept of."""
    text = Transcript(f"{target.seed} sample", SAMPLE_BYTES).render_turn(1)
    began_s = asyncio.get_running_loop().time()
    answer = await target.client.complete([{"role": "user", "content": text}], max_tokens=1)
    tokens = max(1, answer.prompt_tokens)
    return TextMeasurement(len(text.encode()) / tokens, tokens / max(1e-6, asyncio.get_running_loop().time() - began_s))


def compute_turn_bytes(target: Target, measurement: TextMeasurement) -> int:
    """Bytes of a turn of the transcript, so that all turns fit the context."""
    wanted = target.scale.turn_bytes
    if not target.context_tokens:
        return wanted
    turns = target.scale.turns_count
    room = int(CONTEXT_SHARE_USED * target.context_tokens) - turns * (target.scale.answer_tokens + TURN_TOKENS)
    return min(wanted, measurement.estimate_bytes(max(0, room)) // turns)


def compute_long_bytes(target: Target, measurement: TextMeasurement) -> int:
    """Bytes of the long prompt."""
    wanted, context = target.scale.long_tokens, target.context_tokens
    return measurement.estimate_bytes(min(wanted, int(CONTEXT_SHARE_USED * context)) if context else wanted)
