"""Slices of a save: what is copied between steps, of a KV that moves meanwhile, is the file of one copy."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from support.backend.engine_driver import FINGERPRINT, SchedulerDriver
from support.backend.families import FAMILIES, load_family, make_prompt
from support.backend.live_backend import wait_until
from warmline_backend.engine import save_slices
from warmline_backend.engine.kv_transfer import TransferJob
from warmline_backend.engine.save_slices import SaveSlices
from warmline_backend.kv_cache.kv import KV, RowsUnavailableError
from warmline_backend.kv_cache.segment_io import OperationCancelledError, expose_bytes, write_segment_file
from warmline_common.protocol.tokens import pack_tokens
from warmline_common.storage.segment_file import FileMeta, verify_file

PROMPT = make_prompt(170)
END = 160


class StoppedEngine:
    """Engine that runs a command when `wait` asks for its result, after a step."""

    def __init__(self, driver: SchedulerDriver) -> None:
        self._driver, self._works = driver, dict[Future[Any], Callable[[Any], Any]]()
        self.commands = 0

    def submit(self, work: Callable[[Any], Any]) -> Future[Any]:
        self._works[future := Future()] = work
        return future

    def wait(self, future: Future[Any]) -> Any:
        self._driver.step()
        self.commands += 1
        return self._works.pop(future)(self._driver.scheduler)


def open_slices(driver: SchedulerDriver, **source: str) -> tuple[StoppedEngine, SaveSlices]:
    engine: Any = StoppedEngine(driver)
    slices = SaveSlices(
        engine,
        lambda scheduler: scheduler.save_source.find_kv(END, **source),
        lambda kv, leaves: kv.slice_rows(0, END, leaves),
        0,
        END,
    )
    slices.begin(driver.scheduler)
    return engine, slices


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_of_running_request_make_file_of_one_copy(
    family: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_slices, "SLICE_BYTES_MAX", 1)
    driver = SchedulerDriver(load_family(family, root))
    name, log = driver.submit(PROMPT, 60)
    driver.submit(make_prompt(120, 4), 60)  # joins its batch on the way, where the family can have one
    driver.run_until(lambda: len(log.events) > 3)
    kv: KV = driver.scheduler.save_source.find_kv(END, running_id=name)
    meta = FileMeta(kind="segment", id="a" * 32, fingerprint=FINGERPRINT, root="", prefix="", start=0, end=END)
    tokens = pack_tokens(PROMPT[:END])
    whole = write_segment_file(tmp_path / "whole", meta, expose_bytes(kv.slice_rows(0, END)), tokens)
    engine, slices = open_slices(driver, running_id=name)
    assert slices.tokens == PROMPT[:END]
    assert write_segment_file(tmp_path / "sliced", meta, slices.open_stream(engine.wait), tokens) == whole
    verify_file(tmp_path / "sliced")
    assert (tmp_path / "sliced").read_bytes() == (tmp_path / "whole").read_bytes()
    tensors = len(driver.served.row_names)
    assert engine.commands >= tensors // 2 - 1, "one tensor in each slice, unless it has no bytes, the first one before"


def test_kv_lost_between_slices_fails_save_and_leaves_no_file(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_slices, "SLICE_BYTES_MAX", 1)
    driver = SchedulerDriver(load_family("llama", root))
    resident = driver.run(PROMPT, 4).result.resident
    engine, slices = open_slices(driver, resident_id=resident)
    driver.submit([*PROMPT[:100], *make_prompt(90, 5)], 4, resident=resident, reuse=100)  # takes it over, and cuts it
    meta = FileMeta(kind="segment", id="a" * 32, fingerprint=FINGERPRINT, root="", prefix="", start=0, end=END)
    with pytest.raises(RowsUnavailableError, match="100 tokens can be saved, 160 were asked for"):
        write_segment_file(tmp_path / "file", meta, slices.open_stream(engine.wait), pack_tokens(PROMPT[:END]))
    assert list(tmp_path.iterdir()) == []


def test_waits_for_engine_stop_limit_of_disk_and_can_be_cancelled() -> None:
    async def work() -> None:
        job, loop = TransferJob("save", is_save=True), asyncio.get_running_loop()
        job.write_left_s = 60.0
        async with asyncio.timeout(30), job.limit_writing() as limit:
            for is_cancelled in (False, True):
                assert limit.when() is not None
                slice_made: Future[int] = Future()
                waiting = asyncio.ensure_future(asyncio.to_thread(job.wait_on_writer, loop, slice_made))
                await wait_until(lambda: limit.when() is None)
                if is_cancelled:
                    job.cancel()
                    with pytest.raises(OperationCancelledError):
                        await waiting
                else:
                    slice_made.set_result(7)
                    assert await waiting == 7
                    await wait_until(lambda: limit.when() is not None)
        assert 0 < job.write_left_s <= 60

    asyncio.run(work())
