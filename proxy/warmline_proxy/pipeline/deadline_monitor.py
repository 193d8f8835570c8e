"""Looks after all requests ten times a second: rings the alarm of whoever is overdue, keeps waiting clients patient."""

import asyncio
import logging
import time
from collections.abc import Iterable

from warmline_proxy.errors import ClientError, timed_out
from warmline_proxy.request.deadlines import BACKLOG_BYTES_MAX, overdue
from warmline_proxy.request.request import Life
from warmline_proxy.tasks import Background
from warmline_proxy.upstream.watchdog import Watchdog

log = logging.getLogger(__name__)

TICK_S = 0.1
BEAT_INTERVAL_S = 15.0  # between signs of life to one client


class Overseer:
    """Reads the lives, and tells them; owned by the event loop.  `run` is its one task."""

    def __init__(
        self, lives: Iterable[Life], watchdog: Watchdog, background: Background, heartbeat_after_s: float
    ) -> None:
        self._lives, self._watchdog, self._background = lives, watchdog, background
        self._heartbeat_after_s = heartbeat_after_s

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._tick(time.monotonic())
            except Exception:  # one request's trouble must not leave the others without a watch
                log.exception("looking after the requests failed")

    def _tick(self, now: float) -> None:
        wanted = [life for life in self._lives if life.leaving is None and not life.answer.ended]
        running = sum(life.is_computing for life in self._lives)
        for life in wanted:
            if error := self._overdue(life, now, running):
                life.ring(error)
            elif self._beat_due(life, now):
                self._background.spawn(life.answer.beat(), f"heartbeat {life.trace.id}")

    def _overdue(self, life: Life, now: float, running: int) -> ClientError | None:
        if life.generation and life.generation.backlog_bytes > BACKLOG_BYTES_MAX:
            return timed_out(f"its client left {BACKLOG_BYTES_MAX >> 20} MiB of the answer unread", "client_too_slow")
        return overdue(life.limits, life.clock, now, self._watchdog.slowest_recent_step_s, running)

    def _beat_due(self, life: Life, now: float) -> bool:
        """Only while there is progress: of its own, or, while it waits for its turn, of the engine."""
        if life.call is None or not (life.call.stream or self._heartbeat_after_s):
            return False
        interval_s = BEAT_INTERVAL_S
        if not life.call.stream:
            interval_s = min(interval_s, self._heartbeat_after_s) if life.answer.begun else self._heartbeat_after_s
        progressed_at = life.clock.progressed_at or self._watchdog.moved_at
        return now - life.answer.said_at >= interval_s and progressed_at > life.answer.said_at
