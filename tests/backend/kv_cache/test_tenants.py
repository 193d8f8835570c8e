"""Tenants: residents and running requests are refused to other roots."""

from pathlib import Path

import pytest

from support.backend.engine_driver import Drive
from support.backend.families import prompt_of, served
from warmline_backend.kv_cache.residents import ResidentMismatchError

MINE, THEIRS = b"m" * 16, b"t" * 16


def test_resident_of_other_root_is_refused(root: Path) -> None:
    drive, prompt = Drive(served("llama", root)), prompt_of(70)
    resident = drive.run(prompt, 2, root=MINE).result.resident
    assert [each.root for each in drive.scheduler.residents.list_residents()] == [MINE]
    for other in (THEIRS, b""):
        for keep in (True, False):
            with pytest.raises(ResidentMismatchError, match="another model or tenant"):
                drive.submit(prompt, 2, resident=resident, reuse=64, keep=keep, root=other)
    assert drive.run(prompt, 2, resident=resident, reuse=64, root=MINE).reused == 64


def test_leader_of_other_root_is_refused(root: Path) -> None:
    drive, prompt = Drive(served("llama", root), step=16), prompt_of(70)
    name, leader = drive.submit(prompt, 2, root=MINE)
    with pytest.raises(ResidentMismatchError, match="another tenant"):
        drive.submit(prompt, 2, follow=name, reuse=64, root=THEIRS)
    _, follower = drive.submit(prompt, 2, follow=name, reuse=64, root=MINE)
    drive.until(lambda: leader.is_ended and follower.is_ended)
    assert follower.reused == 64
