"""Shutdown: signals, draining of running requests, and time for their saves.  Event loop thread."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable

from warmline_backend.server.service import Service

log = logging.getLogger(__name__)

CANCEL_WAIT_S = 3.0  # for the engine's present step to end
SAVES_WAIT_S = 5.0
POLL_S = 0.02


class StopSignals:
    """`stop` is set by the first SIGTERM or SIGINT, `stop_now` by the same one again.

    Not by the other one: Ctrl-C reaches the whole foreground group, and the parent process passes it on.
    """

    def __init__(self) -> None:
        self.stop, self.stop_now = asyncio.Event(), asyncio.Event()
        self._received: set[signal.Signals] = set()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._handle_signal, number)

    def _handle_signal(self, number: signal.Signals) -> None:
        if number in self._received:
            self.stop_now.set()
        self._received.add(number)
        self.stop.set()


async def drain(service: Service, timeout_s: float, stop_now: asyncio.Event) -> None:
    """Refuse new requests; wait for running ones, then cancel them; wait for their saves.

    Takes at most `timeout_s` + CANCEL_WAIT_S + SAVES_WAIT_S, and at most CANCEL_WAIT_S once `stop_now` is set.
    """
    service.shut_down()
    if count := len(service.inflight.request_ids):
        log.info("shutting down: %d requests have %g s to end", count, timeout_s)
    await _wait_within(timeout_s, stop_now, service.inflight.wait_until_empty())
    if count := len(service.inflight.request_ids):
        log.warning("%d requests are cancelled", count)
    service.cancel_all()
    if count:
        await _wait_within(CANCEL_WAIT_S, asyncio.Event(), service.inflight.wait_until_empty())
    if service.inflight.request_ids:
        log.warning("the engine does not let go of them")  # and it would not copy anything for a save either
        return
    await _wait_within(SAVES_WAIT_S, stop_now, _wait_for_saves(service))


async def _wait_for_saves(service: Service) -> None:
    while await service.has_pending_saves():  # noqa: ASYNC110  leases end without an event
        await asyncio.sleep(POLL_S)


async def _wait_within(timeout_s: float, stop_now: asyncio.Event, work: Awaitable[None]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await run_until_event(stop_now, work)


async def run_until_event(event: asyncio.Event, work: Awaitable[None]) -> None:
    """Await `work`, or cancel it when `event` is set."""
    waiting, task = asyncio.ensure_future(event.wait()), asyncio.ensure_future(work)
    try:
        await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        waiting.cancel()
        task.cancel()
        await asyncio.gather(waiting, task, return_exceptions=True)
