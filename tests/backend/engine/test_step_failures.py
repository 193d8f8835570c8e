"""Failed steps: the loss of a batch or less, and of the process only with the device."""

import weakref
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from support.backend.engine_driver import EventLog, SchedulerDriver
from support.backend.families import compute_cold, load_family, make_prompt
from warmline_backend.scheduler.decoding.decode_group import DecodeGroup
from warmline_backend.scheduler.scheduler import FAILED_STEPS_MAX, DeviceBrokenError


class PlantedError(RuntimeError):
    pass


class FailingModel:
    """Model that raises once, at its `calls`-th call (of those with a batch of `batch`)."""

    def __init__(self, model: object, calls: int, batch: int = 0) -> None:
        self._model, self._left, self._batch = model, calls, batch

    def __call__(self, tokens: mx.array, *args: object, **kwargs: object) -> mx.array:
        if not self._batch or tokens.shape[0] == self._batch:
            self._left -= 1
            if self._left == 0:
                raise PlantedError("a planted fault")
        return self._model(tokens, *args, **kwargs)  # type: ignore[operator]

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


def make_failing_driver(root: Path, calls: int, batch: int = 0) -> SchedulerDriver:
    model = load_family("llama", root)
    return SchedulerDriver(replace(model, model=FailingModel(model.model, calls, batch)), step=1000)


def test_failed_step_discards_only_its_batch(root: Path) -> None:
    driver = make_failing_driver(root, 5, batch=2)
    _, one = driver.submit(make_prompt(40), 30)
    _, mate = driver.submit(make_prompt(41, 2), 30)
    _, apart = driver.submit(make_prompt(400, 3), 30)
    driver.run_until(lambda: one.is_ended and mate.is_ended and apart.is_ended)
    for log in (one, mate):
        assert (log.result.finish, log.result.resident) == ("discarded", "")
        assert "a planted fault" in log.result.error
    assert apart.generated == compute_cold(load_family("llama", root), "llama", make_prompt(400, 3), 30).tokens
    assert (
        driver.run(make_prompt(40), 5).generated
        == compute_cold(load_family("llama", root), "llama", make_prompt(40), 5).tokens
    )


def test_failed_prefill_is_reported_and_not_retried(root: Path) -> None:
    driver = make_failing_driver(root, 1)
    log = driver.run(make_prompt(40))
    assert log.result.finish == "discarded" and driver.scheduler.is_idle
    assert (
        driver.run(make_prompt(40), 5).generated
        == compute_cold(load_family("llama", root), "llama", make_prompt(40), 5).tokens
    )


def test_too_many_failed_steps_end_process(root: Path) -> None:
    driver = make_failing_driver(root, 0)
    for number in range(FAILED_STEPS_MAX - 1):
        driver.scheduler.finisher.discard([], PlantedError(number))
        driver.step()
    assert driver.run(make_prompt(40), 5).result.finish == "length"
    driver.scheduler.finisher.discard([], PlantedError("the last"))
    with pytest.raises(DeviceBrokenError, match="steps have failed"):
        driver.step()


