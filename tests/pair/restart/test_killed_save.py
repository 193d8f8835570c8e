"""SIGKILL at any moment of a save: only that save is lost, answers are right, the home is clean."""

import http.client
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.pair.pair import FolderOf, Message, Pair
from warmline_common.protocol.tokens import TOKEN_BYTES, count_common_tokens

SYSTEM_TOKENS = 600
ATTEMPTS_MAX = 5  # a draft lives for a millisecond or two
LOOK_INTERVAL_S = 0.0005  # else looking would take a core from what is looked at
Reached = Callable[[Pair], bool]
Moment = Callable[[Pair], Reached]


def list_files(pair: Pair, pattern: str) -> set[Path]:
    return set(pair.home.segments.rglob(pattern))


def until_draft(pair: Pair) -> Reached:
    return lambda now: bool(list_files(now, ".*.tmp"))


def until_file(pair: Pair) -> Reached:
    before = list_files(pair, "*.safetensors")
    return lambda now: bool(list_files(now, "*.safetensors") - before)


def until_second_file(pair: Pair) -> Reached:
    before = len(list_files(pair, "*.safetensors"))
    return lambda now: len(list_files(now, "*.safetensors")) - before >= 2


def until_elapsed(seconds: float) -> Moment:
    def make(pair: Pair) -> Reached:
        start = time.monotonic()
        return lambda now: time.monotonic() - start >= seconds

    return make


SEED = 20261127
RANDOM = random.Random(SEED)
MOMENTS: list[Moment] = [
    until_draft,
    until_file,
    until_elapsed(RANDOM.uniform(0.0, 0.05)),
]


class PairKiller(threading.Thread):
    """Thread that kills the pair at a moment; it runs from before the request, so even a short moment is met."""

    def __init__(self, pair: Pair, moment: Moment) -> None:
        super().__init__(daemon=True)
        self._pair, self._moment = pair, moment
        self._reached = moment(pair)
        self.save_ended = threading.Event()
        self.killed = False
        self.start()

    def run(self) -> None:
        while not self.save_ended.is_set():
            if self._reached(self._pair):
                self._pair.kill()
                self.killed = True
                return
            time.sleep(LOOK_INTERVAL_S)


def ask_and_kill(pair: Pair, messages: list[Message], moment: Moment, **answer: object) -> bool:
    """True if the moment came before the save was over."""
    killer = PairKiller(pair, moment)
    try:
        pair.chat(messages, **answer)
        pair.settle()
    except (OSError, http.client.HTTPException):  # killed: before the client had its answer, or while we looked
        pass
    killer.save_ended.set()
    killer.join()
    return killer.killed


def verify_home(pair: Pair) -> None:
    assert pair.cachectl("verify", "--deep")["findings"] == []


# A first save of several files is one of a segment and its checkpoints; a kill at each step of one of several segments
# is in tests/crash.
@pytest.mark.parametrize(
    ("family", "moments"),
    [("llama", MOMENTS), ("qwen3_5", [until_second_file])],
)
def test_kill_9_during_a_save(family: str, moments: list[Moment], tiny_folder: FolderOf, tmp_path: Path) -> None:
    answer = {"max_tokens": 8, "ignore_eos": True}
    messages: list[Message] = [{"role": "system", "content": "".join(RANDOM.choices("abcdefgh", k=SYSTEM_TOKENS))}]
    durable = b""
    with Pair(tmp_path / "home", tiny_folder(family), "--prefill-step-size", "16") as pair:
        for turn, moment in enumerate(moments):
            killed = False
            for attempt in range(ATTEMPTS_MAX):
                noise = "".join(RANDOM.choices("xyz", k=300))
                messages.append({"role": "user", "content": f"question {turn}.{attempt}: {noise}"})
                pair.forget_residents()
                killed = ask_and_kill(pair, messages, moment, **answer)
                if killed:
                    pair.start()
                durable, text = check_after(pair, messages, durable if family == "llama" else b"", **answer)
                messages.append({"role": "assistant", "content": text})
                if killed:
                    break
            assert killed, f"moment {turn} was never met"


def check_after(pair: Pair, messages: list[Message], durable: bytes, **answer: object) -> tuple[bytes, str]:
    """Check a clean home, reuse of durable tokens and the cold answer; (durable tokens, answer)."""
    verify_home(pair)
    assert not list_files(pair, ".*.tmp"), "drafts are swept at the start"
    warm = pair.chat(messages, **answer)
    assert warm.text == pair.ask_backend(messages, **answer).text, f"seed {SEED}"
    assert warm.cached >= count_common_tokens(durable, pair.render_prompt(messages).tokens)
    pair.settle()
    verify_home(pair)
    held = pair.longest_resident()
    assert len(held) > len(messages[0]["content"]) * TOKEN_BYTES
    return held, warm.text
