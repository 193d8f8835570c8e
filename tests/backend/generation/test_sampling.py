"""Sampling: mlx-lm's filters, random keys and faults per sequence."""

import threading
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import load
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler
from numpy.typing import NDArray

from warmline_backend.generation import sampling
from warmline_backend.generation.sampling import (
    Sampler,
    SamplerFault,
    SeededSampler,
    make_processors,
    make_sampler,
    pick_logprobs,
)
from warmline_backend.request.params import GenerationParams

VOCABULARY = 50


def make_params(**fields: Any) -> GenerationParams:
    return GenerationParams(max_tokens=10, **fields)


def make_logprobs(step: int = 0, rows: int = 1) -> mx.array:
    logits = mx.random.normal((rows, VOCABULARY), key=mx.random.key(step)) * 2
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def build_sampler(fault: SamplerFault | None = None, **fields: Any) -> Sampler:
    return make_sampler(make_params(**{"temperature": 1.0, **fields}), fault or SamplerFault())


def draw_tokens(sample: Sampler, steps: int = 40) -> list[int]:
    return [int(sample(make_logprobs(step)).tolist()[0]) for step in range(steps)]


def get_random_state() -> list[Any]:
    return [np.array(state).tolist() for state in mx.random.state]


def test_greedy_requests_share_mlx_lm_sampler() -> None:
    assert build_sampler(temperature=0.0) is greedy_sampler
    assert build_sampler(top_k=1) is greedy_sampler


def test_seed_repeats_draws() -> None:
    assert draw_tokens(build_sampler(seed=7)) == draw_tokens(build_sampler(seed=7))
    assert draw_tokens(build_sampler(seed=7)) != draw_tokens(build_sampler(seed=8))
    assert draw_tokens(build_sampler()) != draw_tokens(build_sampler())
    assert draw_tokens(build_sampler(seed=-1)) == draw_tokens(build_sampler(seed=-1))


def test_rows_drawn_together_are_those_drawn_one_by_one() -> None:
    """As in a pass that verifies a draft; a rejected token's place is drawn again with the same key."""
    logprobs = make_logprobs(rows=6)
    for fields in ({}, {"top_p": 0.8, "top_k": 30, "min_p": 0.01}):
        single = build_sampler(seed=4, **fields)
        one_by_one = [int(single(logprobs[row : row + 1]).tolist()[0]) for row in range(6)]
        several = build_sampler(seed=4, **fields)
        assert isinstance(several, SeededSampler)
        assert several(logprobs).tolist() == one_by_one and several.position == 6
        several.position -= 4
        assert several(logprobs[2:]).tolist() == one_by_one[2:]


def test_rounding_changes_no_draw() -> None:
    """A pass of another width rounds otherwise.  Sums over many unlikely tokens differ by more than one of them."""
    tail = np.random.default_rng(1).normal(-14.0, 1.0, 50_000)
    for seed in range(150):
        logits, rounded = (mx.array([[likely, *tail]], mx.float32) for likely in (-4.0, -4.0 + 4e-6))
        drawn, other = (build_sampler(seed=seed)(each).item() for each in (logits, rounded))
        assert drawn == other


def test_draws_hold_at_the_ends_of_random_numbers() -> None:
    """A token without probability is never drawn, and no number of [0, 1) draws one that has next to none."""
    least, most = 0.0, float(np.nextafter(np.float32(1.0), np.float32(0.0)))
    logits = mx.array([[-mx.inf, 0.0, -mx.inf], [-mx.inf, -30.0, 0.0]])
    for first in (least, 0.5, most):
        assert sampling.draw_tokens(logits, mx.array([[least, first, most], [least, least, 0.5]])).tolist() == [1, 2]


def compute_chi_square(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_draws_have_the_distribution_over_places_and_over_seeds() -> None:
    logits = mx.log(mx.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04]))
    probabilities = np.array(mx.softmax(logits / 0.7), np.float64)
    by_place = build_sampler(seed=11, temperature=0.7)(mx.broadcast_to(logits, (6000, 6)))
    by_seed = [build_sampler(seed=seed, temperature=0.7)(logits[None]) for seed in range(3000)]
    drawn = (by_place.tolist(), [token.tolist()[0] for token in by_seed])
    for tokens in drawn:
        counts = np.bincount(tokens, minlength=6)
        assert compute_chi_square(counts, probabilities) < 20.5, "5 degrees of freedom: 1 in 1,000 exceeds it"
    pairs = np.bincount(np.array(drawn[0][:-1]) * 6 + np.array(drawn[0][1:]), minlength=36)
    together = np.outer(probabilities, probabilities).ravel()
    assert compute_chi_square(pairs, together) < 66.6, "35 degrees of freedom: places are independent"


