"""Gates of several requests at once: each gets its own answer, and nobody waits for a client that left."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from warmline_run.smoke.check import CheckFailedError, CheckNotRunError, Target, format_excerpt
from warmline_run.smoke.checks.basic import WITH_LOGPROBS, check_forced_value
from warmline_run.smoke.client import NoAnswerError
from warmline_run.smoke.judge import find_disagreement
from warmline_run.smoke.responses import ChatCompletion, MalformedAnswerError, Message, StreamFold
from warmline_run.smoke.sse import SmokeEvent
from warmline_run.smoke.transcript import Transcript, compute_long_bytes, measure_text

T = TypeVar("T")

WORDS = ("apple", "river", "copper")
PREFILL_WAIT_SHARE = 0.25  # of the time that the long prompt should take, where no progress is told
PREFILL_WAIT_S_MIN = 0.05
FINISH_MARGIN_S = 0.1  # a small request that is answered so shortly before a long one has waited for it
LONGER_PROMPT_ADVICE = "ask for more with --long-tokens"


async def check_three_at_once(target: Target) -> str:
    """Plain answers against those alone; then answers that each have only one value, on servers that can do that."""
    prompts = [target.make_messages(f"together {word}", f"Say a sentence about {word}.") for word in WORDS]
    fields = {"max_tokens": target.scale.answer_tokens, **WITH_LOGPROBS}
    together = await _gather_all([target.client.complete(prompt, **fields) for prompt in prompts])
    alone = [await target.client.complete(prompt, **fields) for prompt in prompts]
    for word, mine, lone in zip(WORDS, together, alone, strict=True):
        if flaw := find_disagreement(mine, lone, target.tolerance):
            raise CheckFailedError(
                f"asked about {word} beside two others and alone, {flaw}: {format_excerpt(mine.full_text)}, "
                f"alone {format_excerpt(lone.full_text)}",
                "answers are mixed up, or batching makes the model another one",
            )
    if len({_answer_fingerprint(answer) for answer in alone}) < len(WORDS):
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


def _answer_fingerprint(answer: ChatCompletion) -> tuple[object, ...]:
    return answer.full_text, *(token.logprob for token in answer.tokens)


async def _gather_all(requests: list[Coroutine[Any, Any, T]]) -> list[T]:
    """All at once; where one fails the others are waited for, so that they don't run on into the next gate."""
    results = await asyncio.gather(*requests, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


class _BackgroundStream:
    """A stream that is read beside other requests, and can be dropped."""

    def __init__(self, target: Target, messages: list[Message]) -> None:
        self.prefilled_tokens = 0  # of the prompt, as far as that is told
        self._prefill_started = asyncio.Event()  # a part of it is computed
        self._output_started = asyncio.Event()  # all of it is
        self._fold = StreamFold()
        self._task = asyncio.create_task(self._read_stream(target, messages))

    async def wait_prefill_started(self, timeout_s: float) -> None:
        """Wait for that, or so long.  Raises Unanswered where the stream has failed."""
        await self._wait_for(self._prefill_started, timeout_s)

    async def wait_output_started(self, timeout_s: float) -> None:
        """The same, for the first of its answer."""
        await self._wait_for(self._output_started, timeout_s)

    async def _wait_for(self, event: asyncio.Event, timeout_s: float) -> None:
        waiting = asyncio.create_task(event.wait())
        await asyncio.wait({waiting, self._task}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._task.done():
            self._task.result()

    @property
    def has_output(self) -> bool:
        return self._output_started.is_set()

    async def disconnect(self) -> None:
        """Closes the connection, as a client does that gave up."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()

    async def _read_stream(self, target: Target, messages: list[Message]) -> None:
        async with target.client.open_stream(messages, max_tokens=4) as events:
            async for event in events:
                self._handle_event(event)

    def _handle_event(self, event: SmokeEvent) -> None:
        if (progress := event.progress) and progress[0] < progress[1]:
            self.prefilled_tokens = max(self.prefilled_tokens, progress[0])
        try:
            if event.data and self._fold.add(event.data):
                self._output_started.set()
        except MalformedAnswerError as error:
            raise NoAnswerError(f"the stream is none of chat completions: {error}", 200) from None
        if self.has_output or self.prefilled_tokens:
            self._prefill_started.set()


async def check_cancel(target: Target) -> str:
    """A long prompt; a small request beside it; the connection dropped in mid-prefill; the same again."""
    measured = await measure_text(target)
    text = Transcript(f"{target.seed} long", compute_long_bytes(target, measured)).render_turn(1)
    long: list[Message] = [{"role": "user", "content": text}]
    expected_s = len(text.encode()) / measured.bytes_per_token / measured.prefill_tokens_s
    listening = _BackgroundStream(target, long)
    try:
        await listening.wait_prefill_started(max(PREFILL_WAIT_S_MIN, expected_s * PREFILL_WAIT_SHARE))
        beside_s = await _time_small_request(target, "beside")
        await listening.wait_output_started(FINISH_MARGIN_S)
    finally:
        await listening.disconnect()
    if listening.has_output:
        _check_small_request_wait(target, beside_s)
    after_s = await _time_small_request(target, "after")
    again = await target.client.stream(long, max_tokens=4)
    kept = _check_reuse(target, listening.prefilled_tokens, again)
    return f"{kept}; small requests took {beside_s:.1f} s beside it, {after_s:.1f} s after"


async def _time_small_request(target: Target, moment: str) -> float:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    try:
        await target.client.complete(target.make_messages(f"cancel {moment}", "Hello!"), max_tokens=1)
    except NoAnswerError as error:
        raise CheckFailedError(
            f"a small request {moment} a long one whose client {'waits' if moment == 'beside' else 'left'}: {error}",
            "one request holds the server for all others",
        ) from None
    return loop.time() - began_s


def _check_small_request_wait(target: Target, wait_s: float) -> None:
    """Nothing was cancelled in mid-prefill: the long prompt was computed while the small request waited."""
    if wait_s > target.scale.quick_s:
        raise CheckFailedError(
            f"a small request waited {wait_s:.1f} s, until a long prompt was computed whole",
            "other clients time out behind every long prompt; if this one fits one prefill step, "
            f"{LONGER_PROMPT_ADVICE}",
        )
    raise CheckNotRunError(
        f"the long prompt was computed before its connection could be dropped: {LONGER_PROMPT_ADVICE}"
    )


def _check_reuse(target: Target, prefilled_tokens: int, repeated: ChatCompletion) -> str:
    cached, wanted = repeated.cached_tokens, max(1, target.expected_cached_tokens(prefilled_tokens))
    if not repeated.full_text and not repeated.finish_reason:
        raise CheckFailedError("asked again, the long prompt has an empty answer")
    if cached is None:
        raise CheckFailedError("usage does not say how much was reused (prompt_tokens_details.cached_tokens)")
    if target.grid_tokens and not target.expected_cached_tokens(prefilled_tokens):
        raise CheckNotRunError(f"too little was computed for anything to be kept in exact mode: {LONGER_PROMPT_ADVICE}")
    if cached < wanted:
        computed = f"{prefilled_tokens} tokens of" if prefilled_tokens else "a part of"
        raise CheckFailedError(
            f"{computed} the prompt had been computed when its client left; {cached} were reused when it came again",
            "a client that times out on a long prompt starts from nothing at each try, and never gets an answer",
        )
    return f"{cached} of {repeated.prompt_tokens} tokens were kept, and the same request was answered"
