"""Waits of requests in the engine by reason, and the time that a save's limit counts."""

import asyncio
import errno
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.backend.engine_driver import EventLog, SchedulerDriver
from support.backend.families import load_family, make_prompt
from support.backend.live_backend import WAIT_S, EngineHold, LiveBackend, read_result, with_backend
from warmline_backend.generation.events import TokenEvent
from warmline_backend.kv_cache import segment_io
from warmline_common.protocol.messages import RestoreRequest, SaveRequest, SegmentRef, SegmentSpec
from warmline_common.protocol.waits import AUDIT, LEADER, MEMORY, PLACE, SAVE, STEP, TURNS

FolderOf = Callable[..., Path]
STEP_TOKENS = 64
STEP_S = 0.05


class SlowModel:
    """Model each call of which takes STEP_S longer."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *args: object, **options: object) -> object:
        time.sleep(STEP_S)
        return self._model(*args, **options)

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


def list_waits(log: EventLog) -> set[str]:
    """Reasons of waits, but for those of every request."""
    waits = log.result.timings.waits
    assert all(seconds >= 0.0 for seconds in waits.values())
    return {reason for reason, seconds in waits.items() if seconds > 0.0} - {STEP, TURNS}


@pytest.fixture
def driver(root: Path) -> SchedulerDriver:
    model = load_family("llama", root)
    return SchedulerDriver(model, step=STEP_TOKENS, budget=model.row_bytes * 1536, places=2)


def test_request_alone_waits_for_nothing_but_a_step(driver: SchedulerDriver) -> None:
    log = driver.run(make_prompt(100), 2)
    waits = log.result.timings.waits
    assert not list_waits(log) and set(waits) == {STEP, TURNS}
    assert waits[TURNS] == 0.0, "time between its own steps is no wait for others"


def test_prefill_waits_for_chunks_and_answers_of_others(driver: SchedulerDriver) -> None:
    _, long = driver.submit(make_prompt(900), 2)
    driver.step()
    _, short = driver.submit(make_prompt(90, 2), 8)
    driver.run_until(lambda: long.is_ended and short.is_ended)
    assert long.result.timings.waits[TURNS] > short.result.timings.waits[TURNS] == 0.0


def test_request_waits_for_layer_of_audit(driver: SchedulerDriver) -> None:
    driver.submit(make_prompt(200), 1, background=True)
    next(driver.scheduler.step())
    _, log = driver.submit(make_prompt(100, 2), 2)
    driver.run_until(lambda: log.is_ended)
    assert list_waits(log) == {AUDIT} and STEP not in log.result.timings.waits


def test_request_waits_for_place_and_leader(driver: SchedulerDriver) -> None:
    leader, _ = driver.submit(make_prompt(200), 2)
    _, follower = driver.submit([*make_prompt(200), 7, 8], 2, follow=leader, reuse=190)
    driver.submit(make_prompt(100, 2), 2)
    _, third = driver.submit(make_prompt(90, 3), 2)
    driver.run_until(lambda: third.is_ended and follower.is_ended)
    assert LEADER in list_waits(follower) and list_waits(third) == {PLACE}
    assert third.result.timings.waits[TURNS] >= 0.0


def test_step_within_which_a_follower_starts_counts_once(root: Path) -> None:
    """A follower of a whole prompt starts once its leader's first step is under way, and waits for its end."""
    served = load_family("llama", root)
    driver = SchedulerDriver(replace(served, model=SlowModel(served.model)))
    prompt = make_prompt(100)
    leader, _ = driver.submit(prompt, 4)
    began = time.monotonic()
    _, log = driver.submit([*prompt, *make_prompt(10, 5)], 4, follow=leader, reuse=100)
    driver.run_until(lambda: any(isinstance(event, TokenEvent) for event in log.events))
    elapsed_s = time.monotonic() - began
    driver.run_until(lambda: log.is_ended)
    timings = log.result.timings
    assert timings.waits[LEADER] > STEP_S
    assert sum(timings.waits.values()) + timings.prefill_s + STEP_S <= elapsed_s, "with its own first step"


def test_request_waits_for_memory_and_save(driver: SchedulerDriver) -> None:
    _, long = driver.submit(make_prompt(900), 40)
    driver.step()
    _, waiting = driver.submit(make_prompt(900, 2), 2)
    driver.run_until(lambda: long.is_ended)
    driver.step()  # the resident of the long one is leased until it is saved
    driver.mark_saved(long)
    driver.run_until(lambda: waiting.is_ended)
    assert list_waits(waiting) == {MEMORY, SAVE}


def test_cancelled_request_has_waits_too(driver: SchedulerDriver) -> None:
    for number in range(2):
        driver.submit(make_prompt(200, number), 2)
    driver.step()
    name, log = driver.submit(make_prompt(90, 3), 2)
    driver.step()
    driver.scheduler.cancel(name)
    assert list_waits(log) == {PLACE} and TURNS not in log.result.timings.waits


# ---- saves and restores


async def generate(backend: LiveBackend) -> SaveRequest:
    async with backend.start_generation("a", await backend.render_prompt()) as response:
        end = await read_result(response)
    spec = SegmentSpec(id="a" * 32, start=0, end=end.prefilled_until)
    return SaveRequest(request_id="save", resident=end.resident, segments=[spec], write_timeout_s=60.0)


def test_save_limit_does_not_count_waits_for_engine(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []

    def recording(seconds: float | None) -> asyncio.Timeout:
        limits.append(seconds)
        return timeout(seconds)

    timeout = asyncio.timeout

    async def work(backend: LiveBackend) -> None:
        request = await generate(backend)
        with monkeypatch.context() as patch:
            patch.setattr("warmline_backend.engine.kv_transfer.asyncio.timeout", recording)
            async with EngineHold(backend.engine):
                saving = asyncio.ensure_future(backend.service.save(request))
                for _ in range(10):
                    await backend.request_json("GET", "/health")
                assert not saving.done() and 60.0 not in limits, "the engine is busy: no limit runs"
            await saving
        assert 60.0 in limits

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_disk_that_hangs_is_error_of_disk(
    tiny_folder: FolderOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def hang(*arguments: object) -> object:
        assert go_on.wait(WAIT_S)
        return write_segment_file(*arguments)  # type: ignore[arg-type]

    write_segment_file = segment_io.write_segment_file

    async def work(backend: LiveBackend) -> None:
        request = await generate(backend)
        request.write_timeout_s = 0.05
        monkeypatch.setattr(segment_io, "write_segment_file", hang)
        with pytest.raises(OSError, match="not written a segment in time") as failed:
            await backend.service.save(request)
        assert failed.value.errno == errno.ETIMEDOUT
        go_on.set()
        backend.service.runtime.kv_transfer._writer_pool.submit(lambda: None).result(WAIT_S)
        assert list(backend.home.segments.rglob("*.safetensors")) == []
        monkeypatch.undo()
        request.write_timeout_s = 60.0
        await backend.service.save(request)

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_restore_tells_what_it_waited_for(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        request = await generate(backend)
        await backend.service.save(request)
        (resident,) = backend.service.list_residents(with_ids=True).residents
        (spec,) = request.segments
        link = SegmentRef(id=spec.id, start=0, end=spec.end, upto=spec.end)
        reply = await backend.service.restore(RestoreRequest(request_id="r", tokens=resident.ids or b"", chain=[link]))
        assert set(reply.waits) == {STEP, MEMORY}

    with_backend(tiny_folder("llama"), tmp_path, work)
