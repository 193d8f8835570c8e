"""Detached prefills: finished only on an idle engine, and ended first for memory and places."""

from pathlib import Path

import pytest

from support.backend.cold_runs import compare_greedy
from support.backend.engine_driver import Drive
from support.backend.families import FAMILIES, cold, prompt_of, served, tolerance
from warmline_backend.generation.events import TokenEvent


@pytest.mark.parametrize("family", FAMILIES)
def test_detached_prefill_finishes_and_leaves_resident(family: str, root: Path) -> None:
    drive = Drive(served(family, root), step=50)
    name, log = drive.submit(prompt_of(130), 8)
    drive.until(lambda: len(log.chunks) == 1)
    assert drive.scheduler.detach(name)
    drive.until(lambda: log.is_ended)
    assert (log.result.finish, log.result.prefilled_until) == ("cancelled", 129)
    assert not any(isinstance(event, TokenEvent) for event in log.events) and drive.scheduler.is_idle
    again = drive.run(prompt_of(130), 8, resident=log.result.resident, reuse=129)
    truth = cold(drive.served, family, prompt_of(130), 8)
    assert compare_greedy(truth.tokens, again.generated, truth.margins, tolerance(family))
    assert again.result.timings.prefilled == 1


def test_detached_prefill_computes_only_alone(root: Path) -> None:
    drive = Drive(served("llama", root), step=20)
    name, alone = drive.submit(prompt_of(100), 8)
    drive.until(lambda: len(alone.chunks) == 1)
    assert drive.scheduler.detach(name)
    _, other = drive.submit(prompt_of(300, 2), 100)
    drive.until(lambda: other.chunks[-1:] == [299])
    assert len(alone.chunks) == 1, "though it was the shorter one, and passed over 15 times"
    drive.until(lambda: alone.is_ended)
    assert alone.result.prefilled_until == 99 and not other.is_ended, "but not behind answers"


def test_follower_makes_detached_prefill_attended(root: Path) -> None:
    drive = Drive(served("llama", root), step=20)
    name, leader = drive.submit(prompt_of(100), 8)
    drive.until(lambda: len(leader.chunks) == 1)
    assert drive.scheduler.detach(name)
    _, follower = drive.submit(prompt_of(100), 8, follow=name, reuse=99)
    _, other = drive.submit(prompt_of(300, 2), 1)
    drive.until(lambda: follower.is_ended)
    assert leader.result.finish == "cancelled" and not other.is_ended
    assert follower.generated == cold(drive.served, "llama", prompt_of(100), 8).tokens
    assert leader.result.resident in drive.scheduler.residents


def test_detach_without_prefill_is_refused(root: Path) -> None:
    drive = Drive(served("llama", root), places=1)
    decoding, stream = drive.submit(prompt_of(20), 30)
    drive.until(lambda: any(isinstance(event, TokenEvent) for event in stream.events))
    queued, _ = drive.submit(prompt_of(60), 4)
    for name in (decoding, queued, "nobody"):
        assert not drive.scheduler.detach(name)
    drive.scheduler.cancel(queued)
    drive.until(lambda: stream.is_ended)
    assert stream.result.finish == "length"
    keeps_nothing = Drive(served("llama", root), step=20, keeps=False)
    name, log = keeps_nothing.submit(prompt_of(60), 4)
    keeps_nothing.until(lambda: bool(log.chunks))
    assert not keeps_nothing.scheduler.detach(name)


def test_waiting_detached_request_needs_follower(root: Path) -> None:
    drive = Drive(served("llama", root), places=1)
    _, running = drive.submit(prompt_of(20), 30)
    drive.until(lambda: any(isinstance(event, TokenEvent) for event in running.events))
    name, leader = drive.submit(prompt_of(60), 4)
    second, follower = drive.submit(prompt_of(60), 4, follow=name, reuse=59)
    assert drive.scheduler.detach(name)
    drive.step()
    assert not leader.is_ended
    drive.scheduler.cancel(second)
    drive.step()
    assert leader.result.finish == follower.result.finish == "cancelled" and not running.is_ended
    drive.until(lambda: running.is_ended)


def test_detached_prefill_yields_memory(root: Path) -> None:
    drive = Drive(served("llama", root), step=50, budget=600_000)
    name, alone = drive.submit(prompt_of(600), 8)
    drive.until(lambda: len(alone.chunks) == 2)
    assert drive.scheduler.detach(name)
    _, other = drive.submit(prompt_of(400, 2), 5)
    drive.step()
    assert (alone.result.finish, alone.result.prefilled_until) == ("cancelled", 100)
    drive.until(lambda: other.is_ended)
    assert other.generated == cold(drive.served, "llama", prompt_of(400, 2), 5).tokens
    assert alone.result.resident in drive.scheduler.residents


def test_detached_prefill_is_kept_when_its_end_frees_too_little(root: Path) -> None:
    model = served("llama", root)
    drive = Drive(model, step=50, places=2, budget=model.kv_bytes(2560))
    _, running = drive.submit(prompt_of(1000, 2), 500)
    drive.until(lambda: any(isinstance(event, TokenEvent) for event in running.events))
    name, alone = drive.submit(prompt_of(600), 8)
    drive.until(lambda: len(alone.chunks) == 2)
    assert drive.scheduler.detach(name)
    _, other = drive.submit(prompt_of(2200, 3), 4)  # has no room before the answer that runs has ended
    drive.until(lambda: alone.is_ended)
    assert alone.result.prefilled_until == 599 and not other.events and not running.is_ended


def test_kv_to_save_counts_as_not_freed(root: Path) -> None:
    """Its KV has to be saved first, so its end would free nothing."""
    model = served("llama", root)
    drive = Drive(model, step=50, budget=model.kv_bytes(1500))
    name, alone = drive.submit(prompt_of(800), 8)
    drive.until(lambda: alone.chunks[-1:] == [750])
    assert drive.scheduler.detach(name)
    _, other = drive.submit(prompt_of(700, 2), 5)
    drive.until(lambda: alone.is_ended)
    assert alone.result.prefilled_until == 799 and not other.events
    drive.mark_saved(alone)
    drive.until(lambda: other.is_ended)


def test_detached_prefill_yields_to_restore(root: Path) -> None:
    drive = Drive(served("llama", root), step=50, budget=600_000)
    name, alone = drive.submit(prompt_of(600), 8)
    drive.until(lambda: len(alone.chunks) == 2)
    granted: list[str] = []
    drive.scheduler.admission.reserve("restore", 300_000, lambda: granted.append("restore"))
    assert not granted
    assert drive.scheduler.detach(name)
    drive.step()
    assert alone.result.finish == "cancelled" and granted


def test_detached_prefill_yields_its_place(root: Path) -> None:
    drive = Drive(served("llama", root), step=50, places=1)
    name, alone = drive.submit(prompt_of(600), 8)
    drive.until(lambda: len(alone.chunks) == 2)
    _, other = drive.submit(prompt_of(40, 2), 5)
    drive.step()
    assert not other.events
    assert drive.scheduler.detach(name)
    drive.until(lambda: other.is_ended)
    assert alone.result.prefilled_until == 150
