"""The present memory budget, changed while requests run: evictions, waits, refusals, and answers that stay the same."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.backend.cold_runs import ColdRun, compare_greedy
from support.backend.engine_driver import EventLog, SchedulerDriver
from support.backend.families import compute_cold, get_tolerance, load_family, make_prompt
from warmline_backend.scheduler.capacity import KvTooLargeError

ROWS = 2048  # of the budget of the start


@pytest.fixture
def driver(root: Path) -> SchedulerDriver:
    return make_driver("llama", root)


def make_driver(family: str, root: Path, **options: Any) -> SchedulerDriver:
    model = load_family(family, root)
    return SchedulerDriver(model, budget=model.kv_bytes(ROWS), **options)


@cache
def compute_reference(family: str, root: Path, prompt: tuple[int, ...], max_tokens: int) -> ColdRun:
    return compute_cold(load_family(family, root), family, list(prompt), max_tokens)


def assert_cold(log: EventLog, family: str, root: Path, prompt: list[int]) -> None:
    truth = compute_reference(family, root, tuple(prompt), len(log.generated))
    assert log.result.finish == "length"
    assert compare_greedy(truth.tokens, log.generated, truth.margins, get_tolerance(family))


class Reserved:
    """Reservation of a restore: what was decided."""

    def __init__(self, driver: SchedulerDriver, name: str, tokens: int) -> None:
        self.outcome = ""
        admission, bytes_needed = driver.scheduler.admission, driver.served.kv_bytes(tokens)
        admission.reserve(name, bytes_needed, lambda: self._decide("granted"), lambda _: self._decide("refused"))

    def _decide(self, outcome: str) -> None:
        assert not self.outcome, "it is decided once"
        self.outcome = outcome


# ---- less memory


def test_shrink_evicts_unleased_in_order(driver: SchedulerDriver) -> None:
    residents = driver.scheduler.residents
    ids = [driver.mark_saved(driver.run(make_prompt(60, seed), 4)) for seed in range(4)]
    residents.set_eviction_order([ids[2]])
    one = residents.bytes_held // 4
    assert driver.scheduler.admission.set_budget(2 * one) == 2 * one == residents.budget_bytes
    assert [each in residents for each in ids] == [False, True, False, True]
    assert residents.generation == 2


def test_shrink_keeps_unsaved_and_running(driver: SchedulerDriver, root: Path) -> None:
    scheduler = driver.scheduler
    saved = driver.mark_saved(driver.run(make_prompt(300, 2), 4))
    ended = driver.run(make_prompt(60, 3), 4)
    _, log = driver.submit(make_prompt(400), 40)
    driver.run_until(lambda: len(log.events) > 5)
    held = scheduler.running_bytes + scheduler.residents.bytes_leased
    assert scheduler.admission.set_budget(0) == held
    assert saved not in scheduler.residents and ended.result.resident in scheduler.residents
    driver.run_until(lambda: log.is_ended)
    assert_cold(log, "llama", root, make_prompt(400))
    for each in (log, ended):
        driver.mark_saved(each)
    assert scheduler.admission.set_budget(0) == 0 and not len(scheduler.residents)


def test_shrink_counts_granted_reservations(driver: SchedulerDriver) -> None:
    reserved = Reserved(driver, "a", 1000)
    assert reserved.outcome == "granted"
    assert driver.scheduler.admission.set_budget(0) == driver.scheduler.running_bytes > 0
    driver.scheduler.admission.release("a")
    assert driver.scheduler.admission.set_budget(0) == 0


def test_budget_never_exceeds_that_of_start(driver: SchedulerDriver) -> None:
    at_start = driver.scheduler.residents.budget_bytes
    for asked in (at_start + 1, 1 << 60):
        assert driver.scheduler.admission.set_budget(asked) == at_start
    driver.scheduler.admission.set_budget(1000)
    assert driver.scheduler.admission.set_budget(1 << 60) == at_start


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_resident_taken_without_room_holds_no_more_while_it_waits(family: str, root: Path) -> None:
    driver = make_driver(family, root)
    scheduler, prompt = driver.scheduler, make_prompt(600, 2)
    resident = driver.mark_saved(driver.run(prompt, 1))
    _, log = driver.submit(make_prompt(400), 200)
    driver.run_until(lambda: len(log.events) > 5)
    held = scheduler.running_bytes + scheduler.residents.bytes_held
    assert scheduler.admission.set_budget(held) == held
    _, waiting = driver.submit([*prompt, *make_prompt(300, 3)], 5, resident=resident, reuse=len(prompt))
    assert len(scheduler.residents) == 0 and scheduler.running_bytes <= held
    driver.step()
    assert scheduler.queued_count == 1 and scheduler.running_bytes <= held
    driver.run_until(lambda: log.is_ended)
    driver.mark_saved(log)
    driver.run_until(lambda: waiting.is_ended)
    assert waiting.reused == len(prompt)
    assert_cold(waiting, family, root, [*prompt, *make_prompt(300, 3)])


def test_long_answers_outlive_shrink(driver: SchedulerDriver, root: Path) -> None:
    """Their clients read them: only the whole budget of the start ends one.  They outgrow their prompts' room."""
    prompts = [make_prompt(200, seed) for seed in (1, 2)]
    logs = [driver.submit(prompt, 120)[1] for prompt in prompts]
    driver.run_until(lambda: all(len(log.events) > 5 for log in logs))
    driver.scheduler.admission.set_budget(0)
    driver.run_until(lambda: all(log.is_ended for log in logs))
    for prompt, log in zip(prompts, logs, strict=True):
        assert_cold(log, "llama", root, prompt)


