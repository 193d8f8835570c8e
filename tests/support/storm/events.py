"""Faults of a storm: kills, crashes, wedges and errors, each followed by a wait for recovery."""

import contextlib
import http.client
import os
import random
import signal
import time
from collections.abc import Callable

from support.pair.pair import Pair, send_request
from support.planted.faults import FaultControl
from support.storm.log import StormLog
from warmline_common.protocol.messages import HealthReply, decode

PAUSE_MIN_S, PAUSE_MAX_S = 0.5, 4.0
RECOVERY_MAX_S = 60.0
IDLE_MAX_S = 10.0  # until a step meets a planted fault
ANSWER_MAX_S = 5.0
POLL_S = 0.05
UNREACHABLE_ERRORS = (OSError, http.client.HTTPException)
PLANTED = ("raise", "hang", "freeze", "segv", "abort", "oom", "device")
SIGNALS = {
    "kill -9 backend": ("backend", signal.SIGKILL),
    "kill -9 proxy": ("proxy", signal.SIGKILL),
    "SIGTERM proxy": ("proxy", signal.SIGTERM),
}
PURGES_SHARE = 0.5  # of the pauses: without purges soon nothing would be prefilled
PHASES = ("any", "prefill", "decode")


class FaultInjector:
    """Random choice of faults, each kind once before any is repeated."""

    def __init__(self, pair: Pair, planted: FaultControl, log: StormLog, rng: random.Random) -> None:
        self._pair, self._planted, self._log, self._rng = pair, planted, log, rng
        self._remaining: list[str] = []

    def inject(self) -> None:
        """Pause, inject one fault, and wait until the pair is ready again."""
        if self._log.released.wait(self._rng.uniform(PAUSE_MIN_S, PAUSE_MAX_S)):
            return
        if self._rng.random() < PURGES_SHARE:
            self._purge()
        if not self._remaining:
            self._remaining = [*PLANTED, *SIGNALS]
            self._rng.shuffle(self._remaining)
        fault = self._remaining.pop()
        if fault in PLANTED:
            self._plant(fault)
        else:
            self._send_signal(*SIGNALS[fault], fault)

    def _plant(self, fault: str) -> None:
        boot_before = self._read_boot()
        self._planted.plant_fault(fault, self._rng.choice(PHASES))
        limit = time.monotonic() + IDLE_MAX_S
        while not self._planted.is_taken:
            if time.monotonic() > limit or self._log.released.is_set():
                self._planted.withdraw_fault()
                return
            time.sleep(POLL_S)
        with self._log.record_disturbance(fault):
            if fault != "raise":
                self._wait_until(lambda: self._read_boot() not in ("", boot_before), f"no other backend after {fault}")
            self._wait_until_ready(fault)

    def _send_signal(self, process: str, number: signal.Signals, fault: str) -> None:
        pid = self._pair.pid(process)
        with self._log.record_disturbance(fault):
            os.kill(pid, number)
            self._wait_until(lambda: self._read_pid(process) not in (0, pid), f"no other {process} after {fault}")
            self._wait_until_ready(fault)

    def _purge(self) -> None:
        with contextlib.suppress(*UNREACHABLE_ERRORS):
            self._pair.as_owner("POST", f"{self._pair.url}/warmline/purge", b'{"everything": true}')
            self._log.faults["purge"] += 1

    def _wait_until_ready(self, fault: str) -> None:
        self._wait_until(lambda: self._fetch_status("/ready") == 200, f"not ready after {fault}")

    def _wait_until(self, condition: Callable[[], bool], problem: str) -> None:
        limit = time.monotonic() + RECOVERY_MAX_S
        while not condition():
            if time.monotonic() > limit:
                self._log.add_problem(problem)
                return
            time.sleep(POLL_S)

    def _fetch_status(self, path: str) -> int:
        with contextlib.suppress(*UNREACHABLE_ERRORS):
            return send_request(self._pair.url + path, None, {}, "GET", ANSWER_MAX_S).status
        return 0

    def _read_boot(self) -> str:
        with contextlib.suppress(*UNREACHABLE_ERRORS):
            return decode(
                send_request(f"{self._pair.backend_url}/health", None, {}, "GET", ANSWER_MAX_S).raw, HealthReply
            ).boot
        return ""

    def _read_pid(self, process: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            return self._pair.pid(process)
        return 0
