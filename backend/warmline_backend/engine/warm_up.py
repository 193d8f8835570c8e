"""Warm-up: run all kinds of work once, so that kernels are compiled before the first request.  Engine thread.

The jobs: chunks, up to a full one; decode steps, alone and in a batch; sampling; and, for sparse attention, a chunk
and steps past the length where selection begins.  From few tokens to many, as far as the time allows, judged by the
duration of the last job.  The chunks' durations are kept for estimates until requests are measured.
"""

import logging
import time
from collections.abc import Callable, Iterator

import mlx.core as mx

from warmline_backend.generation.rates import Rates
from warmline_backend.generation.sequence import GenerationRequest, Sequence, prefill_last_chunks
from warmline_backend.model.loader import ModelError
from warmline_backend.model.model import ServedModel
from warmline_backend.request.params import GenerationParams
from warmline_backend.scheduler.capacity import sequence_tokens_max
from warmline_backend.scheduler.decoding.decode_group import DecodeGroup
from warmline_backend.scheduler.scheduler import SchedulerSettings
from warmline_common.protocol.tokens import TokenArray

log = logging.getLogger(__name__)

GPU_S_MAX = 60.0  # a full chunk of a very large model takes 20
CPU_S_MAX = 0.2  # there is little to compile
SHORT_PROMPT_TOKENS = 4
GROWTH = 4  # each prompt is so many times longer than the one before
DECODE_STEPS = 2  # per job
REPEAT_S_MAX = 2.0  # a longest prompt that takes no more is computed again: its kernels are compiled then
SPARSE_MARGIN_TOKENS = 64  # computed past the length where a sparse model's selection begins

WarmUpJob = tuple[int, Callable[[], None]]  # tokens to compute, and the work


def warm_up(
    served: ServedModel, settings: SchedulerSettings, seconds_max: float | None = None, rates: Rates | None = None
) -> int:
    """Run the jobs and return the tokens computed; chunks are recorded in `rates`.  Raises ModelError where it fails.

    May exceed `seconds_max` (default: by device) by one token, and by kernels that compile.
    """
    began = time.monotonic()
    until = began + (_seconds_max() if seconds_max is None else seconds_max)
    computed, token_s = 0, 0.0
    for tokens, work in _make_jobs(_WarmUpRunner(served, settings, rates or Rates())):
        now = time.monotonic()
        if now + tokens * token_s > until:
            break
        try:
            work()
        except RuntimeError as error:  # mlx's, such as memory that ran out
            raise ModelError(
                f"this device can't compute {tokens} tokens, which was tried to warm up: {error}; a smaller "
                "--prefill-step-size takes less memory at a time"
            ) from error
        computed, token_s = computed + tokens, (time.monotonic() - now) / tokens
    mx.clear_cache()
    log.info("warmed up in %.1f s by computing %d tokens", time.monotonic() - began, computed)
    return computed


def prompt_lengths(step: int, index_topk: int, tokens_max: int) -> list[int]:
    """Ascending lengths of the warm-up prompts, at most `tokens_max`.

    The last has a full chunk, and exceeds `index_topk` (0: attention is not sparse).
    """
    longest = min(max(step, index_topk + SPARSE_MARGIN_TOKENS if index_topk else 0), tokens_max)
    lengths, length = [], SHORT_PROMPT_TOKENS * GROWTH
    while length < longest:
        lengths.append(length)
        length *= GROWTH
    return [*lengths, longest] if longest > SHORT_PROMPT_TOKENS else lengths


def _seconds_max() -> float:
    return GPU_S_MAX if mx.default_device().type == mx.DeviceType.gpu else CPU_S_MAX


def _make_jobs(runner: "_WarmUpRunner") -> Iterator[WarmUpJob]:
    served, settings = runner.served, runner.settings
    yield 1, lambda: mx.eval(served.model(mx.array([[1]]), cache=served.layout.make_empty_cache()))
    yield SHORT_PROMPT_TOKENS + DECODE_STEPS, lambda: runner.run_prompt(SHORT_PROMPT_TOKENS)
    if served.layout.is_batchable and not settings.exact:
        yield 3 * (SHORT_PROMPT_TOKENS + DECODE_STEPS), runner.run_batch_of_three
    for length in prompt_lengths(settings.prefill_step_size, served.index_topk, runner.prompt_tokens_max):
        yield length + DECODE_STEPS, lambda length=length: runner.run_prompt(length)  # type: ignore[misc]
    if mx.default_device().type == mx.DeviceType.gpu and runner.last_prefill_s <= REPEAT_S_MAX:
        yield runner.last_tokens + DECODE_STEPS, lambda: runner.run_prompt(runner.last_tokens)


class _WarmUpRunner:
    """Runs sequences as the scheduler does, without residents."""

    def __init__(self, served: ServedModel, settings: SchedulerSettings, rates: Rates) -> None:
        self.served, self.settings, self._rates = served, settings, rates
        self.last_tokens, self.last_prefill_s = SHORT_PROMPT_TOKENS, 0.0  # of the last prompt

    @property
    def prompt_tokens_max(self) -> int:
        """Longest prompt that leaves room for its answer in the context and the memory budget."""
        room = sequence_tokens_max(self.served, self.settings.memory_budget_bytes)
        return min(room, self.served.context_tokens_max or room) - DECODE_STEPS - 1

    def run_prompt(self, prompt_tokens: int) -> None:
        group = DecodeGroup.from_sequences([self._prefill(prompt_tokens, sampled=True)])
        for _ in range(DECODE_STEPS):
            self._step(group)

    def run_batch_of_three(self) -> None:
        """Prefill two sequences in one batch, decode them with a third; then one leaves."""
        both = [self._make_sequence(SHORT_PROMPT_TOKENS + n, sampled=n > 0) for n in range(2)]
        prefill_last_chunks(both)
        group = DecodeGroup.from_sequences(both)
        group.merge(DecodeGroup.from_sequences([self._prefill(SHORT_PROMPT_TOKENS, sampled=True)]))
        self._step(group)
        group.remove(both[:1])
        self._step(group)

    def _prefill(self, prompt_tokens: int, *, sampled: bool) -> Sequence:
        sequence = self._make_sequence(prompt_tokens, sampled=sampled)
        prefill_began = time.monotonic()
        while sequence.prefill_tokens_left > 0:
            began = time.monotonic()
            tokens = sequence.prefill_chunk(self.settings.prefill_step_size)
            self._rates.record_chunk(sequence.kv.length, tokens, time.monotonic() - began)
        self.last_tokens, self.last_prefill_s = prompt_tokens, time.monotonic() - prefill_began
        return sequence

    def _make_sequence(self, prompt_tokens: int, *, sampled: bool) -> Sequence:
        prompt = TokenArray(1 + n % (self.served.vocabulary_size - 1) for n in range(prompt_tokens + 1))
        sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 0} if sampled else {}
        params = GenerationParams(max_tokens=DECODE_STEPS, ignore_eos=True, **sampling)  # type: ignore[arg-type]
        request = GenerationRequest("warm-up", prompt, params, lambda _: None, leaves_resident=False)
        kv = self.served.make_kv(journals=self.settings.keeps_residents, grid=self.settings.grid)
        return Sequence(request, kv, self.served)

    def _step(self, group: DecodeGroup) -> None:
        for sequence, token, logprobs in group.step():
            sequence.output_parser.add(token)
            sequence.record_first_logits(logprobs)
            if sequence.sampler_fault.error is not None:
                raise RuntimeError(f"sampling failed: {sequence.sampler_fault.error}")