def test_prompt_above_present_budget_runs_alone(driver: SchedulerDriver, root: Path) -> None:
    driver.scheduler.admission.set_budget(1000)
    assert_cold(driver.run(make_prompt(500), 5), "llama", root, make_prompt(500))


def test_usable_bytes_change_no_chunk_in_exact_mode(root: Path) -> None:
    prompt, chunks = make_prompt(500), []
    for usable_bytes in (1 << 40, 1):
        driver = make_driver("llama", root, step=64, exact=True)
        driver.scheduler.chunk_memory.usable_bytes = usable_bytes
        chunks.append(driver.run(prompt, 4).chunks)
    assert chunks[0] == chunks[1]


# ---- more memory


def test_grow_admits_waiting_prompt(driver: SchedulerDriver, root: Path) -> None:
    scheduler = driver.scheduler
    _, first = driver.submit(make_prompt(400), 200)
    driver.run_until(lambda: len(first.events) > 5)
    scheduler.admission.set_budget(0)
    _, second = driver.submit(make_prompt(400, 2), 5)
    for _ in range(5):
        driver.step()
    assert scheduler.queued_count == 1 and not second.events
    scheduler.admission.set_budget(1 << 60)
    driver.run_until(lambda: second.is_ended)
    assert not first.is_ended
    assert_cold(second, "llama", root, make_prompt(400, 2))


def test_grow_grants_waiting_reservation(driver: SchedulerDriver) -> None:
    _, log = driver.submit(make_prompt(400), 100)
    driver.run_until(lambda: len(log.events) > 5)
    driver.scheduler.admission.set_budget(0)
    reserved = Reserved(driver, "a", 1000)
    driver.step()
    assert not reserved.outcome and not log.is_ended
    driver.scheduler.admission.set_budget(1 << 60)
    driver.step()
    assert reserved.outcome == "granted" and not log.is_ended


# ---- refusals


def test_reservation_above_budget_of_start_is_refused(driver: SchedulerDriver) -> None:
    driver.scheduler.admission.set_budget(0)
    with pytest.raises(KvTooLargeError, match="more than the memory budget"):
        Reserved(driver, "a", ROWS + 1)


def test_reservation_without_anything_to_wait_for_is_refused(driver: SchedulerDriver) -> None:
    saved = driver.mark_saved(driver.run(make_prompt(60), 4))
    driver.scheduler.admission.set_budget(driver.scheduler.residents.bytes_held)
    assert Reserved(driver, "a", 1000).outcome == "refused"
    assert saved in driver.scheduler.residents and driver.scheduler.is_idle


def test_reservation_is_refused_once_nothing_runs(driver: SchedulerDriver) -> None:
    _, log = driver.submit(make_prompt(400), 20)
    driver.run_until(lambda: len(log.events) > 5)
    driver.scheduler.admission.set_budget(0)
    large, small = Reserved(driver, "a", 1000), Reserved(driver, "b", 100)
    driver.run_until(lambda: log.is_ended)
    driver.step()
    assert not large.outcome, "the resident may still be saved"
    driver.mark_saved(log)
    driver.step()
    assert (large.outcome, small.outcome) == ("refused", "granted")


