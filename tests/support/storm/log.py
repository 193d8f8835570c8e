"""Log of a storm, written by its threads, and its evaluation."""

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from support.pair.clients import ClientRequest
from support.pair.pair import Reply
from support.storm.prompts import StormPrompt

LONG_PROMPT_TOKENS = 1000


@dataclass(frozen=True)
class Latency:
    """Latency of one small request, and the concurrent work of the engine."""

    seconds: float
    beside: str  # "a prefill", "none", "a recovery"


@dataclass
class StormLog:
    """Counts, answers and problems.  Any thread."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    replies: list[tuple[StormPrompt, Reply]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # violations
    latencies: list[Latency] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)  # set at the end of the storm: threads stop
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _watched: list[ClientRequest] = field(default_factory=list)
    _disturbances: list[list[float]] = field(default_factory=list)  # [from, until], time.monotonic()

    def count(self, outcome: str) -> None:
        with self._lock:
            self.counts[outcome] += 1

    def add_problem(self, text: str) -> None:
        with self._lock:
            self.problems.append(text)

    def watch(self, request: ClientRequest) -> None:
        with self._lock:
            self._watched.append(request)

    def unwatch(self, request: ClientRequest) -> None:
        with self._lock:
            self._watched.remove(request)

    def record_end(self, request: ClientRequest, prompt: StormPrompt) -> bool:
        """Record the end of a request; whether it was answered."""
        if not request.is_ended:
            self.count("hung")
            self.add_problem(f"hung, for {time.monotonic() - request.last_byte_at:.0f} s: {request.summary}")
            return False
        if request.is_complete and not request.error:
            self.count("answered")
            with self._lock:
                self.replies.append((prompt, request.reply))
            return True
        if 400 <= request.status < 408:
            self.add_problem(f"a good request was refused: {request.summary}")
        if request.error:
            self.count(f"told {request.status}" + (" after content" if request.text else f": {shorten(request.error)}"))
        elif self.is_disturbed_since(request.started_at):
            self.count("cut off with the proxy")
        else:
            self.count("cut off")
            self.add_problem(f"ended without a word: {request.summary}")
        return False

    @contextmanager
    def record_disturbance(self, fault: str) -> Iterator[None]:
        """Record the time from a fault to the recovery."""
        span = [time.monotonic(), float("inf")]
        with self._lock:
            self.faults[fault] += 1
            self._disturbances.append(span)
        yield
        span[1] = time.monotonic()

    def is_disturbed_since(self, since: float) -> bool:
        with self._lock:
            return any(until >= since for _, until in self._disturbances)

    def has_long_prefill(self) -> bool:
        """Say whether a watched request has a long prompt in prefill."""
        with self._lock:
            watched = list(self._watched)
        return any(is_prefilling(request) for request in watched)


def is_prefilling(request: ClientRequest) -> bool:
    comments = [event.comment for event in request.events[-1:] if event.comment.startswith(b"prefill ")]
    if request.text or request.is_ended or not comments:
        return False
    done, total = map(int, comments[0].split()[-1].split(b"/"))
    return total >= LONG_PROMPT_TOKENS and done < total - 1


def shorten(message: str) -> str:
    return re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "#", message)[:60]


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0
