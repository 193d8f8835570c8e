"""Keepalive of an idle engine: one dropped token after each idle period."""

import queue
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from support.backend.engine_driver import SchedulerDriver
from support.backend.families import load_family, make_prompt
from warmline_backend.config import BackendConfigError, parse_config
from warmline_backend.engine import engine as engine_module
from warmline_backend.engine.engine import Engine
from warmline_backend.generation.events import EndedEvent, GenerationEvent, TokenEvent
from warmline_backend.generation.sequence import GenerationRequest
from warmline_backend.request.params import GenerationParams

WAIT_S = 20
KEEPALIVE_S = 5.0


class ManualQueue:
    """Queue of the engine, whose waits with a timeout end only when the test ends them."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.waits: queue.SimpleQueue[float | None] = queue.SimpleQueue()

    put = property(lambda self: self._commands.put)
    qsize = property(lambda self: self._commands.qsize)
    empty = property(lambda self: self._commands.empty)

    def get(self, timeout: float | None = -1.0) -> Any:
        if timeout != -1.0:
            self.waits.put(timeout)
        if (command := self._commands.get()) is TIME_IS_UP:
            raise queue.Empty
        return command


TIME_IS_UP = object()


class KeepaliveEngine:
    """Engine with a ManualQueue and a clock that only `clock[0]` advances."""

    def __init__(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, keepalive_s: float = KEEPALIVE_S, rest_s: float = 0.0
    ) -> None:
        self.clock = [100.0]
        monkeypatch.setattr(engine_module.time, "monotonic", lambda: self.clock[0])
        monkeypatch.setattr(engine_module, "REST_S", rest_s)
        self._wait = 0.0
        self.engine = Engine(lambda: SchedulerDriver(load_family.__wrapped__("llama", root)).scheduler, keepalive_s)
        self.mailbox = ManualQueue()
        self.engine._commands = self.mailbox  # type: ignore[assignment]
        self.engine.start()
        self.engine.loaded.result(WAIT_S)

    def wait_for_idle(self) -> float | None:
        """Timeout of the engine's wait, once it waits."""
        wait = self.mailbox.waits.get(timeout=WAIT_S)
        self._wait = wait or 0.0
        return wait

    def end_wait(self) -> None:
        """Advance the clock by the timeout and end the wait."""
        self.clock[0] += self._wait
        self.mailbox.put(TIME_IS_UP)

    @property
    def steps(self) -> int:
        return self.engine.snapshot.keepalive_steps

    def end(self) -> None:
        self.engine.stop()
        self.engine.ended.result(WAIT_S)


@pytest.fixture
def kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    kept = KeepaliveEngine(root, monkeypatch)
    yield kept
    kept.end()


def make_generation(ended: "Future[None]", first: "Future[None]") -> GenerationRequest:
    def listen(event: GenerationEvent) -> None:
        if isinstance(event, TokenEvent) and not first.done():
            first.set_result(None)
        if isinstance(event, EndedEvent):
            ended.set_result(None)

    return GenerationRequest("a", make_prompt(20), GenerationParams(max_tokens=4, ignore_eos=True), listen)


def test_keepalive_computes_token_after_each_idle_period(kept: KeepaliveEngine) -> None:
    for steps in range(3):
        assert kept.wait_for_idle() == KEEPALIVE_S
        assert kept.steps == steps and not kept.engine.heartbeat.is_busy
        kept.end_wait()
    assert kept.wait_for_idle() == KEEPALIVE_S and kept.steps == 3
    assert kept.engine.snapshot.running_bytes == kept.engine.snapshot.resident_bytes == 0


def test_commands_do_not_postpone_keepalive(kept: KeepaliveEngine) -> None:
    assert kept.wait_for_idle() == KEEPALIVE_S
    kept.clock[0] += 3.0
    kept.engine.submit(lambda scheduler: scheduler.residents.set_eviction_order([])).result(WAIT_S)
    assert kept.wait_for_idle() == KEEPALIVE_S - 3.0
    kept.clock[0] += 3.0
    kept.engine.submit(lambda scheduler: scheduler.residents.set_eviction_order([])).result(WAIT_S)
    assert kept.wait_for_idle() == 0.0, "it is due, but first is done what is asked"
    kept.end_wait()
    assert kept.wait_for_idle() == KEEPALIVE_S and kept.steps == 1


