"""Chunks without memory: a sequence goes on in shorter ones, with the tokens of a cold run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from support.backend.engine_driver import SchedulerDriver
from support.backend.families import FAMILIES, compute_cold, load_family, make_prompt
from warmline_backend.generation.chunk_memory import ChunkMemory
from warmline_backend.model.step_memory import CHUNK_TOKENS_MIN, StepMemory
from warmline_backend.scheduler.scheduler import FAILED_STEPS_MAX, Scheduler

LENGTH = 300
CUDA_TEXT = "cudaMallocAsync(&data, size, stream) failed: out of memory"
METAL_TEXT = "[malloc] Unable to allocate 11811160064 bytes."


class ModelWithoutMemory:
    """Model for which `lacks_memory(chunk tokens, number of the chunk's call)` chunks find no memory."""

    def __init__(self, model: object, lacks_memory: Callable[[int, int], bool], text: str, after_writes: bool) -> None:
        self._model, self._lacks_memory = model, lacks_memory
        self._text, self._after_writes = text, after_writes
        self.chunk_count = 0

    def __call__(self, tokens: mx.array, *args: object, **options: object) -> mx.array:
        if tokens.shape[1] == 1:  # a decode step, or the device's check
            return self._model(tokens, *args, **options)  # type: ignore[operator]
        self.chunk_count += 1
        fails = self._lacks_memory(tokens.shape[1], self.chunk_count)
        if fails and not self._after_writes:
            raise RuntimeError(self._text)
        logits = self._model(tokens, *args, **options)  # type: ignore[operator]
        if fails:
            mx.eval(logits)
            raise RuntimeError(self._text)
        return logits

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


def make_driver(
    family: str,
    root: Path,
    lacks_memory: Callable[[int, int], bool],
    *,
    text: str = CUDA_TEXT,
    after_writes: bool = False,
    step: int = 128,
    exact: bool = False,
) -> SchedulerDriver:
    served = load_family(family, root)
    model = ModelWithoutMemory(served.model, lacks_memory, text, after_writes)
    return SchedulerDriver(replace(served, model=model), step=step, exact=exact)


def compute_cold_tokens(family: str, root: Path, prompt: list[int], count: int) -> list[int]:
    return compute_cold(load_family(family, root), family, prompt, count).tokens


@pytest.mark.parametrize("after_writes", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, "mamba2", "baichuan_m1"])
def test_prefill_goes_on_in_shorter_chunks(family: str, after_writes: bool, root: Path) -> None:
    prompt = make_prompt(LENGTH)
    undisturbed = SchedulerDriver(load_family(family, root), step=64).run(prompt, 6)
    driver = make_driver(
        family, root, lambda tokens, call: tokens > 64 and call > 1, text=METAL_TEXT, after_writes=after_writes
    )
    log = driver.run(prompt, 6)
    assert log.chunks == [128, 192, 256, LENGTH - 1]
    assert log.result.finish == "length" and log.generated == undisturbed.generated
    assert log.result.timings.prefilled == LENGTH, "no token was computed twice"
    prompt += [*log.generated, *make_prompt(40, 5)]
    warm = driver.run(prompt, 6, resident=log.result.resident, reuse=log.result.prefilled_until)
    assert warm.reused == log.result.prefilled_until
    assert warm.generated == SchedulerDriver(load_family(family, root), step=64).run(prompt, 6).generated


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
def test_first_chunk_without_memory(family: str, root: Path) -> None:
    log = make_driver(family, root, lambda tokens, call: call <= 2).run(make_prompt(LENGTH), 6)
    assert log.chunks[:2] == [CHUNK_TOKENS_MIN, 2 * CHUNK_TOKENS_MIN]
    assert log.generated == compute_cold_tokens(family, root, make_prompt(LENGTH), 6)


def test_shortest_chunk_without_memory_costs_nobody_else(root: Path) -> None:
    driver = make_driver("llama", root, lambda tokens, call: tokens in (100, 50, 32))
    _, stream = driver.submit(make_prompt(20, 2), 60)
    _, other = driver.submit(make_prompt(150, 3), 20)
    driver.run_until(lambda: len(stream.events) > 5)
    _, log = driver.submit(make_prompt(101), 8)
    driver.run_until(lambda: log.is_ended)
    result = log.result
    assert (result.finish, result.resident, result.error_code) == ("error", "", "kv_memory_exceeded")
    assert "at token 0 of the prompt's 101: a chunk of 32 tokens takes about 0.0 MB beside" in result.error
    assert CUDA_TEXT in result.error and "shorten the prompt" in result.error
    driver.run_until(lambda: stream.is_ended and other.is_ended)
    assert stream.generated == compute_cold_tokens("llama", root, make_prompt(20, 2), 60)
    assert other.generated == compute_cold_tokens("llama", root, make_prompt(150, 3), 20)
    assert driver.scheduler.step_stats.failed_steps == 4 > FAILED_STEPS_MAX, "the process goes on"
    assert driver.run(make_prompt(60, 4), 5).generated == compute_cold_tokens("llama", root, make_prompt(60, 4), 5)


def test_memory_of_residents_is_freed_for_shortest_chunk(root: Path) -> None:
    driver = make_driver("llama", root, lambda tokens, call: tokens == 25 and driver.scheduler.residents.bytes_held > 0)
    driver.mark_saved(driver.run(make_prompt(60, 2), 2))
    assert driver.scheduler.residents.bytes_held
    log = driver.run(make_prompt(26), 5)
    assert log.generated == compute_cold_tokens("llama", root, make_prompt(26), 5)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
def test_exact_mode_keeps_its_grid(family: str, root: Path) -> None:
    log = make_driver(family, root, lambda tokens, call: call == 2, step=64, exact=True).run(make_prompt(LENGTH), 6)
    assert log.chunks == [64, 128, 192, 256, LENGTH - 1]
    assert (
        log.generated
        == SchedulerDriver(load_family(family, root), step=64, exact=True).run(make_prompt(LENGTH), 6).generated
    )
    log = make_driver(family, root, lambda tokens, call: call > 1, step=64, exact=True).run(make_prompt(LENGTH), 6)
    assert log.result.finish == "error" and "--prefill-step-size" in log.result.error


def test_followers_and_saves_take_complete_chunks_only(root: Path) -> None:
    driver = make_driver("qwen3_5", root, lambda tokens, call: call in (2, 3), after_writes=True)
    name, leader = driver.submit(make_prompt(LENGTH), 6, checkpoints=(200,))
    _, follower = driver.submit([*make_prompt(200), *make_prompt(50, 8)], 6, follow=name, reuse=200)
    driver.run_until(lambda: leader.is_ended and follower.is_ended)
    assert follower.reused == 200
    assert leader.generated == compute_cold_tokens("qwen3_5", root, make_prompt(LENGTH), 6)
    assert follower.generated == compute_cold_tokens("qwen3_5", root, [*make_prompt(200), *make_prompt(50, 8)], 6)


def test_other_errors_discard_the_batch(root: Path) -> None:
    log = make_driver("llama", root, lambda tokens, call: True, text="[matmul] shapes differ").run(make_prompt(60))
    assert log.result.finish == "discarded"


def make_bounded_driver(root: Path, family: str, step: int, room: int, *, exact: bool = False) -> SchedulerDriver:
    """Driver whose chunks take 10 kB for each of their tokens and each token before them, with `room` for them."""
    driver = SchedulerDriver(load_family(family, root), step=step, exact=exact)
    reckoned = StepMemory((1, 1001), (0, 1000), (0, 0), (10_000_000, 10_010_000_000))
    served, settings = driver.served, driver.scheduler.settings
    memory = ChunkMemory(reckoned, mx.get_active_memory() + served.weight_bytes + settings.memory_budget_bytes)
    memory._compute_room = lambda committed_bytes: room  # type: ignore[method-assign]
    driver.scheduler = Scheduler(served, settings, memory)
    return driver


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
def test_chunks_shrink_with_depth(family: str, root: Path) -> None:
    prompt = make_prompt(600)
    log = make_bounded_driver(root, family, 256, 400_000_000).run(prompt, 6)
    starts = [0, *log.chunks]
    sizes = [end - start for start, end in zip(starts, log.chunks, strict=False)]
    assert sizes[0] == 256 > sizes[1] > sizes[-2] == 32 and sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert all(12_500 * size * start <= 400_000_000 or size == 32 for size, start in zip(sizes, starts, strict=False))
    assert log.generated == compute_cold_tokens(family, root, prompt, 6)


def test_bound_changes_no_chunk_in_exact_mode(root: Path) -> None:
    log = make_bounded_driver(root, "llama", 64, 1000, exact=True).run(make_prompt(LENGTH), 2)
    assert log.chunks == [64, 128, 192, 256, LENGTH - 1]