def test_waiting_background_request_does_not_hold_reservation_up(driver: SchedulerDriver) -> None:
    resident = driver.mark_saved(driver.run(make_prompt(400), 1))
    driver.scheduler.admission.set_budget(driver.scheduler.residents.bytes_held)
    driver.submit(make_prompt(420), 1, resident=resident, reuse=400, background=True)
    assert Reserved(driver, "a", 1500).outcome == "refused"


# ---- anything


class Storm:
    """Requests, restores and shares in any order, over one scheduler."""

    def __init__(self, family: str, root: Path) -> None:
        self.driver, self._family, self._root = make_driver(family, root, places=3), family, root
        self._logs: list[tuple[list[int], EventLog]] = []
        self._unsaved: list[EventLog] = []
        self._reserved: dict[str, Reserved] = {}

    def submit(self, seed: int, length: int, max_tokens: int) -> None:
        self._add(make_prompt(length, seed), max_tokens)

    def _add(self, prompt: list[int], max_tokens: int, **options: Any) -> None:
        _, log = self.driver.submit(prompt, max_tokens, **options)
        self._logs.append((prompt, log))
        self._unsaved.append(log)

    def go_on(self, number: int, length: int, max_tokens: int) -> None:
        """Submit the next turn of an ended request whose resident is there."""
        ended = [(prompt, log) for prompt, log in self._logs if log.is_ended and log.result.resident]
        here = [each for each in ended if each[1].result.resident in self.driver.scheduler.residents]
        if here:
            prompt, log = here[number % len(here)]
            until = log.result.prefilled_until
            tokens = (prompt + log.generated)[:until]
            self._add(tokens + make_prompt(length, number), max_tokens, resident=log.result.resident, reuse=until)

    def reserve(self, tokens: int) -> None:
        name = f"restore {len(self._reserved)}"
        self._reserved[name] = Reserved(self.driver, name, tokens)

    def share(self, eighths: int) -> None:
        scheduler = self.driver.scheduler
        at_start = scheduler.settings.memory_budget_bytes
        held = scheduler.running_bytes + scheduler.residents.bytes_leased
        asked = at_start * eighths // 8
        assert scheduler.admission.set_budget(asked) == min(max(asked, held), at_start)
        assert scheduler.running_bytes + scheduler.residents.bytes_held <= scheduler.residents.budget_bytes

    def save(self) -> None:
        for log in [log for log in self._unsaved if log.is_ended]:
            self._unsaved.remove(log)
            self.driver.mark_saved(log)

    def release(self) -> None:
        for name, reserved in self._reserved.items():
            if reserved.outcome:
                self.driver.scheduler.admission.release(name)

    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    def finish(self) -> None:
        """Run all to their ends, with as little memory as there is, and compare with cold runs."""

        def is_over() -> bool:
            self.save()
            self.release()
            return all(log.is_ended for _, log in self._logs) and all(each.outcome for each in self._reserved.values())

        self.driver.run_until(is_over)
        for prompt, log in self._logs:
            assert_cold(log, self._family, self._root, prompt)


lengths, answers, numbers = st.integers(2, 400), st.integers(1, 12), st.integers(0, 5)
operations = st.one_of(
    st.tuples(st.just(Storm.submit), numbers, lengths, answers),
    st.tuples(st.just(Storm.go_on), numbers, lengths, answers),
    st.tuples(st.just(Storm.reserve), st.integers(1, ROWS)),
    st.tuples(st.just(Storm.share), st.integers(0, 9)),
    st.tuples(st.just(Storm.step), st.integers(1, 15)),
    st.tuples(st.just(Storm.save)),
    st.tuples(st.just(Storm.release)),
)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
@settings(max_examples=10)
@given(planned=st.lists(operations, min_size=4, max_size=24))
@example(  # the budget is granted to the last byte while requests end
    planned=[
        (Storm.submit, 0, 2, 1),
        (Storm.submit, 0, 3, 1),
        *((Storm.reserve, tokens) for tokens in (1, 1, 571)),
        (Storm.step, 2),
        (Storm.share, 0),
    ]
)
@example(planned=[(Storm.submit, 0, 2, 2), (Storm.reserve, 1504), (Storm.step, 2), (Storm.share, 0)])
def test_any_shares_hang_nothing_and_change_no_token(
    family: str, root: Path, planned: list[tuple[Callable[..., None], *tuple[int, ...]]]
) -> None:
    storm = Storm(family, root)
    for act, *arguments in planned:
        act(storm, *arguments)
    storm.finish()
