"""Tenants: residents and running requests are refused to other roots."""

from pathlib import Path

import pytest

from support.backend.engine_driver import SchedulerDriver
from support.backend.families import load_family, make_prompt
from warmline_backend.kv_cache.residents import ResidentMismatchError

MINE, THEIRS = b"m" * 16, b"t" * 16


def test_resident_of_other_root_is_refused(root: Path) -> None:
    driver, prompt = SchedulerDriver(load_family("llama", root)), make_prompt(70)
    resident = driver.run(prompt, 2, root=MINE).result.resident
    assert [each.root for each in driver.scheduler.residents.listing.list_residents()] == [MINE]
    for other in (THEIRS, b""):
        for keep in (True, False):
            with pytest.raises(ResidentMismatchError, match="another model or tenant"):
                driver.submit(prompt, 2, resident=resident, reuse=64, keep=keep, root=other)
    assert driver.run(prompt, 2, resident=resident, reuse=64, root=MINE).reused == 64


def test_leader_of_other_root_is_refused(root: Path) -> None:
    driver, prompt = SchedulerDriver(load_family("llama", root), step=16), make_prompt(70)
    name, leader = driver.submit(prompt, 2, root=MINE)
    with pytest.raises(ResidentMismatchError, match="another tenant"):
        driver.submit(prompt, 2, follow=name, reuse=64, root=THEIRS)
    _, follower = driver.submit(prompt, 2, follow=name, reuse=64, root=MINE)
    driver.run_until(lambda: leader.is_ended and follower.is_ended)
    assert follower.reused == 64
