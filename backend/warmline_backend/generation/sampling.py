"""Sampling of one sequence: mlx-lm's filters and penalties, with a random key per sequence.  Engine thread.

mlx-lm draws from one global random state, so its draws depend on what else is running.  Here each token of an answer is
drawn with a key of its own, by seed and place: a seed gives the same draws alone and in a batch, one token a step or
several.  Arrays are made on the stepping thread: lazy arrays can't be evaluated on another.
"""

import secrets
from collections.abc import Callable, Collection
from functools import cache, partial

import mlx.core as mx
import numpy as np
import xxhash
from mlx_lm import sample_utils

from warmline_backend.request.params import GenerationParams
from warmline_common.protocol.messages import FirstLogits

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

_ALL_TOKENS = 1 << 31
_SEED_BITS = 64
_UNIFORM_MIN = 2.0**-33  # below the least number above 0 that mlx draws
LIKELIEST_MAX = 32  # tokens listed in `FirstLogits`
LOGPROB_MIN = -9999.0  # OpenAI's for a token that could not be drawn


class SamplerFault:
    """The first exception of a sequence's sampler or processors, so that its batch goes on without it.

    After a fault the sequence is decoded greedily and unpenalized, which keeps the batch's shape; the scheduler reads
    `error` after each step and ends the request.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def run(self, inner: Callable[[], mx.array], fallback: Callable[[], mx.array]) -> mx.array:
        """The array of `inner`; after a fault that of `fallback`."""
        if self.error is None:
            try:
                return inner()
            except Exception as error:  # noqa: BLE001  no exception may reach the batch's other sequences
                self.error = error
        return fallback()

    def guard_processor(self, inner: LogitsProcessor) -> LogitsProcessor:
        return lambda tokens, logits: self.run(lambda: inner(tokens, logits), lambda: logits)


def make_sampler(params: GenerationParams, fault: SamplerFault) -> Sampler:
    """Make a sampler of [rows, vocabulary] log-probabilities, for one sequence and one run.

    Greedy is mlx-lm's own `greedy_sampler` object: a batch that has only that one samples in one call.
    """
    greedy: Sampler = sample_utils.greedy_sampler
    return greedy if params.is_greedy else SeededSampler(params, fault)


class SeededSampler:
    """mlx-lm's filters in their order, then a draw with the key of the token's place.

    `position`: place in the answer of the next token to draw, one more with each row that is drawn.
    """

    def __init__(self, params: GenerationParams, fault: SamplerFault) -> None:
        self._params, self._fault, self.position = params, fault, 0
        seed = secrets.randbits(_SEED_BITS) if params.seed is None else params.seed
        self._seed = (seed % (1 << _SEED_BITS)).to_bytes(_SEED_BITS // 8, "little")

    def __call__(self, logprobs: mx.array) -> mx.array:
        sampled = self._fault.run(lambda: self._draw(logprobs), lambda: mx.argmax(logprobs, axis=-1))
        self.position += logprobs.shape[0]
        return sampled

    def _draw(self, logprobs: mx.array) -> mx.array:
        params = self._params
        if 0 < params.top_p < 1:
            logprobs = sample_utils.apply_top_p(logprobs, params.top_p)
        if params.min_p > 0:
            logprobs = sample_utils.apply_min_p(logprobs, params.min_p)
        if 0 < params.top_k < logprobs.shape[-1]:
            logprobs = sample_utils.apply_top_k(logprobs, params.top_k)
        scaled: mx.array = logprobs.astype(mx.float32) * (1.0 / params.temperature)
        rows, vocabulary = scaled.shape
        keys = (self._make_key(self.position + row) for row in range(rows))
        return draw_tokens(scaled, mx.stack([mx.random.uniform(shape=(vocabulary,), key=key) for key in keys]))

    def _make_key(self, position: int) -> mx.array:
        key: mx.array = mx.random.key(xxhash.xxh3_64_intdigest(self._seed + position.to_bytes(8, "little")))
        return key


def draw_tokens(logits: mx.array, uniform: mx.array) -> mx.array:
    """Draw a token [rows] from each row of logits [rows, vocabulary]; `uniform`: numbers of [0, 1) of the same shape.

    Each token waits for a time, exponentially distributed with its probability as the rate; the first one is drawn.  So
    a rounding error changes a draw only where two are nearly first.  `mx.random.categorical` adds probabilities up, and
    an error of the sum moves the draw to the token with the next id: in a batch a seed then gives another text.
    """
    times = -mx.log1p(-mx.maximum(uniform, _UNIFORM_MIN))  # of rate 1
    return mx.argmax(logits - mx.log(times), axis=-1)


def make_processors(
    params: GenerationParams, prompt_tokens: int, fault: SamplerFault, eos: Collection[int] = ()
) -> list[LogitsProcessor]:
    """Make the processors of (all tokens so far, [1, vocabulary] logits); `eos` are the model's end tokens.

    Presence and frequency count generated tokens, as OpenAI and vLLM do; mlx-lm's would count the last 20 tokens, the
    prompt's among them.  Repetition looks at the last `repetition_context_size` tokens, as mlx-lm does.
    """
    processors: list[LogitsProcessor] = sample_utils.make_logits_processors(
        logit_bias=params.logit_bias or None,
        repetition_penalty=params.repetition_penalty if params.repetition_penalty != 1 else None,
        repetition_context_size=params.repetition_context_size,
    )
    presence, frequency = sample_utils.make_presence_penalty, sample_utils.make_frequency_penalty
    penalties = ((presence, params.presence_penalty), (frequency, params.frequency_penalty))
    processors += [_apply_to_generated(make(value, _ALL_TOKENS), prompt_tokens) for make, value in penalties if value]
    if params.allowed_token_ids:
        processors.append(_forbid_others(params.allowed_token_ids))
    if ends := {*params.stop_token_ids, *(() if params.ignore_eos else eos)} if params.min_tokens else ():
        processors.append(_delay_end(ends, prompt_tokens + params.min_tokens))
    return [fault.guard_processor(processor) for processor in processors]


def _make_mask(tokens: tuple[int, ...], vocabulary_size: int) -> mx.array:
    """[vocabulary] mask, true for these tokens."""
    mask = np.zeros(vocabulary_size, np.bool_)
    mask[list(tokens)] = True
    return mx.array(mask)


def _forbid_others(allowed: Collection[int]) -> LogitsProcessor:
    """Make a processor that forbids all other tokens."""
    make_mask = cache(partial(_make_mask, tuple(allowed)))
    return lambda tokens, logits: mx.where(make_mask(logits.shape[-1]), logits, mx.array(-mx.inf, logits.dtype))


def _delay_end(end_tokens: Collection[int], length: int) -> LogitsProcessor:
    """Make a processor that allows end tokens only where nothing else is allowed, until there are `length` tokens.

    Their logits become the least number rather than infinite: a grammar that is complete allows nothing but an end.
    """
    make_mask = cache(partial(_make_mask, tuple(end_tokens)))

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.shape[-1] >= length:
            return logits
        return mx.where(make_mask(logits.shape[-1]), mx.array(mx.finfo(logits.dtype).min, logits.dtype), logits)

    return process


def _apply_to_generated(inner: LogitsProcessor, prompt_tokens: int) -> LogitsProcessor:
    return lambda tokens, logits: inner(tokens[prompt_tokens:], logits)


def pick_logprobs(logprobs: mx.array, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """The log-probability of `token`, and the `count` likeliest tokens with theirs, likeliest first.

    `logprobs` is one sequence's row [vocabulary].  Values are at least LOGPROB_MIN: JSON has no infinity.
    """
    count = min(count, logprobs.shape[-1])
    chosen = max(logprobs[token].astype(mx.float32).tolist(), LOGPROB_MIN)  # type: ignore[type-var]
    assert isinstance(chosen, float)
    if not count:
        return chosen, []
    ids = mx.argsort(-logprobs)[:count]
    ids_list: list[int] = ids.tolist()  # type: ignore[assignment]
    values: list[float] = logprobs[ids].astype(mx.float32).tolist()  # type: ignore[assignment]
    return chosen, [(token, max(value, LOGPROB_MIN)) for token, value in zip(ids_list, values, strict=True)]


class LogprobsCapture:
    """The model's own log-probabilities of the first step, as a processor that precedes all others.

    Computed as mlx-lm does without processors, so that they have the same bits as in a run that has none.
    """

    def __init__(self) -> None:
        self.logprobs: mx.array | None = None  # [vocabulary], not evaluated yet

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self.logprobs is None:
            self.logprobs = (logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0]
        return logits


def make_first_logits(row: mx.array) -> FirstLogits:
    """Digest and likeliest tokens of one row of log-probabilities [vocabulary] of any type, for audits."""
    values = np.array(row.astype(mx.float32), dtype="<f4")
    count = min(LIKELIEST_MAX, len(values))
    likeliest = np.argpartition(-values, count - 1)[:count]
    likeliest = likeliest[np.lexsort((likeliest, -values[likeliest]))]
    return FirstLogits(
        digest=xxhash.xxh3_128_hexdigest(values.tobytes()),
        ids=likeliest.astype("<u4").tobytes(),
        logprobs=values[likeliest].tobytes(),
    )