def test_interleaved_sequences_draw_as_alone() -> None:
    lone = [draw_tokens(build_sampler(seed=1)), draw_tokens(build_sampler(seed=2, top_p=0.9))]
    one, other = build_sampler(seed=1), build_sampler(seed=2, top_p=0.9)
    together = [(int(one(make_logprobs(step)).item()), int(other(make_logprobs(step)).item())) for step in range(40)]
    assert [list(pair) for pair in zip(*together, strict=True)] == lone


def test_global_random_state_is_unused() -> None:
    mx.random.seed(1)
    before = get_random_state()
    first = draw_tokens(build_sampler(seed=3, top_p=0.9, min_p=0.01, top_k=20))
    assert get_random_state() == before
    mx.random.seed(2)
    assert draw_tokens(build_sampler(seed=3, top_p=0.9, min_p=0.01, top_k=20)) == first


def test_sampler_works_on_another_thread() -> None:
    sample, result = build_sampler(seed=5, top_p=0.8), []
    processors = make_processors(make_params(logit_bias={3: 100.0}, presence_penalty=1.0), 0, SamplerFault())
    expected = draw_tokens(build_sampler(seed=5, top_p=0.8))

    def step() -> None:
        result.append(draw_tokens(sample))
        logits = mx.zeros((1, VOCABULARY))
        for processor in processors:
            logits = processor(mx.array([1, 2]), logits)
        result.append(int(mx.argmax(logits).item()))

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert result == [expected, 3]


def count_tokens(sample: Sampler, logprobs: mx.array, steps: int = 300) -> dict[int, int]:
    tokens = [int(sample(logprobs).item()) for _ in range(steps)]
    return {token: tokens.count(token) for token in set(tokens)}


def test_filters_select_expected_tokens() -> None:
    logprobs = mx.log(mx.array([[0.4, 0.3, 0.2, 0.06, 0.04]]))
    assert set(count_tokens(build_sampler(seed=1), logprobs)) == {0, 1, 2, 3, 4}
    assert set(count_tokens(build_sampler(seed=1, top_k=2), logprobs)) == {0, 1}
    assert set(count_tokens(build_sampler(seed=1, top_p=0.65), logprobs)) == {0, 1}
    assert set(count_tokens(build_sampler(seed=1, min_p=0.4), logprobs)) == {0, 1, 2}


@pytest.mark.parametrize("top_k", [5, 6, 10**9])
def test_top_k_of_vocabulary_or_more_is_no_limit(top_k: int) -> None:
    logprobs, fault = mx.log(mx.array([[0.2] * 5])), SamplerFault()
    assert set(count_tokens(build_sampler(fault, seed=1, top_k=top_k), logprobs)) == {0, 1, 2, 3, 4}
    assert fault.error is None


def test_temperature_scales_distribution() -> None:
    logprobs = mx.log(mx.array([[0.6, 0.4]]))
    assert count_tokens(build_sampler(seed=1, temperature=0.05), logprobs) == {0: 300}
    assert abs(count_tokens(build_sampler(seed=1, temperature=1.0), logprobs)[0] - 180) < 40
    assert abs(count_tokens(build_sampler(seed=1, temperature=100.0), logprobs)[0] - 150) < 40


def process_logits(tokens: list[int], prompt_tokens: int, **fields: Any) -> list[float]:
    logits = mx.ones((1, 6))
    for processor in make_processors(make_params(**fields), prompt_tokens, SamplerFault()):
        logits = processor(mx.array(tokens), logits)
    return [round(value, 4) for value in np.array(logits)[0].tolist()]


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    tokens = [5, 5, *[1, 1, 1, 2], *[3] * 30]
    assert process_logits(tokens, 2, presence_penalty=0.5) == [1, 0.5, 0.5, 0.5, 1, 1]
    assert process_logits(tokens, 2, frequency_penalty=0.5) == [1, -0.5, 0.5, -14, 1, 1]
    assert process_logits([5, 5], 2, presence_penalty=0.5, frequency_penalty=0.5) == [1] * 6


LEAST = round(float(mx.finfo(mx.float32).min), 4)


