"""Background chunks computed layer by layer: others wait for a layer, and no bit changes."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from support.backend.engine_driver import SchedulerDriver
from support.backend.families import FAMILIES, load_family, make_prompt
from warmline_backend.generation.events import StartedEvent
from warmline_backend.scheduler import scheduler as scheduling

STEP = 64


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_layerwise_chunks_have_bits_of_whole_chunks(family: str, exact: bool, root: Path) -> None:
    driver = SchedulerDriver(load_family(family, root), step=STEP, exact=exact)
    whole = driver.run(make_prompt(200), 1)
    again = driver.run(make_prompt(200), 1, background=True)
    assert again.result.first == whole.result.first and again.chunks == whole.chunks


@pytest.mark.parametrize("exact", [False, True])
def test_request_starts_after_one_layer_of_background_chunk(exact: bool, root: Path) -> None:
    model = load_family("llama", root)
    driver = SchedulerDriver(model, step=STEP, exact=exact)
    alone_first = driver.run(make_prompt(200), 1).result.first
    _, alone = driver.submit(make_prompt(200), 1, background=True)
    steps = driver.scheduler.step()
    next(steps)  # a layer of the first chunk
    _, other = driver.submit(make_prompt(150, 2), 4)
    assert list(steps) == [None] and not alone.chunks, "the turn ends without another layer"
    while not other.is_ended:
        for _ in driver.scheduler.step():
            assert other.is_ended or not alone.chunks, "not even the chunk that had begun is completed before"
    assert any(isinstance(event, StartedEvent) for event in alone.events)
    driver.run_until(lambda: alone.is_ended)
    assert alone.result.finish == "length"
    assert alone.result.first == alone_first, "a chunk that goes on later has the same bits"


def test_cancel_ends_background_request_within_chunk(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=STEP)
    name, alone = driver.submit(make_prompt(200), 1, background=True)
    steps = driver.scheduler.step()
    next(steps)
    driver.scheduler.cancel(name)
    assert list(steps) == [None] and (alone.result.finish, alone.chunks) == ("cancelled", [])
    assert driver.scheduler.is_idle and not driver.scheduler.running_bytes and not driver.scheduler.residents.bytes_held


def test_failing_layer_discards_background_request_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=STEP)
    _, alone = driver.submit(make_prompt(200), 1, background=True)

    def fail(_: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr("warmline_backend.kv_cache.chunk_draft.mx.eval", fail)
    steps = driver.scheduler.step()
    with pytest.raises(scheduling.DeviceBrokenError):  # the device can't compute a token either
        next(steps)
    monkeypatch.undo()
    assert alone.result.finish == "discarded" and driver.scheduler.is_idle


@pytest.mark.parametrize("family", FAMILIES)
def test_background_chunk_without_memory_is_halved(family: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV stays as before the chunk, though some of its layers were computed."""
    expected = SchedulerDriver(load_family(family, root), step=STEP // 2).run(make_prompt(200), 1).result.first
    driver, evaluate, failures = SchedulerDriver(load_family(family, root), step=STEP), mx.eval, [2]
    _, alone = driver.submit(make_prompt(200), 1, background=True)

    def fail_at_second_layer(*arrays: Any) -> None:
        failures[0] -= 1
        if failures[0] == 0:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        evaluate(*arrays)

    monkeypatch.setattr("warmline_backend.kv_cache.chunk_draft.mx.eval", fail_at_second_layer)
    driver.run_until(lambda: alone.is_ended)
    assert alone.chunks[0] == STEP // 2 and alone.result.finish == "length"
    assert alone.result.first == expected


@pytest.mark.parametrize(
    ("tokens_per_s", "exact", "expected"),
    [(0.0, False, 32), (1.0, False, 32), (100.0, False, 100), (1e6, False, 2048), (100.0, True, 2048)],
)
def test_background_step_is_sized_by_speed(tokens_per_s: float, exact: bool, expected: int, root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=2048, exact=exact)
    if tokens_per_s:
        driver.scheduler.rates.record_prefill(4096, int(tokens_per_s * 10), 10.0)
    driver.submit(make_prompt(200), 1, background=True)
    (sequence,) = driver.scheduler._queues.waiting
    assert len(driver.served.layout.template) == 2
    assert driver.scheduler._prefiller._choose_background_step(sequence) == expected


def test_background_chunks_are_no_measure_of_speed(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root), step=STEP)
    driver.run(make_prompt(200), 1, background=True)
    assert not driver.scheduler.rates.prefill_rates and driver.scheduler.step_stats.prefilled_tokens == 200
