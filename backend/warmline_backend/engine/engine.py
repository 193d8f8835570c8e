"""The engine thread, which alone computes with mlx.  Other threads submit commands, and read heartbeat and snapshot."""

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx
import msgspec

from warmline_backend.generation.step_stats import StepStats
from warmline_backend.model.model import ServedModel
from warmline_backend.scheduler.scheduler import Scheduler
from warmline_common.logging import describe_error
from warmline_common.measurement.recent_durations import WorkDuration
from warmline_common.protocol.messages import LOADING, PrefillRate

log = logging.getLogger(__name__)

T = TypeVar("T")

BLOCKED_WAIT_S = 0.1  # leases end without an event
REST_S = 1.0  # after the last step, until mlx's work ahead is over and its memory is free
Command = Callable[[bool], None]  # argument: whether the engine has ended


class EngineStoppedError(Exception):
    """The engine has ended, or never came up; the text has the reason."""


@dataclass(frozen=True)
class Heartbeat:
    """Progress of the engine.  Replaced as a whole, so any thread reads a consistent one."""

    steps: int = 0  # chunks, decode steps and commands done
    step_started_at: float = 0.0  # time.monotonic() of the present one's start; 0.0 while there is none

    @property
    def is_busy(self) -> bool:
        return self.step_started_at > 0

    @property
    def step_age_s(self) -> float:
        return time.monotonic() - self.step_started_at if self.is_busy else 0.0


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of the engine after its last turn or once at rest; read by any thread without waiting.

    One is made after each step and command, so all of it is at hand then, and none of it grows with what is kept.
    """

    running: int = 0
    queued: int = 0
    running_bytes: int = 0
    resident_bytes: int = 0
    memory_budget_bytes: int = 0
    generation: int = 0
    prefill_rates: list[PrefillRate] = []
    chunk_durations: list[WorkDuration] = []
    decode_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    restore_bytes_per_s: float = 0.0
    save_bytes_per_s: float = 0.0
    slowest_recent_step_s: float = 0.0
    weight_bytes: int = 0
    memory_active_bytes: int = 0  # mlx's, weights included
    memory_cache_bytes: int = 0  # freed buffers that mlx keeps
    memory_peak_bytes: int = 0
    bytes_unaccounted: int = 0
    step_stats: StepStats = msgspec.field(default_factory=StepStats)
    keepalive_steps: int = 0
    residents: int = 0  # their listing is `Residents.listing`


class Engine(threading.Thread):
    """Thread that runs a scheduler until it is stopped.  Loads the model first; `loaded` and `ended` have the outcome.

    `failure` says why it takes no commands, "" while it does.  After each `keepalive_s` without work it computes and
    drops one token; 0: never.
    """

    def __init__(self, make_scheduler: Callable[[], Scheduler], keepalive_s: float = 0.0) -> None:
        super().__init__(name="engine", daemon=True)
        self._make_scheduler = make_scheduler
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._stopping = False
        self._keepalive_s, self._last_step_at, self._snapshot_at = keepalive_s, time.monotonic(), 0.0
        self._close_lock, self._closed = threading.Lock(), False
        self._scheduler: Scheduler | None = None
        self.loaded: Future[ServedModel] = Future()
        self.ended: Future[None] = Future()
        for future in (self.loaded, self.ended):
            future.set_running_or_notify_cancel()  # one waiter's cancellation must not reach the others
        self.snapshot, self.heartbeat = EngineSnapshot(), Heartbeat()
        self.failure = LOADING

    # ---- any thread

    def submit(self, work: Callable[[Scheduler], T]) -> "Future[T]":
        """Run `work` on the engine thread between two steps.  Fails with EngineStoppedError once it has ended."""
        answer: Future[T] = Future()

        def command(ended: bool) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                if ended:
                    raise EngineStoppedError(self.failure)
                result = work(self.scheduler)
                self._take_snapshot()  # first, so that it is true once the answer is there
            except Exception as error:  # noqa: BLE001  it belongs to the caller
                traceback.clear_frames(error.__traceback__)  # which may hold a KV until a garbage collection
                answer.set_exception(error)
            else:
                answer.set_result(result)

        with self._close_lock:
            if self._closed:
                answer.set_exception(EngineStoppedError(self.failure))
            else:
                self._commands.put(command)
        return answer

    @property
    def scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise EngineStoppedError(LOADING)
        return self._scheduler

    def stop_keepalive(self) -> None:
        """Compute no more keepalive tokens."""
        self._keepalive_s = 0.0

    def stop(self) -> None:
        """End after the present step; running requests get no more tokens."""

        def command(ended: bool) -> None:
            self._stopping = True

        self._commands.put(command)

    # ---- engine thread

    def run(self) -> None:
        try:
            self._scheduler = self._make_scheduler()
            self._scheduler.finisher.on_changed = self._take_snapshot
        except Exception as error:  # noqa: BLE001  it belongs to those that wait for the model
            self.failure = f"the model could not be loaded: {error}"
            self.loaded.set_exception(error)
        else:
            self.failure = ""
            self.loaded.set_result(self._scheduler.served)
            self._run_loop()
        finally:
            with self._close_lock:
                self._closed = True
            while not self._commands.empty():  # refused
                self._commands.get()(True)
            self.ended.set_result(None)

    def _run_loop(self) -> None:
        failure = "the engine has ended"
        try:
            self._take_snapshot()
            self._last_step_at = time.monotonic()
            while not self._stopping:
                self._run_step()
                self._wait_for_work()
                self._run_commands()
        except Exception as error:
            failure = f"{failure}: {describe_error(error)}"
            log.exception("%s; this process must be started again", failure)
        finally:
            self.failure = failure
            self.heartbeat = Heartbeat(self.heartbeat.steps)

    def _run_step(self) -> None:
        """Run one turn of the scheduler, and commands between its steps."""
        for _ in self.scheduler.step():
            self._count_step()
            self._last_step_at = time.monotonic()
            self._run_commands()
            if self._stopping:
                break
        self._take_snapshot()

    def _wait_for_work(self) -> None:
        """Wait for a command where nothing can be computed; keep an idle device awake meanwhile."""
        blocked = self.scheduler.is_blocked
        if self._stopping or not (blocked or self.scheduler.is_idle):
            return
        self.heartbeat = Heartbeat(self.heartbeat.steps)
        try:
            command = self._commands.get(timeout=BLOCKED_WAIT_S if blocked else self._idle_wait_s())
        except queue.Empty:
            command = None
        finally:
            self.heartbeat = Heartbeat(self.heartbeat.steps, time.monotonic())
        if command is not None:
            command(False)
            self._count_command()
        elif not blocked and self._keepalive_wait_s() == 0.0:
            self.scheduler.run_keepalive()
            self._count_command()
            self._last_step_at = time.monotonic()

    def _idle_wait_s(self) -> float | None:
        """Time until an idle engine computes a keepalive token, or a snapshot shows it at rest; None: never."""
        rest = self._last_step_at + REST_S
        rest_wait_s = max(0.0, rest - time.monotonic()) if self._snapshot_at < rest else None
        waits = (self._keepalive_wait_s(), rest_wait_s)
        return min((wait for wait in waits if wait is not None), default=None)

    def _keepalive_wait_s(self) -> float | None:
        return max(0.0, self._last_step_at + self._keepalive_s - time.monotonic()) if self._keepalive_s else None

    def _run_commands(self) -> None:
        """Run the commands queued so far; later ones wait for the next step, so that there is one."""
        for _ in range(self._commands.qsize()):
            self._commands.get()(False)
            self._count_command()

    def _count_command(self) -> None:
        self.scheduler.step_stats.command_seconds.add(self.heartbeat.step_age_s)
        self._count_step()

    def _count_step(self) -> None:
        """Count a finished step or command; the next one begins."""
        self.heartbeat = Heartbeat(self.heartbeat.steps + 1, time.monotonic())

    def _take_snapshot(self) -> None:
        self._snapshot_at = time.monotonic()
        scheduler = self.scheduler
        rates, residents, weights = scheduler.rates, scheduler.residents, scheduler.served.weight_bytes
        running, resident_bytes, active = scheduler.running_bytes, residents.bytes_held, mx.get_active_memory()
        self.snapshot = EngineSnapshot(
            running=scheduler.running_count,
            queued=scheduler.queued_count,
            running_bytes=running,
            resident_bytes=resident_bytes,
            memory_budget_bytes=residents.budget_bytes,
            generation=residents.generation,
            prefill_rates=rates.prefill_rates,
            chunk_durations=rates.chunks.list_usual(),
            decode_tokens_per_s=rates.decode.per_second,
            decode_step_s=rates.step_durations.usual_decode_s,
            restore_bytes_per_s=rates.restore.per_second,
            save_bytes_per_s=rates.save.per_second,
            slowest_recent_step_s=rates.step_durations.slowest_s,
            weight_bytes=weights,
            memory_active_bytes=active,
            memory_cache_bytes=mx.get_cache_memory(),
            memory_peak_bytes=scheduler.chunk_memory.peak_bytes,
            bytes_unaccounted=active - weights - resident_bytes - running,
            step_stats=scheduler.step_stats.copy(),
            keepalive_steps=scheduler.keepalive_steps,
            residents=len(residents),
        )
