"""Smoke checks ("gates"): their results, and the target that all are given."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warmline_run.smoke.client import SmokeClient

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"


class CheckFailedError(Exception):
    """The server is wrong: what was seen, and what to do about it."""

    def __init__(self, seen: str, advice: str = "") -> None:
        super().__init__(seen)
        self.seen, self.advice = seen, advice


class CheckNotRunError(Exception):
    """Nothing was proved, for the reason that this states."""


@dataclass(frozen=True)
class Scale:
    """Sizes of the checks' prompts."""

    turns_count: int = 12
    turn_bytes: int = 3000
    answer_tokens: int = 32
    long_tokens: int = 12_288  # of the prompt whose connection is dropped
    quick_s: float = 2.0  # what a small request may take beside a long one, whatever that takes


@dataclass
class Target:
    """One run over one server.  Gates run one after another, on one event loop."""

    client: SmokeClient
    seed: str  # stands at the top of each prompt: another seed meets nothing that is cached
    scale: Scale = field(default_factory=Scale)
    tolerance: float = 0.0  # nats; 0: by the type of the log-probabilities
    grid_tokens: int = 0  # what is kept ends at multiples of this; 0: at any token
    home: Path | None = None  # that the server may run from
    may_restart: bool = False
    context_tokens: int = 0  # that a prompt and its answer may have; 0: not known

    def expected_cached_tokens(self, tokens: int, slack: int = 0) -> int:
        """Least number of computed tokens that should be reused next time, with `slack` tolerated."""
        tokens = max(0, tokens - slack)
        return tokens - tokens % self.grid_tokens if self.grid_tokens else tokens

    def make_messages(self, check_name: str, text: str) -> list[dict[str, Any]]:
        """A conversation of this run and gate alone."""
        return [{"role": "user", "content": f"[{self.seed} {check_name}] {text}"}]


@dataclass(frozen=True)
class Check:
    """`check` returns a line of what was seen, or raises Failed, NotRun, or Unanswered."""

    name: str
    proves: str
    run: Callable[[Target], Awaitable[str]]


@dataclass(frozen=True)
class Outcome:
    """Outcome of one check.  `advice` is "" unless it failed."""

    check: Check
    result: str  # PASSED, FAILED or NOT_RUN
    seconds: float
    detail: str
    advice: str = ""


def format_excerpt(text: str, limit: int = 60) -> str:
    """As an error message shows an answer."""
    return repr(text if len(text) <= limit else text[:limit] + "...")
