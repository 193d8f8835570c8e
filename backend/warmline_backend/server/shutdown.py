"""The end of a process that was told to stop: what runs may end by itself, what it leaves may still be saved."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable

from warmline_backend.server.service import Service

log = logging.getLogger(__name__)

CANCEL_WAIT_S = 3.0  # for the engine to let go, which it does after its present step
SAVES_WAIT_S = 5.0
POLL_S = 0.02


class StopSignals:
    """`stop` is set by the first SIGTERM or SIGINT, `hurry` by the same one again.

    Not by the other one: Ctrl-C reaches the whole foreground group, and whoever started this process passes it on.
    """

    def __init__(self) -> None:
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()
        self._heard: set[signal.Signals] = set()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._hear, number)

    def _hear(self, number: signal.Signals) -> None:
        if number in self._heard:
            self.hurry.set()
        self._heard.add(number)
        self.stop.set()


async def drain(service: Service, timeout_s: float, hurry: asyncio.Event) -> None:
    """Refuse what is new; wait for what runs, then cancel it; wait for what it left to be saved.

    Takes at most `timeout_s` + CANCEL_WAIT_S + SAVES_WAIT_S, and at most CANCEL_WAIT_S once `hurry` is set.
    """
    service.shut_down()
    if count := len(service.generations.under_way):
        log.info("shutting down: %d requests have %g s to end", count, timeout_s)
    await _within(timeout_s, hurry, service.generations.until_none())
    if count := len(service.generations.under_way):
        log.warning("%d requests are cancelled", count)
    service.let_all_go()
    if count:
        await _within(CANCEL_WAIT_S, asyncio.Event(), service.generations.until_none())
    if service.generations.under_way:
        log.warning("the engine does not let go of them")  # so it would not hand over anything to be saved either
        return
    await _within(SAVES_WAIT_S, hurry, _until_saved(service))


async def _until_saved(service: Service) -> None:
    while await service.saves_expected():  # noqa: ASYNC110  a lease may end without anybody saying so
        await asyncio.sleep(POLL_S)


async def _within(timeout_s: float, hurry: asyncio.Event, work: Awaitable[None]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await unless(hurry, work)


async def unless(event: asyncio.Event, work: Awaitable[None]) -> None:
    """Await `work`, or leave it when `event` is set."""
    waiting, task = asyncio.ensure_future(event.wait()), asyncio.ensure_future(work)
    try:
        await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        waiting.cancel()
        task.cancel()
        await asyncio.gather(waiting, task, return_exceptions=True)
