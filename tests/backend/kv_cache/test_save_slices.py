"""Slices of a save: what is copied between steps, of a KV that moves meanwhile, is the file of one copy."""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.backend.engine_driver import FINGERPRINT, SchedulerDriver
from support.backend.families import FAMILIES, load_family, make_prompt
from support.backend.live_backend import wait_until
from warmline_backend.engine import save_slices
from warmline_backend.engine.kv_transfer import TransferJob
from warmline_backend.engine.save_slices import (
    CHUNK_SLICE_BYTES_MAX,
    PIECE_BYTES_MAX,
    SLICE_BYTES_MAX,
    SaveSlices,
    choose_slice_bytes,
    list_pieces,
)
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
        return self._works.pop(future)(self._driver.scheduler).result()


def open_slices(driver: SchedulerDriver, **source: str) -> tuple[StoppedEngine, SaveSlices]:
    engine: Any = StoppedEngine(driver)
    slices = SaveSlices(
        engine,
        ThreadPoolExecutor(1),
        lambda scheduler: scheduler.save_source.find_kv(END, **source),
        lambda kv, leaves, piece: kv.slice_rows(0, END, leaves, piece),
        0,
        END,
    )
    slices.begin(driver.scheduler)
    return engine, slices


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_of_running_request_make_file_of_one_copy(
    family: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_slices, "PIECE_BYTES_MAX", 6000)
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
    assert engine.commands >= len(driver.served.row_names) - 1, "one piece in each slice, the first one before"


@pytest.mark.parametrize(
    ("shape", "counts"),
    [
        ((), [1]),
        ((0, 7), []),
        ((1, 2, 4, 0), [0]),
        ((3,), [3]),
        ((1, 3, 10), [30]),
        ((1, 8, 10), [50, 30]),
        ((1, 2, 60, 1), [50, 10, 50, 10]),
        ((2, 1, 3, 70), [50, 20] * 6),
    ],
)
def test_pieces_follow_each_other_in_the_file(
    shape: tuple[int, ...], counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_slices, "PIECE_BYTES_MAX", 100)
    numbers = np.arange(math.prod(shape), dtype=np.uint16).reshape(shape)
    pieces = [numbers[piece].ravel() for piece in list_pieces(shape, 2)]
    assert [len(piece) for piece in pieces] == counts
    assert [int(number) for piece in pieces for number in piece] == list(range(numbers.size))


def test_slices_take_half_a_decode_step() -> None:
    choose = partial(choose_slice_bytes, is_prefilling=True)
    assert choose(0.0, 0.009) == PIECE_BYTES_MAX, "the first ones, at an unknown rate"
    assert choose(1e9, 0.009) == 4_500_000
    assert choose(5e8, 1.0) == 10_000_000, "no more than 20 ms"
    assert choose(1e9, 1e-4) == PIECE_BYTES_MAX
    assert choose(1e12, 0.009) == SLICE_BYTES_MAX


def test_slices_are_large_where_no_step_waits() -> None:
    assert [choose_slice_bytes(rate, 0.0, False) for rate in (0.0, 1e6, 1e12)] == [SLICE_BYTES_MAX] * 3
    assert choose_slice_bytes(1e6, 0.0, True) == SLICE_BYTES_MAX
    assert choose_slice_bytes(1e9, 0.0, True) == 20_000_000
    assert choose_slice_bytes(1e12, 0.0, True) == CHUNK_SLICE_BYTES_MAX, "few come between chunks"


@pytest.mark.parametrize("decodes", [True, False])
def test_slices_beside_decode_steps_are_bounded_by_time(
    decodes: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SchedulerDriver(load_family("llama", root))
    resident = driver.run(PROMPT, 4).result.resident
    if decodes:
        _, log = driver.submit(make_prompt(30, 6), 1000)
        driver.run_until(lambda: len(log.events) > 3)
    driver.scheduler.rates.copy.add(1 << 20, 1 << 20)  # one byte a second
    engine, slices = open_slices(driver, resident_id=resident)
    monkeypatch.setattr(save_slices, "PIECE_BYTES_MAX", 1)
    stream = slices.open_stream(engine.wait)
    tensors = [list(stream.read(name)) for name in sorted(stream.shapes)]
    assert all(len(pieces) == 1 for pieces in tensors)
    assert engine.commands == (len(tensors) - 1 if decodes else 1), "the first piece is copied before"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_save_goes_on_in_residents_of_next_turns(
    family: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two turns begin and end between two slices: the rows are in the last one's resident by then."""
    monkeypatch.setattr(save_slices, "SLICE_BYTES_MAX", 1)
    driver = SchedulerDriver(load_family(family, root))
    first = last = driver.run(PROMPT, 4)
    meta = FileMeta(kind="segment", id="a" * 32, fingerprint=FINGERPRINT, root="", prefix="", start=0, end=END)
    engine, slices = open_slices(driver, resident_id=first.result.resident)
    prompt = PROMPT
    for number in (1, 2):
        prompt = [*prompt, *last.generated, *make_prompt(9, number)]
        reuse = last.result.prefilled_until
        last = driver.run(prompt, 4, resident=last.result.resident, reuse=reuse)
        assert last.reused == reuse
    tokens = pack_tokens(PROMPT[:END])
    write_segment_file(tmp_path / "file", meta, slices.open_stream(engine.wait), tokens)
    verify_file(tmp_path / "file")
    find_kv = driver.scheduler.save_source.find_kv
    assert find_kv(END, resident_id=first.result.resident) is find_kv(END, resident_id=last.result.resident)
    with pytest.raises(RowsUnavailableError, match="tokens can be saved"):
        find_kv(last.result.prefilled_until, resident_id=first.result.resident)


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
