"""Computing for nobody before the first request comes, so that it finds kernels compiled.  Engine thread.

What a request meets: chunks, up to a full one; decode steps, alone and two in a batch; sampling; and, where attention
is sparse, a chunk and steps past the place where it begins to select.  From few tokens to many, and no further than the
time allows, as far as the last work tells how long the next one takes.
"""

import logging
import time
from collections.abc import Callable, Iterator

import mlx.core as mx

from warmline_backend.generation.sequence import Generation, Sequence
from warmline_backend.model.loader import ModelProblem
from warmline_backend.model.model import ServedModel
from warmline_backend.request.params import GenerationParams
from warmline_backend.scheduler.capacity import tokens_alone
from warmline_backend.scheduler.decode_batch import DecodeGroup
from warmline_backend.scheduler.scheduler import SchedulerSettings

log = logging.getLogger(__name__)

GPU_S_MAX = 60.0  # a full chunk of a very large model takes twenty
CPU_S_MAX = 0.2  # there is little to compile
FEW_TOKENS = 4
GROWTH = 4  # each prompt is so many times longer than the one before
STEPS = 2  # of decoding, in each work
BEYOND_TOKENS = 64  # what a sparse model computes past the place where it begins to select

Work = tuple[int, Callable[[], None]]  # how many tokens it computes, and does so


def warm_up(served: ServedModel, settings: SchedulerSettings, seconds_max: float | None = None) -> int:
    """Returns how many tokens were computed.  Raises ModelProblem where the device can't.

    May take longer than `seconds_max` (by default what the device deserves) by one token, and by kernels that compile.
    """
    began = time.monotonic()
    until = began + (_seconds_max() if seconds_max is None else seconds_max)
    computed, token_s = 0, 0.0
    for tokens, work in _works(served, settings):
        now = time.monotonic()
        if now + tokens * token_s > until:
            break
        try:
            work()
        except RuntimeError as error:  # mlx's, such as memory that ran out
            raise ModelProblem(
                f"this device can't compute {tokens} tokens, which was tried to warm up: {error}; a smaller "
                "--prefill-step-size takes less memory at a time"
            ) from error
        computed, token_s = computed + tokens, (time.monotonic() - now) / tokens
    mx.clear_cache()
    log.info("warmed up in %.1f s by computing %d tokens", time.monotonic() - began, computed)
    return computed


def prompt_lengths(step: int, index_topk: int, tokens_max: int) -> list[int]:
    """Of the prompts to warm up with, ascending: the last one has a full chunk, and goes beyond `index_topk` (0: the
    model's attention is not sparse).  None is longer than `tokens_max`.
    """
    longest = min(max(step, index_topk + BEYOND_TOKENS if index_topk else 0), tokens_max)
    lengths, length = [], FEW_TOKENS * GROWTH
    while length < longest:
        lengths.append(length)
        length *= GROWTH
    return [*lengths, longest] if longest > FEW_TOKENS else lengths


def _seconds_max() -> float:
    return GPU_S_MAX if mx.default_device().type == mx.DeviceType.gpu else CPU_S_MAX


def _works(served: ServedModel, settings: SchedulerSettings) -> Iterator[Work]:
    warming = _Warming(served, settings)
    yield 1, lambda: mx.eval(served.model(mx.array([[1]]), cache=served.layout.fresh()))  # how fast is it at all?
    yield FEW_TOKENS + STEPS, lambda: warming.answer(FEW_TOKENS)
    if served.layout.batches and not settings.exact:
        yield 2 * (FEW_TOKENS + STEPS), warming.answer_two
    for length in prompt_lengths(settings.prefill_step_size, served.index_topk, warming.tokens_max):
        yield length + STEPS, lambda length=length: warming.answer(length)  # type: ignore[misc]


class _Warming:
    """Requests as the scheduler runs them, but nobody's, and nothing is measured or kept of them."""

    def __init__(self, served: ServedModel, settings: SchedulerSettings) -> None:
        self._served, self._settings = served, settings

    @property
    def tokens_max(self) -> int:
        """How long a prompt may be that leaves room for its answer in the context and the memory budget."""
        room = tokens_alone(self._served, self._settings.memory_budget_bytes)
        return min(room, self._served.context_tokens_max or room) - STEPS - 1

    def answer(self, prompt_tokens: int) -> None:
        self._decode(self._prefilled(prompt_tokens, sampled=True))

    def answer_two(self) -> None:
        """In one batch; then one leaves it."""
        first, second = (self._prefilled(FEW_TOKENS, sampled=sampled) for sampled in (True, False))
        group, other = DecodeGroup.of(first), DecodeGroup.of(second)
        group.join(other)
        self._step(group)
        group.leave(second)
        self._step(group)

    def _prefilled(self, prompt_tokens: int, *, sampled: bool) -> Sequence:
        prompt = [1 + n % (self._served.vocabulary_size - 1) for n in range(prompt_tokens + 1)]
        params = GenerationParams(max_tokens=STEPS, ignore_eos=True)
        if sampled:
            params = GenerationParams(max_tokens=STEPS, ignore_eos=True, temperature=1.0, top_p=0.9, seed=0)
        settings = self._settings
        kv = self._served.fresh_kv(journals=settings.keeps_residents, grid=settings.grid)
        sequence = Sequence(Generation("warm-up", prompt, params, lambda _: None, kept=False), kv, self._served)
        while sequence.prefill_left > 0:
            sequence.prefill_chunk(settings.prefill_step_size)
        return sequence

    def _decode(self, sequence: Sequence) -> None:
        group = DecodeGroup.of(sequence)
        for _ in range(STEPS):
            self._step(group)

    def _step(self, group: DecodeGroup) -> None:
        for sequence, token, logprobs in group.step():
            sequence.text.add(token)
            sequence.note_first(logprobs)
            if sequence.fault.error is not None:
                raise RuntimeError(f"sampling failed: {sequence.fault.error}")
