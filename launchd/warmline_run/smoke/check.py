"""Smoke checks ("gates"), their target and their outcomes."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warmline_common.settings.hints import add_home
from warmline_run.smoke.client import NoAnswerError, SmokeClient
from warmline_run.smoke.responses import ChatCompletion, MalformedAnswerError, Message

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"
REFUSAL_ADVICE = "see the server's log"


class CheckFailedError(Exception):
    """The server is wrong: the observation, and advice."""

    def __init__(self, seen: str, advice: str = "") -> None:
        super().__init__(seen)
        self.seen, self.advice = seen, advice


class CheckNotRunError(Exception):
    """Nothing was proved, for the stated reason."""


@dataclass(frozen=True)
class Scale:
    """Sizes of the checks' prompts."""

    turns_count: int = 12
    turn_bytes: int = 3000
    answer_tokens: int = 32
    long_tokens: int = 12_288  # of the prompt whose connection is dropped
    quick_s: float = 2.0  # limit of a small request beside a long one


@dataclass
class Target:
    """One run over one server.  Checks run one after another, on one event loop."""

    client: SmokeClient
    seed: str  # at the top of each prompt: prompts of another seed are not cached
    scale: Scale = field(default_factory=Scale)
    tolerance: float = 0.0  # nats; 0: by the type of the log-probabilities
    grid_tokens: int = 0  # cached prefixes end at multiples of this; 0: at any token
    home: Path | None = None  # that the server may run from
    may_restart: bool = False
    context_tokens: int = 0  # that a prompt and its answer may have; 0: not known

    def expected_cached_tokens(self, tokens: int, slack: int = 0) -> int:
        """Least number of computed tokens that should be reused next time, with `slack` tolerated."""
        tokens = max(0, tokens - slack)
        return tokens - tokens % self.grid_tokens if self.grid_tokens else tokens

    def require_step(self, tokens: int, slack: int = 0) -> None:
        """Raise CheckNotRunError where none of so many computed tokens can be reused: exact mode keeps whole steps."""
        if self.grid_tokens and not self.expected_cached_tokens(tokens, slack):
            raise CheckNotRunError(
                f"a prompt of {tokens} tokens is too short for reuse in exact mode, which keeps whole steps of "
                f"{self.grid_tokens}"
            )

    def make_messages(self, check_name: str, text: str) -> list[Message]:
        """A conversation of this run and check alone."""
        return [{"role": "user", "content": f"[{self.seed} {check_name}] {text}"}]

    async def complete(self, messages: list[Message], **fields: Any) -> ChatCompletion:
        """A chat completion of the scale's length.  Raises NoAnswerError."""
        return await self.client.complete(messages, max_tokens=self.scale.answer_tokens, **fields)


@dataclass(frozen=True)
class Check:
    """`run` returns a line for people, or raises CheckFailedError, CheckNotRunError or NoAnswerError."""

    name: str
    proves: str
    run: Callable[[Target], Awaitable[str]]

    async def evaluate(self, target: Target) -> "Outcome":
        """Run the check; a failure is an outcome, so that the other checks are run."""
        began_s, advice = time.monotonic(), ""
        try:
            result, detail = PASSED, await self.run(target)
        except CheckFailedError as failure:
            result, detail, advice = FAILED, failure.seen, failure.advice
        except CheckNotRunError as reason:
            result, detail = NOT_RUN, str(reason)
        except NoAnswerError as error:
            result, detail, advice = FAILED, str(error), REFUSAL_ADVICE
        except MalformedAnswerError as error:
            result, detail = FAILED, f"the answer is not OpenAI's: {error}"
        except TimeoutError:
            result, detail, advice = FAILED, f"not done within {target.client.timeout_s:g} s", "see --timeout-s"
        return Outcome(self, result, time.monotonic() - began_s, detail, add_home(advice, target.home or ""))


@dataclass(frozen=True)
class Outcome:
    """Outcome of one check.  `advice` is "" unless it failed."""

    check: Check
    result: str  # PASSED, FAILED or NOT_RUN
    seconds: float
    detail: str
    advice: str = ""


def read_cached_tokens(answer: ChatCompletion) -> int:
    """Reused tokens of an answer's prompt.  Raises CheckFailedError where usage lacks them."""
    if answer.cached_tokens is None:
        raise CheckFailedError("usage does not say how much was reused (prompt_tokens_details.cached_tokens)")
    return answer.cached_tokens


def format_excerpt(text: str, limit: int = 60) -> str:
    """Beginning of an answer for a message."""
    return repr(text if len(text) <= limit else text[:limit] + "...")
