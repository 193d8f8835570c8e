"""Checks of several requests at once: each gets its own answer, and none waits for a client that left."""

import asyncio
import re
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from warmline_run.smoke.check import CheckFailedError, CheckNotRunError, Target, format_excerpt, read_cached_tokens
from warmline_run.smoke.checks.basic import WITH_LOGPROBS, check_forced_value
from warmline_run.smoke.client import NoAnswerError
from warmline_run.smoke.judge import find_disagreement
from warmline_run.smoke.responses import ChatCompletion, Message, StreamFold
from warmline_run.smoke.transcript import compute_long_bytes, measure_text, render_turn

T = TypeVar("T")

WORDS = ("apple", "river", "copper")
PROGRESS = re.compile(rb"(\d+)/(\d+)")  # tokens done and in all, in a stream's comment
PREFILL_WAIT_SHARE = 0.25  # of the time that the long prompt should take, where no progress is reported
PREFILL_WAIT_S_MIN = 0.05
FINISH_MARGIN_S = 0.1  # a small request that is answered so shortly before a long one has waited for it
LONGER_PROMPT_ADVICE = "ask for more with --long-tokens"


async def check_three_at_once(target: Target) -> str:
    """Plain answers against lone ones; then answers that each have only one value, on servers that can force it."""
    prompts = [target.make_messages(f"together {word}", f"Say a sentence about {word}.") for word in WORDS]
    together = await _gather_all([target.complete(prompt, **WITH_LOGPROBS) for prompt in prompts])
    alone = [await target.complete(prompt, **WITH_LOGPROBS) for prompt in prompts]
    for word, mine, lone in zip(WORDS, together, alone, strict=True):
        if flaw := find_disagreement(mine, lone, target.tolerance):
            raise CheckFailedError(
                f"asked about {word} beside two others and alone, {flaw}: {format_excerpt(mine.full_text)}, "
                f"alone {format_excerpt(lone.full_text)}",
                "answers are mixed up, or batching makes the model another one",
            )
    if len({(answer.full_text, *(token.logprob for token in answer.tokens)) for answer in alone}) < len(WORDS):
        raise CheckNotRunError("two of the three questions have the very same answer, so a mix-up would not be seen")
    return f"each gets its own answer, the same as alone; {await _check_forced_at_once(target)}"


async def _check_forced_at_once(target: Target) -> str:
    """Check forced answers of concurrent requests.  A server without forced answers is `exact_answer`'s finding."""
    try:
        await check_forced_value(target, WORDS[0])
    except (CheckFailedError, CheckNotRunError):
        return "none can be held to a value"
    notes = await _gather_all([check_forced_value(target, word) for word in WORDS])
    return notes[0]


async def _gather_all(requests: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of concurrent requests; a failure is raised when all have ended: none runs on into the next check."""
    results = await asyncio.gather(*requests, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


class _BackgroundStream:
    """Stream that is read beside other requests, and can be dropped."""

    def __init__(self, target: Target, messages: list[Message]) -> None:
        self.prefilled_tokens = 0  # of the prompt, as far as the server reports
        self.prefill_started = asyncio.Event()
        self.output_started = asyncio.Event()
        self._fold = StreamFold()
        self._task = asyncio.create_task(self._read_stream(target, messages))

    async def wait_for(self, event: asyncio.Event, timeout_s: float) -> None:
        """Wait for one of the stream's events, or so long.  Raises NoAnswerError where the stream has failed."""
        event_wait = asyncio.create_task(event.wait())
        await asyncio.wait({event_wait, self._task}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        event_wait.cancel()
        if self._task.done():
            self._task.result()

    async def disconnect(self) -> None:
        """Close the connection, as a client does that gave up."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()

    async def _read_stream(self, target: Target, messages: list[Message]) -> None:
        async with target.client.open_stream(messages, max_tokens=4) as events:
            async for event in events:
                self.prefilled_tokens = max(self.prefilled_tokens, parse_progress(event.comment))
                if event.data and self._fold.add(event.data):
                    self.output_started.set()
                if self.output_started.is_set() or self.prefilled_tokens:
                    self.prefill_started.set()


def parse_progress(comment: bytes) -> int:
    """Tokens computed so far, where a comment reports a prefill that goes on; else 0."""
    match = PROGRESS.search(comment)
    return int(match[1]) if match and int(match[1]) < int(match[2]) else 0


async def check_cancel(target: Target) -> str:
    """A long prompt; a small request beside it; the connection dropped in mid-prefill; the same again."""
    sample = await measure_text(target)
    text = render_turn(f"{target.seed} long", 1, compute_long_bytes(target, sample))
    messages: list[Message] = [{"role": "user", "content": text}]
    expected_s = len(text.encode()) / sample.bytes_per_token / sample.prefill_tokens_s
    stream = _BackgroundStream(target, messages)
    try:
        await stream.wait_for(stream.prefill_started, max(PREFILL_WAIT_S_MIN, expected_s * PREFILL_WAIT_SHARE))
        beside_s = await _time_small_request(target, "beside")
        await stream.wait_for(stream.output_started, FINISH_MARGIN_S)
    finally:
        await stream.disconnect()
    if stream.output_started.is_set():
        _check_small_request_wait(target, beside_s)
    after_s = await _time_small_request(target, "after")
    repeated = await target.client.stream(messages, max_tokens=4)
    reuse = _check_reuse(target, stream.prefilled_tokens, repeated)
    return f"{reuse}; small requests took {beside_s:.1f} s beside it, {after_s:.1f} s after"


async def _time_small_request(target: Target, moment: str) -> float:
    began_s = time.monotonic()
    try:
        await target.client.complete(target.make_messages(f"cancel {moment}", "Hello!"), max_tokens=1)
    except NoAnswerError as error:
        raise CheckFailedError(
            f"a small request {moment} a long one whose client {'waits' if moment == 'beside' else 'left'}: {error}",
            "one request holds the server for all others",
        ) from None
    return time.monotonic() - began_s


def _check_small_request_wait(target: Target, wait_s: float) -> None:
    """Raise the outcome of a long prompt that was computed whole while the small request waited."""
    if wait_s > target.scale.quick_s:
        advice = "other clients time out behind every long prompt; if this one fits one prefill step"
        raise CheckFailedError(
            f"a small request waited {wait_s:.1f} s, until a long prompt was computed whole",
            f"{advice}, {LONGER_PROMPT_ADVICE}",
        )
    reason = "the long prompt was computed before its connection could be dropped"
    raise CheckNotRunError(f"{reason}: {LONGER_PROMPT_ADVICE}")


def _check_reuse(target: Target, prefilled_tokens: int, repeated: ChatCompletion) -> str:
    if not repeated.full_text and not repeated.finish_reason:
        raise CheckFailedError("asked again, the long prompt has an empty answer")
    cached, expected = read_cached_tokens(repeated), target.expected_cached_tokens(prefilled_tokens)
    if target.grid_tokens and not expected:
        raise CheckNotRunError(f"too little was computed for anything to be kept in exact mode: {LONGER_PROMPT_ADVICE}")
    if cached < max(1, expected):
        computed = f"{prefilled_tokens} tokens of" if prefilled_tokens else "a part of"
        raise CheckFailedError(
            f"{computed} the prompt had been computed when its client left; {cached} were reused when it came again",
            "a client that times out on a long prompt starts from nothing at each try, and never gets an answer",
        )
    return f"{cached} of {repeated.prompt_tokens} tokens were kept, and the same request was answered"
