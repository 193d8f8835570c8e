"""Log of a storm, written by its threads, and its evaluation."""

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from support.pair.clients import Asked
from support.pair.pair import Reply
from support.storm.prompts import Question

LONG_PROMPT_TOKENS = 1000


@dataclass(frozen=True)
class Latency:
    """Latency of one small request, and the concurrent work of the engine."""

    seconds: float
    beside: str  # "a prefill", "none", "a recovery"


@dataclass
class Log:
    """Counts, answers and problems.  Any thread."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    replies: list[tuple[Question, Reply]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # violations
    latencies: list[Latency] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)  # set at the end of the storm: threads stop
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _watched: list[Asked] = field(default_factory=list)
    _disturbances: list[list[float]] = field(default_factory=list)  # [from, until], time.monotonic()

    def count(self, outcome: str) -> None:
        with self._lock:
            self.counts[outcome] += 1

    def problem(self, text: str) -> None:
        with self._lock:
            self.problems.append(text)

    def watch(self, asked: Asked) -> None:
        with self._lock:
            self._watched.append(asked)

    def forget(self, asked: Asked) -> None:
        with self._lock:
            self._watched.remove(asked)

    def ended(self, asked: Asked, question: Question) -> bool:
        """Record the end of a request; whether it was answered."""
        if not asked.over:
            self.count("hung")
            self.problem(f"hung, for {time.monotonic() - asked.moved:.0f} s: {asked.told}")
            return False
        if asked.done and not asked.error:
            self.count("answered")
            with self._lock:
                self.replies.append((question, asked.reply))
            return True
        if 400 <= asked.status < 408:
            self.problem(f"a good request was refused: {asked.told}")
        if asked.error:
            self.count(f"told {asked.status}" + (" after content" if asked.text else f": {shorten(asked.error)}"))
        elif self.disturbed_since(asked.began):
            self.count("cut off with the proxy")
        else:
            self.count("cut off")
            self.problem(f"ended without a word: {asked.told}")
        return False

    @contextmanager
    def disturbance(self, fault: str) -> Iterator[None]:
        """Record the time from a fault to the recovery."""
        span = [time.monotonic(), float("inf")]
        with self._lock:
            self.faults[fault] += 1
            self._disturbances.append(span)
        yield
        span[1] = time.monotonic()

    def disturbed_since(self, since: float) -> bool:
        with self._lock:
            return any(until >= since for _, until in self._disturbances)

    def prefilling(self) -> bool:
        """Say whether a watched request has a long prompt in prefill."""
        with self._lock:
            watched = list(self._watched)
        return any(is_prefilling(asked) for asked in watched)


def is_prefilling(asked: Asked) -> bool:
    comments = [event.comment for event in asked.events[-1:] if event.comment.startswith(b"prefill ")]
    if asked.text or asked.over or not comments:
        return False
    done, total = map(int, comments[0].split()[-1].split(b"/"))
    return total >= LONG_PROMPT_TOKENS and done < total - 1


def shorten(message: str) -> str:
    return re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "#", message)[:60]


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0