def test_min_tokens_makes_ends_last_choice() -> None:
    def held(tokens: int, **fields: Any) -> list[float]:
        params, logits = make_params(min_tokens=3, **fields), mx.ones((1, 4))
        for processor in make_processors(params, 2, SamplerFault(), {3}):
            logits = processor(mx.array([1] * (2 + tokens)), logits)
        return [round(value, 4) for value in np.array(logits)[0].tolist()]

    assert [held(count) for count in (0, 2, 3)] == [[1, 1, 1, LEAST], [1, 1, 1, LEAST], [1] * 4]
    assert held(0, stop_token_ids=(0,)) == [LEAST, 1, 1, LEAST]
    assert held(0, stop_token_ids=(0,), ignore_eos=True) == [LEAST, 1, 1, 1]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_min_tokens_allows_end_where_nothing_else_is(dtype: mx.Dtype) -> None:
    (hold,) = make_processors(make_params(min_tokens=3), 0, SamplerFault(), {3})
    logits = mx.where(mx.array([False, False, False, True]), hold(mx.array([0]), mx.ones((1, 4), dtype)), -mx.inf)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    assert int(build_sampler(seed=1)(logprobs).item()) == int(mx.argmax(logprobs).item()) == 3


def test_allowed_token_ids_restrict_sampling() -> None:
    assert process_logits([5], 1, allowed_token_ids=(4, 1)) == [-np.inf, 1, -np.inf, -np.inf, 1, -np.inf]
    assert process_logits([5], 1, allowed_token_ids=(4,), logit_bias={2: 100.0})[2] == -np.inf


def test_repetition_counts_last_prompt_and_answer_tokens() -> None:
    assert process_logits([0, 1, 2], 3, repetition_penalty=2.0) == [0.5, 0.5, 0.5, 1, 1, 1]
    assert process_logits([0, 1, 2], 3, repetition_penalty=2.0, repetition_context_size=2) == [1, 0.5, 0.5, 1, 1, 1]


def test_bias_is_added_and_defaults_need_no_processor() -> None:
    assert process_logits([0], 1, logit_bias={2: -100.0, 3: 5.0}) == [1, 1, -99, 6, 1, 1]
    assert make_processors(make_params(), 5, SamplerFault()) == []


def test_fault_is_recorded_and_decoding_continues_greedily() -> None:
    def broken() -> mx.array:
        raise ValueError("broken")

    def broken_processor(tokens: mx.array, logits: mx.array) -> mx.array:
        raise IndexError("also")

    fault, logprobs = SamplerFault(), make_logprobs()
    sampled = fault.run(broken, lambda: greedy_sampler(logprobs))
    assert sampled.tolist() == greedy_sampler(logprobs).tolist()
    assert isinstance(fault.error, ValueError)
    assert fault.guard_processor(broken_processor)(mx.array([1]), logprobs) is logprobs
    assert isinstance(fault.error, ValueError), "the first error is the cause"
    other = SamplerFault()
    assert other.guard_processor(broken_processor)(mx.array([1]), logprobs) is logprobs
    assert isinstance(other.error, IndexError)


def test_picked_logprobs_are_sorted() -> None:
    row = mx.log(mx.array([0.1, 0.5, 0.15, 0.25]))
    chosen, top = pick_logprobs(row, 2, 2)
    assert chosen == pytest.approx(np.log(0.15), abs=1e-6)
    assert [token for token, _ in top] == [1, 3]
    assert [value for _, value in top] == pytest.approx(np.log([0.5, 0.25]), abs=1e-6)
    assert pick_logprobs(row.astype(mx.bfloat16), 1, 0)[1] == []
    assert len(pick_logprobs(row, 1, 20)[1]) == 4


def decode_with_mlx_lm(model: Any, requests: list[GenerationParams], prompts: list[list[int]]) -> list[list[int]]:
    """Decode these requests together with mlx-lm's batch classes; their tokens."""
    fault = SamplerFault()
    batch = PromptProcessingBatch(
        model,
        list(range(len(requests))),
        [make_prompt_cache(model) for _ in requests],
        samplers=[make_sampler(request, fault) for request in requests],
        logits_processors=[
            make_processors(request, len(prompt), fault) for request, prompt in zip(requests, prompts, strict=True)
        ],
    )
    decode = batch.generate([list(prompt) for prompt in prompts])
    steps = [[response.token for response in decode.next()] for _ in range(12)]
    assert fault.error is None
    return [list(tokens) for tokens in zip(*steps, strict=True)]


def test_seeded_requests_equal_alone_and_batched(tiny_folder: Any) -> None:
    model, *_ = load(str(tiny_folder("llama")))
    requests = [
        make_params(temperature=1.0, seed=1),
        make_params(temperature=0.8, seed=2, top_p=0.9, frequency_penalty=1.0),
        make_params(),
    ]
    prompts = [[40 + i] * 9 for i in range(3)]
    together = decode_with_mlx_lm(model, requests, prompts)
    assert together == [
        decode_with_mlx_lm(model, [request], [prompt])[0] for request, prompt in zip(requests, prompts, strict=True)
    ]
    assert together[0] != decode_with_mlx_lm(model, [make_params(temperature=1.0, seed=3)], prompts[:1])[0]
