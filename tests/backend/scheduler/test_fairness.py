"""Fairness: running streams go on beside prefills, and no prompt starves."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from support.backend.engine_driver import SchedulerDriver
from support.backend.families import load_family, make_prompt
from warmline_backend.generation.sequence import Sequence
from warmline_backend.scheduler import scheduler
from warmline_backend.scheduler.decoding.decode_group import DecodeGroup
from warmline_backend.scheduler.prefill import CHUNKS_SKIPPED_MAX, choose_prefill, count_skipped_chunks
from warmline_backend.scheduler.scheduler import DECODE_OWED_MAX_S
from warmline_common.measurement.scheduling import DECODE_SHARE


def test_stream_continues_during_long_prefill(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=16)
    _, stream = driver.submit(make_prompt(10), 200)
    driver.run_until(lambda: len(stream.events) > 2)
    before = len(stream.events)
    _, long = driver.submit(make_prompt(161), 2)
    driver.run_until(lambda: len(long.chunks) == 10)
    assert len(stream.events) - before >= 9, "a step after each chunk at least"


class FakeClock:
    """Replaces the scheduler's clock: a chunk takes 8 s, a decode step 0.1 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(scheduler, "time", self)
        monkeypatch.setattr(scheduler, "DECODE_OWED_MAX_S", DECODE_OWED_MAX_S)
        for owner, step, seconds in ((Sequence, "prefill_chunk", 8.0), (DecodeGroup, "step", 0.1)):
            monkeypatch.setattr(owner, step, self.taking(seconds, getattr(owner, step)))

    def monotonic(self) -> float:
        return self.now

    def taking(self, seconds: float, step: Callable[..., object]) -> Callable[..., object]:
        def take(*given: object) -> object:
            self.now += seconds
            return step(*given)

        return take


def test_decode_gets_its_share_beside_long_chunks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeClock(monkeypatch)
    driver = SchedulerDriver(load_family("llama", root), step=16)
    _, stream = driver.submit(make_prompt(10), 2000)
    driver.run_until(lambda: len(stream.events) > 2)
    _, long = driver.submit(make_prompt(400), 2)
    driver.run_until(lambda: len(long.chunks) == 1)
    before = len(stream.events)
    driver.run_until(lambda: len(long.chunks) == 11)
    owed = 10 * 8.0 * DECODE_SHARE / (1 - DECODE_SHARE)
    assert abs((len(stream.events) - before) * 0.1 - owed) < 2.0


def test_new_prompt_precedes_owed_decode_steps(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeClock(monkeypatch)
    driver = SchedulerDriver(load_family("llama", root), step=16)
    _, stream = driver.submit(make_prompt(10), 2000)
    _, long = driver.submit(make_prompt(400), 2)
    driver.run_until(lambda: len(long.chunks) == 2)
    turn = driver.scheduler.step()
    next(turn)
    _, small = driver.submit(make_prompt(12), 1)
    before = len(stream.events)
    for _ in turn:
        pass
    assert len(stream.events) - before <= 1 and small.chunks == [11] and len(long.chunks) == 2


def test_long_prompt_that_comes_again_does_not_precede_owed_decode_steps(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The debt to decoding outlives the prompt whose chunk it has waited for: a client may give up and come again."""
    FakeClock(monkeypatch)
    driver = SchedulerDriver(load_family("llama", root), step=16)
    _, stream = driver.submit(make_prompt(10), 2000)
    for number in range(3):
        request_id, long = driver.submit(make_prompt(400, number + 2), 2)
        before = len(stream.events)
        driver.run_until(lambda long=long: len(long.chunks) == 1)
        assert not number or (len(stream.events) - before) * 0.1 >= 8.0 * DECODE_SHARE / (1 - DECODE_SHARE) - 0.2
        driver.scheduler.cancel(request_id)


def test_small_request_ends_between_two_long_chunks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Owed decode steps are also the new request's: it does not wait for another chunk in between."""
    FakeClock(monkeypatch)
    driver = SchedulerDriver(load_family("llama", root), step=16)
    driver.submit(make_prompt(10), 2000)
    _, long = driver.submit(make_prompt(400), 2)
    driver.run_until(lambda: len(long.chunks) == 2)
    _, small = driver.submit(make_prompt(12), 20)
    while not small.is_ended:
        for _ in driver.scheduler.step():
            if small.is_ended:
                break
    assert len(long.chunks) == 2


def test_shortest_prompt_first_without_starvation(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=16)
    _, long = driver.submit(make_prompt(400), 1)
    driver.run_until(lambda: len(long.chunks) == 2)
    _, short = driver.submit(make_prompt(12), 1)
    driver.run_until(lambda: short.is_ended)
    assert len(long.chunks) <= 3
    seen = len(long.chunks)
    count = 3 * (CHUNKS_SKIPPED_MAX + 1)
    for first_seed in (2, 2 + count):
        shorts = [driver.submit(make_prompt(12, first_seed + n), 1)[1] for n in range(count)]
        driver.run_until(lambda shorts=shorts: all(one.is_ended for one in shorts))
    assert len(long.chunks) >= seen + 2


@dataclass(eq=False)
class Prompt:
    """Prompt as the choice of a chunk sees it."""

    prefill_tokens_left: int
    chunks_skipped: float = 0.0


def compute_chunk(prompts: list[Any]) -> Prompt:
    chosen: Prompt = choose_prefill(prompts, 256)
    count_skipped_chunks(prompts, [cast(Sequence, chosen)], 256)
    chosen.prefill_tokens_left -= 256
    if chosen.prefill_tokens_left <= 0:
        prompts.remove(chosen)
    return chosen


@pytest.mark.parametrize("count", [1, 4, 5, 8, 15])
def test_short_prompt_does_not_wait_for_many_long_ones(count: int) -> None:
    prompts = [Prompt(400 * 256) for _ in range(count)]
    for _ in range(40):
        compute_chunk(prompts)
    short = Prompt(50)
    prompts.append(short)
    chosen = [compute_chunk(prompts) for _ in range(3)]
    assert short in chosen, "it waits for two chunks at most"


@pytest.mark.parametrize("count", [1, 5, 15])
def test_many_long_prompts_advance_beside_short_ones(count: int) -> None:
    prompts = [Prompt(400 * 256) for _ in range(count)]
    longs = list(prompts)
    for _ in range(3000):
        if len(prompts) == count:
            prompts.append(Prompt(20))  # always one
        compute_chunk(prompts)
    done = [400 - each.prefill_tokens_left // 256 for each in longs]
    assert min(done) > 0.5 * max(done) > 0, "none is left behind, by short ones or by its likes"