def test_broken_device_ends_turn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_failing_driver(root, 0)
    _, log = driver.submit(make_prompt(40), 30)
    driver.run_until(lambda: len(log.events) > 3)
    monkeypatch.setattr(FailingModel, "__call__", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(DeviceBrokenError, match="division by zero"):
        driver.step()
    assert log.result.finish == "discarded"
    with pytest.raises(ZeroDivisionError):
        driver.scheduler.probe()


def start_batch(driver: SchedulerDriver) -> tuple[str, EventLog, EventLog]:
    """Start two requests in one batch; the first one's id, and both logs."""
    (name, one), (_, other) = (driver.submit(make_prompt(60, seed), 50) for seed in (1, 2))
    driver.run_until(lambda: len(driver.scheduler._queues.groups) == 1 and min(len(one.events), len(other.events)) > 5)
    return name, one, other


def make_batch_unleavable(driver: SchedulerDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = driver.scheduler._queues.groups
    monkeypatch.setattr(group.batch.prompt_cache[0], "filter", lambda keep: 1 / 0)


def test_failed_batch_removal_discards_the_rest(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would go on with the rows of the removed one."""
    driver = SchedulerDriver(load_family("llama", root))
    name, one, other = start_batch(driver)
    make_batch_unleavable(driver, monkeypatch)
    result = driver.scheduler.cancel(name)
    assert result is not None and (result.finish, result.resident) == ("cancelled", "")
    assert (other.result.finish, other.result.resident) == ("discarded", "")
    assert (
        compute_cold(driver.served, "llama", make_prompt(60, 2), 50).tokens[: len(other.generated)] == other.generated
    )
    driver.step()
    assert one.is_ended and driver.scheduler.is_idle


def test_failed_command_at_rest_checks_device(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SchedulerDriver(load_family("llama", root))
    name, _, _ = start_batch(driver)
    make_batch_unleavable(driver, monkeypatch)
    driver.scheduler.cancel(name)
    assert driver.scheduler.is_idle
    monkeypatch.setattr(driver.scheduler, "probe", lambda: 1 / 0)
    with pytest.raises(DeviceBrokenError):
        driver.step()


def test_discarded_batch_is_freed_before_probe(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch that filled the memory must not make the probe fail."""
    driver = SchedulerDriver(load_family("llama", root))
    _, one, other = start_batch(driver)
    (group,) = driver.scheduler._queues.groups
    held = [*map(weakref.ref, group.sequences), *map(weakref.ref, group.batch.prompt_cache)]
    del group
    at_probe: list[object] = []
    monkeypatch.setattr(driver.scheduler, "probe", lambda: at_probe.extend([each() for each in held]))
    monkeypatch.setattr(DecodeGroup, "step", lambda group: 1 / 0)
    driver.run_until(lambda: one.is_ended and other.is_ended)
    assert at_probe == [None] * (2 + len(driver.served.layout.leaves))


def test_end_event_is_sent_when_on_changed_fails(root: Path) -> None:
    driver = SchedulerDriver(load_family("llama", root))
    driver.scheduler.finisher.on_changed = lambda: 1 / 0  # type: ignore[assignment, return-value]
    assert driver.run(make_prompt(20), 3).result.finish == "length"


def test_token_failure_ends_only_its_request(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SchedulerDriver(load_family("llama", root))
    _, bad = driver.submit(make_prompt(50), 30)
    _, good = driver.submit(make_prompt(50, 2), 30)
    driver.run_until(lambda: len(bad.events) > 3)
    sequence = next(s for s in driver.scheduler._queues if s.request.prompt == make_prompt(50))
    monkeypatch.setattr(sequence.output_parser, "add", lambda token: 1 / 0)
    driver.run_until(lambda: bad.is_ended and good.is_ended)
    assert bad.result.finish == "error" and "division" in bad.result.error
    assert good.generated == compute_cold(driver.served, "llama", make_prompt(50, 2), 30).tokens


def test_failed_finish_discards_only_its_batch(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SchedulerDriver(load_family("llama", root))
    _, bad = driver.submit(make_prompt(50), 30)
    _, mate = driver.submit(make_prompt(50, 2), 30)
    _, apart = driver.submit(make_prompt(400, 3), 30)
    driver.run_until(lambda: all(len(one.events) > 3 for one in (bad, mate, apart)))
    sequence = next(each for each in driver.scheduler._queues if each.request.prompt == make_prompt(50))
    group = next(group for group in driver.scheduler._queues.groups if sequence in group.sequences)
    monkeypatch.setattr(sequence.output_parser, "add", lambda token: 1 / 0)
    monkeypatch.setattr(group, "remove", lambda sequence: 1 / 0)
    driver.run_until(lambda: bad.is_ended and mate.is_ended and apart.is_ended)
    assert (bad.result.finish, mate.result.finish, apart.result.finish) == ("error", "discarded", "length")
    assert driver.run(make_prompt(50), 5).generated == compute_cold(driver.served, "llama", make_prompt(50), 5).tokens
