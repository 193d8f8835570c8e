"""Background tasks that outlive the request that started them."""

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)


class BackgroundTasks:
    """Set of running tasks.  Event loop thread."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    async def drain(self, timeout_s: float) -> None:
        """Wait for all tasks, then cancel the rest."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        for task in set(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("%s failed", task.get_name(), exc_info=error)


async def wait_for_events(events: Iterable[asyncio.Event], timeout_s: float) -> None:
    """Wait until all events are set, at most `timeout_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for event in events:
                await event.wait()
