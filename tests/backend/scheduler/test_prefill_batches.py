"""Prompts prefilled in one forward pass: their answers are those of cold runs, and a failure costs none of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from support.backend.engine_driver import EventLog, SchedulerDriver
from support.backend.families import FAMILIES, compute_cold, get_tolerance, load_family, make_prompt
from warmline_backend.kv_cache.batch_prefill import takes_padding
from warmline_backend.model.model import ServedModel
from warmline_backend.scheduler.scheduler import FAILED_STEPS_MAX
from warmline_common.protocol.tokens import unpack_tokens

LENGTHS = (60, 52, 64, 57)


class RecordingModel:
    """Model that records the shapes of prompts, and calls `before` with them first."""

    def __init__(self, model: object, before: Callable[[tuple[int, ...]], object]) -> None:
        self._model, self._before = model, before
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, tokens: mx.array, *args: object, **options: object) -> mx.array:
        if tokens.shape[1] > 1:
            self.shapes.append(tokens.shape)
            self._before(tokens.shape)
        return self._model(tokens, *args, **options)  # type: ignore[operator]

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


def make_driver(
    family: str, root: Path, before: Callable[[tuple[int, ...]], object] = lambda shape: None, **options: int
) -> tuple[SchedulerDriver, RecordingModel]:
    served = load_family(family, root)
    model = RecordingModel(served.model, before)
    return SchedulerDriver(replace(served, model=model), **options), model


def submit_prompts(driver: SchedulerDriver, lengths: tuple[int, ...] = LENGTHS) -> list[tuple[list[int], EventLog]]:
    prompts = [make_prompt(length, seed) for seed, length in enumerate(lengths, start=1)]
    return [(prompt, driver.submit(prompt, 8, logprobs=True)[1]) for prompt in prompts]


def finish(driver: SchedulerDriver, logs: list[EventLog]) -> None:
    driver.run_until(lambda: all(log.is_ended for log in logs))


def check_answer(served: ServedModel, family: str, prompt: list[int], log: EventLog) -> None:
    """Check an answer's log-probabilities against a cold run's, up to a near tie."""
    truth, tolerance = compute_cold(served, family, prompt, len(log.generated)), get_tolerance(family)
    pairs = zip(truth.tokens, truth.logprobs, truth.margins, log.generated, log.logprobs, strict=True)
    for n, (token, row, margin, sampled, logprob) in enumerate(pairs):
        assert abs(float(row[sampled]) - logprob) <= tolerance, n
        if token != sampled:
            assert margin <= tolerance
            return


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v32", "mamba2", "baichuan_m1"])
def test_batch_of_prompts_equals_cold_runs(family: str, root: Path) -> None:
    driver, model = make_driver(family, root)
    cases = submit_prompts(driver)
    finish(driver, [log for _, log in cases])
    is_batchable = driver.served.layout.is_batchable and takes_padding(model, driver.served.layout)
    assert model.shapes == ([(4, 63)] if is_batchable else [(1, length - 1) for length in sorted(LENGTHS)])
    served = load_family(family, root)
    for prompt, log in cases:
        check_answer(served, family, prompt, log)
        assert log.result.timings.prefilled == len(prompt) and log.chunks == [len(prompt) - 1]
        assert log.result.prefilled_until == len(prompt) + 8
    model.shapes.clear()
    turns = [
        (
            held := [*prompt, *log.generated, *make_prompt(15 + n, 9)],
            driver.submit(held, 8, logprobs=True, resident=log.result.resident, reuse=len(prompt) + 8)[1],
        )
        for n, (prompt, log) in enumerate(cases)
    ]
    finish(driver, [log for _, log in turns])
    assert not is_batchable or model.shapes == [(4, 17)], "warm turns share a batch too"
    for prompt, log in turns:
        check_answer(served, family, prompt, log)
        assert log.result.timings.prefilled == len(prompt) - log.reused


@pytest.mark.parametrize("text", ["cudaMallocAsync failed: out of memory", "[matmul] shapes differ"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
def test_failed_batch_costs_no_answer(family: str, text: str, root: Path) -> None:
    def fail_batches(shape: tuple[int, ...]) -> None:
        if shape[0] > 1:
            raise RuntimeError(text)

    driver, model = make_driver(family, root, fail_batches)
    cases = submit_prompts(driver)
    finish(driver, [log for _, log in cases])
    assert model.shapes == [(4, 63), *((1, length - 1) for length in sorted(LENGTHS))]
    assert driver.scheduler.step_stats.failed_steps == 1
    assert driver.scheduler.finisher.failed_steps == ("memory" not in text) < FAILED_STEPS_MAX
    for prompt, log in cases:
        check_answer(load_family(family, root), family, prompt, log)


def test_faulty_prompt_ends_alone(root: Path) -> None:
    """A prompt that fails in a batch, and alone, is the only one discarded."""

    def fail(shape: tuple[int, ...]) -> None:
        if shape[0] > 1 or shape[1] == 51:
            raise ValueError("a token that can't be computed")

    driver, _ = make_driver("llama", root, fail)
    cases = submit_prompts(driver)
    finish(driver, [log for _, log in cases])
    assert [log.result.finish for _, log in cases] == ["length", "discarded", "length", "length"]


@pytest.mark.parametrize(
    ("lengths", "step", "shapes"),
    [
        ((60, 20, 62), 2048, [(1, 19), (2, 61)]),  # too much padding
        ((60, 60, 60), 128, [(2, 59), (1, 59)]),  # a step in all rows together
        ((60, 300), 128, [(1, 59), (1, 128), (1, 128), (1, 43)]),  # chunks of a long prompt
    ],
)
def test_batches_are_bounded(lengths: tuple[int, ...], step: int, shapes: list[tuple[int, int]], root: Path) -> None:
    driver, model = make_driver("llama", root, step=step)
    finish(driver, [log for _, log in submit_prompts(driver, lengths)])
    assert model.shapes == shapes


def test_equal_lengths_need_no_padding(root: Path) -> None:
    family = "baichuan_m1"  # its convolutions take padding for tokens
    driver, model = make_driver(family, root)
    cases = submit_prompts(driver, (60, 60, 45))
    finish(driver, [log for _, log in cases])
    assert model.shapes == [(1, 44), (2, 59)]
    for prompt, log in cases:
        check_answer(load_family(family, root), family, prompt, log)


def test_exact_mode_prefills_one_by_one(root: Path) -> None:
    driver, model = make_driver("llama", root, exact=True)
    finish(driver, [log for _, log in submit_prompts(driver)])
    assert {shape[0] for shape in model.shapes} == {1}


def test_leader_is_copied_before_it_decodes(root: Path) -> None:
    driver, model = make_driver("gemma3", root)
    leader, first = driver.submit(make_prompt(60), 8)
    _, other = driver.submit(make_prompt(61, 2), 8)
    follower = [*make_prompt(59), *make_prompt(20, 8)]
    _, second = driver.submit(follower, 8, follow=leader, reuse=59, logprobs=True)
    finish(driver, [first, other, second])
    assert second.reused == 59 and (1, 59) in model.shapes
    check_answer(load_family("gemma3", root), "gemma3", follower, second)


def test_cancelled_row_of_batch_is_kept(root: Path) -> None:
    driver, _ = make_driver("gemma3", root)
    prompts = [make_prompt(50 + n, n + 1) for n in range(3)]
    running = [driver.submit(prompt, 40, logprobs=True) for prompt in prompts]
    turn = driver.scheduler.step()
    next(turn)
    result = driver.scheduler.cancel(running[1][0])
    assert result is not None and (result.finish, result.prefilled_until) == ("cancelled", 52)
    finish(driver, [log for _, log in running])
    for n in (0, 2):
        check_answer(load_family("gemma3", root), "gemma3", prompts[n], running[n][1])
    onward = [*prompts[1], *unpack_tokens(result.generated), *make_prompt(9, 9)]
    more = driver.run(onward, 6, resident=result.resident, reuse=52, logprobs=True)
    check_answer(load_family("gemma3", root), "gemma3", onward, more)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
def test_followers_start_together(family: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _ = make_driver(family, root)
    started, start = list[int](), driver.scheduler._start_decoding
    monkeypatch.setattr(
        driver.scheduler, "_start_decoding", lambda sequences: (started.append(len(sequences)), start(sequences))
    )
    prompt = make_prompt(60)
    leader, first = driver.submit(prompt, 8, logprobs=True)
    logs = [first, *(driver.submit(prompt, 8, follow=leader, reuse=59, logprobs=True)[1] for _ in range(3))]
    finish(driver, logs)
    assert [log.reused for log in logs] == [0, 59, 59, 59] and started == [1, 3]
    for log in logs:
        check_answer(load_family(family, root), family, prompt, log)


def test_followers_start_together_where_memory_is_short(root: Path) -> None:
    driver, _ = make_driver("llama", root)
    memory, served, prompt = driver.scheduler.chunk_memory, driver.served, make_prompt(600)
    memory.usable_bytes = max(served.weight_bytes, mx.get_active_memory()) + 6 * served.kv_bytes(768)
    leader, first = driver.submit(prompt, 8, logprobs=True)
    logs = [first, *(driver.submit(prompt, 8, follow=leader, reuse=599, logprobs=True)[1] for _ in range(2))]
    finish(driver, logs)
    assert driver.scheduler.step_stats.failed_steps == 0
    for log in logs:
        check_answer(load_family("llama", root), "llama", prompt, log)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
def test_prompts_of_one_token_are_answered(family: str, root: Path) -> None:
    """They have nothing to prefill, and no KV that a batch could be made of."""
    driver, _ = make_driver(family, root)
    cases = [([token], driver.submit([token], 8, logprobs=True)[1]) for token in (60, 61, 62)]
    finish(driver, [log for _, log in cases])
    assert driver.scheduler.step_stats.failed_steps == 0
    for prompt, log in cases:
        check_answer(load_family(family, root), family, prompt, log)


# Tokens of two prompts, the shorter one's decode steps after the other's end, and new tokens of what goes on from it.
WINDOW_CASES = [(32, 20, 0, 28), (32, 20, 3, 28), (33, 27, 0, 28), (33, 27, 1, 28), (36, 30, 2, 30), (64, 56, 0, 3)]


@pytest.mark.parametrize("family", ["gemma3", "baichuan_m1"])
@pytest.mark.parametrize(("longer", "shorter", "steps", "new"), WINDOW_CASES)
def test_padded_window_is_continued(family: str, longer: int, shorter: int, steps: int, new: int, root: Path) -> None:
    """The ring of the shorter of two sequences turns while it has padding; its KV is used alone afterwards."""
    for is_copied in (False, True):
        driver, _ = make_driver(family, root)
        _, ended = driver.submit(make_prompt(longer, 3), 1)
        request_id, log = driver.submit(make_prompt(shorter, 8), 30)
        finish(driver, [ended])
        for _ in range(steps):
            driver.step()
        if is_copied:
            running = driver.scheduler._queues.find(request_id)
            tokens = list(running.kv.tokens[: min(running.kv.length, running.sent_length)])  # type: ignore[union-attr]
            start = {"follow": request_id}
        else:
            driver.scheduler.cancel(request_id)
            start = {"resident": log.result.resident}
            tokens = list(driver.scheduler.residents.find_kv(log.result.resident).tokens)
        prompt = tokens + make_prompt(new, 77)
        warm = driver.run(prompt, 4, reuse=len(tokens), logprobs=True, **start)
        check_answer(driver.served, family, prompt, warm)
