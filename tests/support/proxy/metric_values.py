"""Scraping of a proxy's metrics, and polling of conditions."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from support.metrics_text import MetricsText
from support.proxy.harness import Pair
from warmline_proxy.app import REQUEST_REGISTRY


async def scrape(proxy: Pair, **headers: str) -> MetricsText:
    async with proxy.client.get(f"{proxy.url}/metrics", headers=headers) as response:
        assert response.status == 200
        return MetricsText(await response.text())


async def until(true: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    while not await true():
        pass


async def when(true: Callable[[], object]) -> None:
    while not true():  # noqa: ASYNC110  what it waits for tells nobody
        await asyncio.sleep(0)


async def ended(proxy: Pair) -> dict[tuple[str, ...], float]:
    """Cancel counts by (phase, source), once no request is left."""
    await when(lambda: not len(proxy.app[REQUEST_REGISTRY]))
    return (await scrape(proxy)).group_by("warmline_cancels_total", "phase", "by")
