"""Metrics of a proxy, and waits for conditions."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from support.metrics_text import MetricsText
from support.proxy.harness import ProxyHarness
from warmline_proxy.app import REQUEST_REGISTRY


async def scrape(proxy: ProxyHarness, **headers: str) -> MetricsText:
    async with proxy.client.get(f"{proxy.url}/metrics", headers=headers) as response:
        assert response.status == 200
        return MetricsText(await response.text())


async def wait_until_async(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    while not await condition():
        pass


async def wait_until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  what it waits for tells nobody
        await asyncio.sleep(0)


async def count_cancels(proxy: ProxyHarness) -> dict[tuple[str, ...], float]:
    """Count cancels by (phase, source), once no request is left."""
    await wait_until(lambda: not len(proxy.app[REQUEST_REGISTRY]))
    return (await scrape(proxy)).group_by("warmline_cancels_total", "phase", "by")
