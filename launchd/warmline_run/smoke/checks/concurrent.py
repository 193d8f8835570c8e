"""Gates of several requests at once: each gets its own answer, and nobody waits for a client that left."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from warmline_run.smoke.check import Failed, NotRun, Visit, shown
from warmline_run.smoke.checks.basic import WITH_LOGPROBS, forced
from warmline_run.smoke.client import Unanswered
from warmline_run.smoke.judge import disagreement
from warmline_run.smoke.responses import Answer, Malformed, Message, StreamFold
from warmline_run.smoke.sizing import long_bytes, measure
from warmline_run.smoke.sse import Event
from warmline_run.smoke.transcript import Transcript

T = TypeVar("T")

WORDS = ("apple", "river", "copper")
STARTED_SHARE = 0.25  # of the time that the long prompt should take, where no progress is told
STARTED_S_MIN = 0.05
AFTERWARDS_S = 0.1  # a small request that is answered so shortly before a long one has waited for it
MORE = "ask for more with --long-tokens"


async def three_at_once(visit: Visit) -> str:
    """Plain answers against those alone; then answers that each have only one value, on servers that can do that."""
    prompts = [visit.opening(f"together {word}", f"Say a sentence about {word}.") for word in WORDS]
    fields = {"max_tokens": visit.scale.answer_tokens, **WITH_LOGPROBS}
    together = await _gathered([visit.server.ask(prompt, **fields) for prompt in prompts])
    alone = [await visit.server.ask(prompt, **fields) for prompt in prompts]
    for word, mine, lone in zip(WORDS, together, alone, strict=True):
        if flaw := disagreement(mine, lone, visit.tolerance):
            raise Failed(
                f"asked about {word} beside two others and alone, {flaw}: {shown(mine.said)}, alone {shown(lone.said)}",
                "answers are mixed up, or batching makes the model another one",
            )
    if len({_fingerprint(answer) for answer in alone}) < len(WORDS):
        raise NotRun("two of the three questions have the very same answer, so a mix-up would not be seen")
    return f"each gets its own answer, the same as alone; {await _forced_at_once(visit)}"


async def _forced_at_once(visit: Visit) -> str:
    """What was seen.  That a server can't be held to a value at all is `exact_answer`'s to say."""
    try:
        await forced(visit, WORDS[0])
    except (Failed, NotRun):
        return "none can be held to a value"
    notes = await _gathered([forced(visit, word) for word in WORDS])
    return notes[0]


def _fingerprint(answer: Answer) -> tuple[object, ...]:
    return answer.said, *(token.logprob for token in answer.tokens)


async def _gathered(asked: list[Coroutine[Any, Any, T]]) -> list[T]:
    """All at once; where one fails the others are waited for, so that they don't run on into the next gate."""
    results = await asyncio.gather(*asked, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


class _Listening:
    """A stream that is read beside other requests, and can be dropped."""

    def __init__(self, visit: Visit, messages: list[Message]) -> None:
        self.done_tokens = 0  # of the prompt, as far as that is told
        self._started = asyncio.Event()  # a part of it is computed
        self._spoken = asyncio.Event()  # all of it is
        self._fold = StreamFold()
        self._task = asyncio.create_task(self._read(visit, messages))

    async def started(self, timeout_s: float) -> None:
        """Wait for that, or so long.  Raises Unanswered where the stream has failed."""
        await self._wait_for(self._started, timeout_s)

    async def spoken(self, timeout_s: float) -> None:
        """The same, for the first of its answer."""
        await self._wait_for(self._spoken, timeout_s)

    async def _wait_for(self, event: asyncio.Event, timeout_s: float) -> None:
        waiting = asyncio.create_task(event.wait())
        await asyncio.wait({waiting, self._task}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._task.done():
            self._task.result()

    @property
    def spoke(self) -> bool:
        return self._spoken.is_set()

    async def drop(self) -> None:
        """Closes the connection, as a client does that gave up."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()

    async def _read(self, visit: Visit, messages: list[Message]) -> None:
        async with visit.server.opened(messages, max_tokens=4) as events:
            async for event in events:
                self._hear(event)

    def _hear(self, event: Event) -> None:
        if (progress := event.progress) and progress[0] < progress[1]:
            self.done_tokens = max(self.done_tokens, progress[0])
        try:
            if event.data and self._fold.add(event.data):
                self._spoken.set()
        except Malformed as error:
            raise Unanswered(f"the stream is none of chat completions: {error}", 200) from None
        if self.spoke or self.done_tokens:
            self._started.set()


async def cancel(visit: Visit) -> str:
    """A long prompt; a small request beside it; the connection dropped in mid-prefill; the same again."""
    measured = await measure(visit)
    text = Transcript(f"{visit.seed} long", long_bytes(visit, measured)).said(1)
    long: list[Message] = [{"role": "user", "content": text}]
    expected_s = len(text.encode()) / measured.bytes_per_token / measured.prefill_tokens_s
    listening = _Listening(visit, long)
    try:
        await listening.started(max(STARTED_S_MIN, expected_s * STARTED_SHARE))
        beside_s = await _small(visit, "beside")
        await listening.spoken(AFTERWARDS_S)
    finally:
        await listening.drop()
    if listening.spoke:
        _judge_beside(visit, beside_s)
    after_s = await _small(visit, "after")
    again = await visit.server.stream(long, max_tokens=4)
    kept = _kept(visit, listening.done_tokens, again)
    return f"{kept}; small requests took {beside_s:.1f} s beside it, {after_s:.1f} s after"


async def _small(visit: Visit, where: str) -> float:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    try:
        await visit.server.ask(visit.opening(f"cancel {where}", "Hello!"), max_tokens=1)
    except Unanswered as error:
        raise Failed(
            f"a small request {where} a long one whose client {'waits' if where == 'beside' else 'left'}: {error}",
            "one request holds the server for all others",
        ) from None
    return loop.time() - began_s


def _judge_beside(visit: Visit, beside_s: float) -> None:
    """Nothing was cancelled in mid-prefill: the long prompt was computed while the small request waited."""
    if beside_s > visit.scale.quick_s:
        raise Failed(
            f"a small request waited {beside_s:.1f} s, until a long prompt was computed whole",
            f"other clients time out behind every long prompt; if this one fits one prefill step, {MORE}",
        )
    raise NotRun(f"the long prompt was computed before its connection could be dropped: {MORE}")


def _kept(visit: Visit, done_tokens: int, again: Answer) -> str:
    cached, wanted = again.cached_tokens, max(1, visit.kept(done_tokens))
    if not again.said and not again.finish:
        raise Failed("asked again, the long prompt has an empty answer")
    if cached is None:
        raise Failed("usage does not say how much was reused (prompt_tokens_details.cached_tokens)")
    if visit.grid_tokens and not visit.kept(done_tokens):
        raise NotRun(f"too little was computed for anything to be kept in exact mode: {MORE}")
    if cached < wanted:
        computed = f"{done_tokens} tokens of" if done_tokens else "a part of"
        raise Failed(
            f"{computed} the prompt had been computed when its client left; {cached} were reused when it came again",
            "a client that times out on a long prompt starts from nothing at each try, and never gets an answer",
        )
    return f"{cached} of {again.prompt_tokens} tokens were kept, and the same request was answered"
