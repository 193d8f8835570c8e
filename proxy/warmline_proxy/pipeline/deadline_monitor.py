"""Monitor of all requests, ten times a second: cancels overdue ones, sends heartbeats to waiting clients."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from warmline_proxy.errors import ClientError, gateway_timeout
from warmline_proxy.request.deadlines import BACKLOG_BYTES_MAX, EnginePace, find_missed_deadline
from warmline_proxy.request.request import Request
from warmline_proxy.tasks import BackgroundTasks
from warmline_proxy.upstream.watchdog import Watchdog

log = logging.getLogger(__name__)

TICK_S = 0.1
HEARTBEAT_INTERVAL_S = 15.0  # to one client


@dataclass(eq=False)
class DeadlineMonitor:
    """Owned by the event loop.  `run` is its one task."""

    list_requests: Callable[[], Iterable[Request]]
    watchdog: Watchdog
    background: BackgroundTasks
    heartbeat_after_s: float

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._tick(time.monotonic())
            except Exception:  # one request's failure must not end the monitor
                log.exception("checking the deadlines failed")

    def _tick(self, now: float) -> None:
        requests = list(self.list_requests())
        running = sum(request.is_computing for request in requests)
        pace = EnginePace(self.watchdog.slowest_recent_step_s, running, self.watchdog.stalled_s)
        for request in requests:
            if request.release_task is not None or request.response.is_closed:
                continue
            if error := self._find_violation(request, now, pace):
                request.cancel(error)
            elif self._is_heartbeat_due(request, now):
                self.background.spawn(request.response.send_heartbeat(), f"heartbeat {request.log.id}")

    def _find_violation(self, request: Request, now: float, pace: EnginePace) -> ClientError | None:
        if request.generation and request.generation.backlog_bytes > BACKLOG_BYTES_MAX:
            reason = f"its client left {BACKLOG_BYTES_MAX >> 20} MiB of the answer unread"
            return gateway_timeout(reason, "client_too_slow")
        return find_missed_deadline(request.timeouts, request.clock, now, pace)

    def _is_heartbeat_due(self, request: Request, now: float) -> bool:
        """Due only while there is progress: of the request, or of the engine while the request waits."""
        if request.call is None or not (request.call.stream or self.heartbeat_after_s):
            return False
        interval_s = HEARTBEAT_INTERVAL_S
        if not request.call.stream:
            after_s = self.heartbeat_after_s
            interval_s = min(interval_s, after_s) if request.response.has_started else after_s
        progressed_at = request.clock.progressed_at or self.watchdog.last_step_at
        return now - request.response.last_write_at >= interval_s and progressed_at > request.response.last_write_at
