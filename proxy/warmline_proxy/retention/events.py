"""Event of a purge: components subscribe to forget what was removed, and to pause while it is removed.  Event loop."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, asynccontextmanager

Pause = Callable[[], AbstractContextManager[None] | AbstractAsyncContextManager[None]]


class PurgeEvents:
    """Subscriptions to purges."""

    def __init__(self) -> None:
        self._on_removed: list[Callable[[], None]] = []
        self._pauses: list[Pause] = []

    def subscribe(self, on_removed: Callable[[], None]) -> None:
        """Call `on_removed` once segments are gone from the index, before the backend is notified."""
        self._on_removed.append(on_removed)

    def add_pause(self, pause: Pause) -> None:
        """Enter `pause()` before anything is removed, and leave it when all is; pauses nest in this order."""
        self._pauses.append(pause)

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for make in self._pauses:
                context = make()
                if isinstance(context, AbstractContextManager):
                    stack.enter_context(context)
                else:
                    await stack.enter_async_context(context)
            yield

    def publish_removal(self) -> None:
        for on_removed in self._on_removed:
            on_removed()
