"""The engine thread: the only one that computes with mlx.  Others send it work and read its last snapshot."""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from warmline_backend.model import ServedModel
from warmline_backend.scheduler import Scheduler
from warmline_wire.messages import Rate, Resident

log = logging.getLogger(__name__)

T = TypeVar("T")

BLOCKED_WAIT_S = 0.1  # a lease may end without anybody saying so
Command = Callable[[bool], None]  # told whether the engine has ended


class EngineStopped(Exception):
    """The engine has ended (or never came up); the reason is in the text."""


@dataclass(frozen=True)
class Snapshot:
    """What the engine was like after its last turn; read by anybody, at once, even while a chunk takes a minute."""

    running: int = 0
    queued: int = 0
    running_bytes: int = 0
    resident_bytes: int = 0
    memory_budget_bytes: int = 0
    generation: int = 0
    prefill_rates: list[Rate] = field(default_factory=list)
    decode_tokens_per_s: float = 0.0
    restore_bytes_per_s: float = 0.0
    save_bytes_per_s: float = 0.0
    slowest_recent_step_s: float = 0.0
    residents: list[Resident] = field(default_factory=list)


class Engine(threading.Thread):
    """Runs a scheduler until it is stopped.  `start()` loads the model first; `loaded` and `ended` tell how it went."""

    def __init__(self, make_scheduler: Callable[[], Scheduler]) -> None:
        super().__init__(name="engine", daemon=True)
        self._make_scheduler = make_scheduler
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._stopping = False
        self._closing, self._closed = threading.Lock(), False
        self._scheduler: Scheduler | None = None
        self.loaded: Future[ServedModel] = Future()
        self.ended: Future[None] = Future()  # however it did
        for future in (self.loaded, self.ended):
            future.set_running_or_notify_cancel()  # whoever gives up waiting must not cancel them for the others
        self.snapshot = Snapshot()

    # ---- any thread

    def ask(self, work: Callable[[Scheduler], T]) -> "Future[T]":
        """Have `work` done on the engine thread between two steps.  Fails with EngineStopped once it is over."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                result = work(self.scheduler)
            except Exception as error:  # noqa: BLE001  it belongs to whoever asked
                answer.set_exception(error)
                return
            self._take_snapshot()  # first, so that whoever hears the answer finds it true
            answer.set_result(result)

        def command(ended: bool) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            if ended:
                answer.set_exception(EngineStopped("the engine has ended"))
            else:
                run()

        with self._closing:
            if self._closed:
                answer.set_exception(EngineStopped("the engine is not running"))
            else:
                self._commands.put(command)
        return answer

    @property
    def scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise EngineStopped("the model is still loading")
        return self._scheduler

    def stop(self) -> None:
        """End after the present step; running requests get no more tokens."""

        def command(ended: bool) -> None:
            self._stopping = True

        self._commands.put(command)

    # ---- engine thread

    def run(self) -> None:
        try:
            self._scheduler = self._make_scheduler()
            self._scheduler.changed = self._take_snapshot
        except Exception as error:  # noqa: BLE001  whoever waits for the model must hear of it
            self.loaded.set_exception(error)
        else:
            self.loaded.set_result(self._scheduler.served)
            self._run()
        finally:
            with self._closing:
                self._closed = True
            self._refuse_rest()
            self.ended.set_result(None)

    def _run(self) -> None:
        self._take_snapshot()
        try:
            while not self._stopping:
                self._obey()
                for _ in self.scheduler.turn():
                    self._obey_waiting()
                    if self._stopping:
                        break
                self._take_snapshot()
        except Exception:
            log.exception("the engine failed outside of any request; this process must be started again")

    def _obey(self) -> None:
        """Do what was asked; without other work, wait for it."""
        if self.scheduler.idle or self.scheduler.blocked:
            with contextlib.suppress(queue.Empty):
                self._commands.get(timeout=BLOCKED_WAIT_S if self.scheduler.blocked else None)(False)
        self._obey_waiting()

    def _obey_waiting(self) -> None:
        """Do what has been asked meanwhile."""
        while not self._commands.empty():
            self._commands.get()(False)

    def _refuse_rest(self) -> None:
        while not self._commands.empty():
            self._commands.get()(True)

    def _take_snapshot(self) -> None:
        scheduler = self.scheduler
        rates = scheduler.rates
        self.snapshot = Snapshot(
            running=scheduler.running,
            queued=scheduler.queued,
            running_bytes=scheduler.running_bytes,
            resident_bytes=scheduler.residents.bytes_held,
            memory_budget_bytes=scheduler.residents.budget_bytes,
            generation=scheduler.residents.generation,
            prefill_rates=rates.prefill,
            decode_tokens_per_s=rates.decode_tokens_per_s,
            restore_bytes_per_s=rates.restore_bytes_per_s,
            save_bytes_per_s=rates.save_bytes_per_s,
            slowest_recent_step_s=rates.slowest_recent_step_s,
            residents=scheduler.residents.listed(),
        )
