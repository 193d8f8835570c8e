"""Save sources: a save finds its rows after takeovers and ends, and releases only saved ones."""

from pathlib import Path

import pytest

from support.backend.engine_driver import SchedulerDriver
from support.backend.families import FAMILIES, load_family, make_prompt
from warmline_backend.kv_cache.kv import RowsUnavailableError
from warmline_backend.kv_cache.residents import RESIDENT_BY_REQUEST_MAX, ResidentNotFoundError


@pytest.mark.parametrize("family", FAMILIES)
def test_save_continues_after_request_is_cancelled(family: str, root: Path) -> None:
    driver = SchedulerDriver(load_family(family, root), step=50)
    name, log = driver.submit(make_prompt(200), 8)
    driver.run_until(lambda: log.chunks == [50, 100])
    scheduler = driver.scheduler
    first = scheduler.save_source.find_kv(50, running_id=name).slice_rows(0, 50)
    result = scheduler.cancel(name)
    assert result is not None and result.prefilled_until == 100
    held = scheduler.save_source.find_kv(100, running_id=name)
    assert held is scheduler.residents.find_kv(result.resident)
    assert first.keys() == held.slice_rows(50, 100).keys() == driver.served.row_names
    with pytest.raises(RowsUnavailableError):
        scheduler.save_source.find_kv(101, running_id=name)
    assert scheduler.residents.has_leased
    scheduler.save_source.mark_saved("", name, 100)
    assert not scheduler.residents.has_leased, "all of it is on disk"


def test_partly_saved_resident_keeps_lease(root: Path) -> None:
    driver = SchedulerDriver(load_family("gemma3", root), step=50)
    name, log = driver.submit(make_prompt(200), 8)
    driver.run_until(lambda: log.chunks == [50, 100, 150])
    result = driver.scheduler.cancel(name)
    assert result is not None
    before = driver.scheduler.residents.bytes_held
    driver.scheduler.save_source.mark_saved("", name, 100)
    held = driver.scheduler.save_source.find_kv(150, resident_id=result.resident)
    assert driver.scheduler.residents.has_leased and driver.scheduler.residents.bytes_held < before
    assert held.slice_rows(100, 150).keys() == driver.served.row_names
    with pytest.raises(RowsUnavailableError):
        held.slice_rows(50, 100)
    driver.scheduler.save_source.mark_saved(result.resident, "", 150)
    assert not driver.scheduler.residents.has_leased


def test_states_stay_until_all_is_saved(root: Path) -> None:
    driver = SchedulerDriver(load_family("qwen3_5", root), step=50)
    marks = (10, 20, 30, 40, 60, 70, 80)
    name, log = driver.submit(make_prompt(200), 8, checkpoints=marks)
    driver.run_until(lambda: bool(log.chunks) and log.chunks[-1] == 80)
    driver.scheduler.save_source.mark_saved("", name, 80)
    assert sorted(driver.scheduler.save_source.find_kv(80, running_id=name).checkpoints) == list(marks), "it goes on"
    result = driver.scheduler.cancel(name)
    assert result is not None and result.checkpoints == list(marks)
    driver.scheduler.save_source.mark_saved(result.resident, "", 70)
    assert driver.scheduler.residents.has_leased
    driver.scheduler.save_source.mark_saved(result.resident, "", 80)
    assert sorted(driver.scheduler.save_source.find_kv(80, resident_id=result.resident).checkpoints) == [10, 60, 70, 80]


def test_taken_over_resident_is_found_by_first_request(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=50)
    name, log = driver.submit(make_prompt(90), 10)
    driver.run_until(lambda: log.is_ended)
    onward = make_prompt(90) + log.generated + make_prompt(300, 3)
    _, more = driver.submit(onward, 5, resident=log.result.resident, reuse=100)
    driver.run_until(lambda: len(more.chunks) == 2)
    assert driver.scheduler.save_source.find_kv(100, running_id=name).tokens[:100] == onward[:100]
    with pytest.raises(RowsUnavailableError):
        driver.scheduler.save_source.find_kv(101, running_id=name)


def test_only_last_requests_residents_are_remembered(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root))
    residents = driver.scheduler.residents
    driver.run(make_prompt(20), 1)
    assert residents.find_by_request("r1")
    kv = driver.served.make_kv(journals=True)
    for n in range(RESIDENT_BY_REQUEST_MAX):
        residents.delete(residents.add(kv, lease_s=0.0, request_id=f"other{n}"))
    assert residents.find_by_request("r1") == "" and residents.find_by_request("other0")
    with pytest.raises(ResidentNotFoundError):
        driver.scheduler.save_source.find_kv(10, running_id="r1")
    with pytest.raises(ResidentNotFoundError):
        driver.scheduler.save_source.find_kv(0, running_id="other0")
