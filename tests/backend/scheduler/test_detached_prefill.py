"""Detached prefills: finished only on an idle engine, and ended first for memory and places."""

from pathlib import Path

import pytest

from support.backend.cold_runs import compare_greedy
from support.backend.engine_driver import SchedulerDriver
from support.backend.families import FAMILIES, compute_cold, get_tolerance, load_family, make_prompt
from warmline_backend.generation.events import TokenEvent


@pytest.mark.parametrize("family", FAMILIES)
def test_detached_prefill_finishes_and_leaves_resident(family: str, root: Path) -> None:
    driver = SchedulerDriver(load_family(family, root), step=50)
    name, log = driver.submit(make_prompt(130), 8)
    driver.run_until(lambda: len(log.chunks) == 1)
    assert driver.scheduler.detach(name)
    driver.run_until(lambda: log.is_ended)
    assert (log.result.finish, log.result.prefilled_until) == ("cancelled", 129)
    assert not any(isinstance(event, TokenEvent) for event in log.events) and driver.scheduler.is_idle
    again = driver.run(make_prompt(130), 8, resident=log.result.resident, reuse=129)
    truth = compute_cold(driver.served, family, make_prompt(130), 8)
    assert compare_greedy(truth.tokens, again.generated, truth.margins, get_tolerance(family))
    assert again.result.timings.prefilled == 1


def test_detached_prefill_computes_only_alone(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=20)
    name, alone = driver.submit(make_prompt(100), 8)
    driver.run_until(lambda: len(alone.chunks) == 1)
    assert driver.scheduler.detach(name)
    _, other = driver.submit(make_prompt(300, 2), 100)
    driver.run_until(lambda: other.chunks[-1:] == [299])
    assert len(alone.chunks) == 1, "though it was the shorter one, and passed over 15 times"
    driver.run_until(lambda: alone.is_ended)
    assert alone.result.prefilled_until == 99 and not other.is_ended, "but not behind answers"


def test_follower_makes_detached_prefill_attended(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=20)
    name, leader = driver.submit(make_prompt(100), 8)
    driver.run_until(lambda: len(leader.chunks) == 1)
    assert driver.scheduler.detach(name)
    _, follower = driver.submit(make_prompt(100), 8, follow=name, reuse=99)
    _, other = driver.submit(make_prompt(300, 2), 1)
    driver.run_until(lambda: follower.is_ended)
    assert leader.result.finish == "cancelled" and not other.is_ended
    assert follower.generated == compute_cold(driver.served, "llama", make_prompt(100), 8).tokens
    assert leader.result.resident in driver.scheduler.residents


def test_detach_without_prefill_is_refused(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), places=1)
    decoding, stream = driver.submit(make_prompt(20), 30)
    driver.run_until(lambda: any(isinstance(event, TokenEvent) for event in stream.events))
    queued, _ = driver.submit(make_prompt(60), 4)
    for name in (decoding, queued, "nobody"):
        assert not driver.scheduler.detach(name)
    driver.scheduler.cancel(queued)
    driver.run_until(lambda: stream.is_ended)
    assert stream.result.finish == "length"
    without_residents = SchedulerDriver(load_family("llama", root), step=20, keeps=False)
    name, log = without_residents.submit(make_prompt(60), 4)
    without_residents.run_until(lambda: bool(log.chunks))
    assert not without_residents.scheduler.detach(name)


def test_waiting_detached_request_needs_follower(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), places=1)
    _, running = driver.submit(make_prompt(20), 30)
    driver.run_until(lambda: any(isinstance(event, TokenEvent) for event in running.events))
    name, leader = driver.submit(make_prompt(60), 4)
    second, follower = driver.submit(make_prompt(60), 4, follow=name, reuse=59)
    assert driver.scheduler.detach(name)
    driver.step()
    assert not leader.is_ended
    driver.scheduler.cancel(second)
    driver.step()
    assert leader.result.finish == follower.result.finish == "cancelled" and not running.is_ended
    driver.run_until(lambda: running.is_ended)


def test_detached_prefill_yields_memory(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=50, budget=600_000)
    name, alone = driver.submit(make_prompt(600), 8)
    driver.run_until(lambda: len(alone.chunks) == 2)
    assert driver.scheduler.detach(name)
    _, other = driver.submit(make_prompt(400, 2), 5)
    driver.step()
    assert (alone.result.finish, alone.result.prefilled_until) == ("cancelled", 100)
    driver.run_until(lambda: other.is_ended)
    assert other.generated == compute_cold(driver.served, "llama", make_prompt(400, 2), 5).tokens
    assert alone.result.resident in driver.scheduler.residents


def test_detached_prefill_is_kept_when_its_end_frees_too_little(root: Path) -> None:
    model = load_family("llama", root)
    driver = SchedulerDriver(model, step=50, places=2, budget=model.kv_bytes(2560))
    _, running = driver.submit(make_prompt(1000, 2), 500)
    driver.run_until(lambda: any(isinstance(event, TokenEvent) for event in running.events))
    name, alone = driver.submit(make_prompt(600), 8)
    driver.run_until(lambda: len(alone.chunks) == 2)
    assert driver.scheduler.detach(name)
    _, other = driver.submit(make_prompt(2200, 3), 4)  # has no room before the answer that runs has ended
    driver.run_until(lambda: alone.is_ended)
    assert alone.result.prefilled_until == 599 and not other.events and not running.is_ended


def test_kv_to_save_counts_as_not_freed(root: Path) -> None:
    """Its KV has to be saved first, so its end would free nothing."""
    model = load_family("llama", root)
    driver = SchedulerDriver(model, step=50, budget=model.kv_bytes(1500))
    name, alone = driver.submit(make_prompt(800), 8)
    driver.run_until(lambda: alone.chunks[-1:] == [750])
    assert driver.scheduler.detach(name)
    _, other = driver.submit(make_prompt(700, 2), 5)
    driver.run_until(lambda: alone.is_ended)
    assert alone.result.prefilled_until == 799 and not other.events
    driver.mark_saved(alone)
    driver.run_until(lambda: other.is_ended)


def test_detached_prefill_yields_to_restore(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=50, budget=600_000)
    name, alone = driver.submit(make_prompt(600), 8)
    driver.run_until(lambda: len(alone.chunks) == 2)
    granted: list[str] = []
    driver.scheduler.admission.reserve("restore", 300_000, lambda: granted.append("restore"))
    assert not granted
    assert driver.scheduler.detach(name)
    driver.step()
    assert alone.result.finish == "cancelled" and granted


def test_detached_prefill_yields_its_place(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=50, places=1)
    name, alone = driver.submit(make_prompt(600), 8)
    driver.run_until(lambda: len(alone.chunks) == 2)
    _, other = driver.submit(make_prompt(40, 2), 5)
    driver.step()
    assert not other.events
    assert driver.scheduler.detach(name)
    driver.run_until(lambda: other.is_ended)
    assert alone.result.prefilled_until == 150
