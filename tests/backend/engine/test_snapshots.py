"""Save sources: a save finds its rows after takeovers and ends, and releases only saved ones."""

from pathlib import Path

import pytest

from support.backend.engine_driver import Drive
from support.backend.families import FAMILIES, prompt_of, served
from warmline_backend.kv_cache.kv import RowsUnavailableError
from warmline_backend.kv_cache.residents import RESIDENT_BY_REQUEST_MAX, ResidentNotFoundError


@pytest.mark.parametrize("family", FAMILIES)
def test_save_continues_after_request_is_cancelled(family: str, root: Path) -> None:
    drive = Drive(served(family, root), step=50)
    name, log = drive.submit(prompt_of(200), 8)
    drive.until(lambda: log.chunks == [50, 100])
    scheduler = drive.scheduler
    first = scheduler.save_source.find_kv(50, running_id=name).slice_rows(0, 50)
    result = scheduler.cancel(name)
    assert result is not None and result.prefilled_until == 100
    held = scheduler.save_source.find_kv(100, running_id=name)
    assert held is scheduler.residents.find_kv(result.resident)
    assert first.keys() == held.slice_rows(50, 100).keys() == drive.served.row_names
    with pytest.raises(RowsUnavailableError):
        scheduler.save_source.find_kv(101, running_id=name)
    assert scheduler.residents.has_leased
    scheduler.save_source.mark_saved("", name, 100)
    assert not scheduler.residents.has_leased, "all of it is on disk"


def test_partly_saved_resident_keeps_lease(root: Path) -> None:
    drive = Drive(served("gemma3", root), step=50)
    name, log = drive.submit(prompt_of(200), 8)
    drive.until(lambda: log.chunks == [50, 100, 150])
    result = drive.scheduler.cancel(name)
    assert result is not None
    before = drive.scheduler.residents.bytes_held
    drive.scheduler.save_source.mark_saved("", name, 100)
    held = drive.scheduler.save_source.find_kv(150, resident_id=result.resident)
    assert drive.scheduler.residents.has_leased and drive.scheduler.residents.bytes_held < before
    assert held.slice_rows(100, 150).keys() == drive.served.row_names
    with pytest.raises(RowsUnavailableError):
        held.slice_rows(50, 100)
    drive.scheduler.save_source.mark_saved(result.resident, "", 150)
    assert not drive.scheduler.residents.has_leased


def test_states_stay_until_all_is_saved(root: Path) -> None:
    drive = Drive(served("qwen3_5", root), step=50)
    marks = (10, 20, 30, 40, 60, 70, 80)
    name, log = drive.submit(prompt_of(200), 8, checkpoints=marks)
    drive.until(lambda: bool(log.chunks) and log.chunks[-1] == 80)
    drive.scheduler.save_source.mark_saved("", name, 80)
    assert sorted(drive.scheduler.save_source.find_kv(80, running_id=name).checkpoints) == list(marks), "it goes on"
    result = drive.scheduler.cancel(name)
    assert result is not None and result.checkpoints == list(marks)
    drive.scheduler.save_source.mark_saved(result.resident, "", 70)
    assert drive.scheduler.residents.has_leased
    drive.scheduler.save_source.mark_saved(result.resident, "", 80)
    assert sorted(drive.scheduler.save_source.find_kv(80, resident_id=result.resident).checkpoints) == [10, 60, 70, 80]


def test_taken_over_resident_is_found_by_first_request(root: Path) -> None:
    drive = Drive(served("llama", root), step=50)
    name, log = drive.submit(prompt_of(90), 10)
    drive.until(lambda: log.is_ended)
    onward = prompt_of(90) + log.generated + prompt_of(300, 3)
    _, more = drive.submit(onward, 5, resident=log.result.resident, reuse=100)
    drive.until(lambda: len(more.chunks) == 2)
    assert drive.scheduler.save_source.find_kv(100, running_id=name).tokens[:100] == onward[:100]
    with pytest.raises(RowsUnavailableError):
        drive.scheduler.save_source.find_kv(101, running_id=name)


def test_only_last_requests_residents_are_remembered(root: Path) -> None:
    drive = Drive(served("llama", root))
    residents = drive.scheduler.residents
    drive.run(prompt_of(20), 1)
    assert residents.find_by_request("r1")
    kv = drive.served.make_kv(journals=True)
    for n in range(RESIDENT_BY_REQUEST_MAX):
        residents.delete(residents.add(kv, lease_s=0.0, request_id=f"other{n}"))
    assert residents.find_by_request("r1") == "" and residents.find_by_request("other0")
    with pytest.raises(ResidentNotFoundError):
        drive.scheduler.save_source.find_kv(10, running_id="r1")
    with pytest.raises(ResidentNotFoundError):
        drive.scheduler.save_source.find_kv(0, running_id="other0")