def test_requests_postpone_keepalive_and_do_not_wait_for_it(kept: KeepaliveEngine) -> None:
    assert kept.wait_for_idle() == KEEPALIVE_S
    kept.clock[0] += KEEPALIVE_S - 1.0
    ended, first = Future[None](), Future[None]()
    kept.engine.submit(lambda scheduler: scheduler.submit(make_generation(ended, first))).result(WAIT_S)
    ended.result(WAIT_S)
    assert kept.wait_for_idle() == KEEPALIVE_S and kept.steps == 0


def test_commands_during_keepalive_run_right_after_it(kept: KeepaliveEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept.wait_for_idle() == KEEPALIVE_S
    started, go_on = threading.Event(), threading.Event()
    probe = kept.engine.scheduler.probe

    def held() -> None:
        started.set()
        assert go_on.wait(WAIT_S)
        probe()

    monkeypatch.setattr(kept.engine.scheduler, "probe", held)
    kept.end_wait()
    assert started.wait(WAIT_S)
    assert kept.engine.heartbeat.is_busy, "a watchdog sees it, should it hang"
    ended, first = Future[None](), Future[None]()
    submitted = kept.engine.submit(lambda scheduler: scheduler.submit(make_generation(ended, first)))
    go_on.set()
    submitted.result(WAIT_S)
    ended.result(WAIT_S)
    assert kept.wait_for_idle() == KEEPALIVE_S and kept.steps == 1


def test_shutdown_ends_keepalive(kept: KeepaliveEngine) -> None:
    assert kept.wait_for_idle() == KEEPALIVE_S
    kept.engine.stop_keepalive()
    kept.end_wait()  # the wait that had begun
    assert kept.wait_for_idle() is None and kept.steps == 0


def test_without_keepalive_engine_waits_without_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeepaliveEngine(root, monkeypatch, keepalive_s=0.0)
    assert kept.wait_for_idle() is None
    kept.end()
    assert kept.steps == 0


def test_snapshot_at_rest_has_present_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step computes one ahead, which may hold memory after all requests have ended."""
    kept = KeepaliveEngine(root, monkeypatch, rest_s=1.0)
    ahead = [mx.zeros((1 << 18,))]
    mx.eval(ahead)
    ended, first = Future[None](), Future[None]()
    assert kept.wait_for_idle() == 1.0
    kept.engine.submit(lambda scheduler: scheduler.submit(make_generation(ended, first))).result(WAIT_S)
    ended.result(WAIT_S)
    assert kept.wait_for_idle() == 1.0
    with_it = kept.engine.snapshot.memory_active_bytes
    ahead.clear()
    kept.clock[0] += 0.25
    kept.engine.submit(lambda scheduler: ahead.append(mx.zeros((1 << 18,))) or mx.eval(ahead)).result(WAIT_S)
    assert kept.wait_for_idle() == 0.75 and kept.engine.snapshot.memory_active_bytes >= with_it - (1 << 19)
    ahead.clear()
    kept.end_wait()
    assert kept.wait_for_idle() == KEEPALIVE_S - 1.0
    assert kept.engine.snapshot.memory_active_bytes <= with_it - (1 << 19)
    assert kept.steps == 0 and not kept.engine.heartbeat.is_busy
    kept.end()


def test_failed_keepalive_is_retried_and_broken_device_ends_engine(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeepaliveEngine(root, monkeypatch)
    assert kept.wait_for_idle() == KEEPALIVE_S
    real, left = kept.engine.scheduler.probe, [1]

    def failing() -> None:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("the device is gone")
        real()

    monkeypatch.setattr(kept.engine.scheduler, "probe", failing)
    kept.end_wait()
    assert kept.wait_for_idle() == KEEPALIVE_S and kept.engine.failure == "", "a token could be computed after all"
    left[0] = 2
    kept.end_wait()
    kept.engine.ended.result(WAIT_S)
    assert "a token could not be computed: the device is gone" in kept.engine.failure


@pytest.mark.parametrize("given", ["-1", "nan", "inf", "1e12"])
def test_invalid_keepalive_seconds_are_refused(given: str) -> None:
    with pytest.raises(
        BackendConfigError, match=r"--gpu-keepalive .*expected a number of seconds, from 0 to 1000000000"
    ):
        parse_config(["--home", "h", "--model", "m", f"--gpu-keepalive={given}"])
