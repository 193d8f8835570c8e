"""Requests for stored responses: created, fetched by their ids, held while they are answered."""

import asyncio
from typing import Any

import aiohttp

from support.proxy.harness import ProxyHarness
from support.proxy.responses import RESPONSES_PATH

QUESTION = [{"role": "user", "content": "Who?"}]
TEXT = "What is the capital of France? " * 4  # more than a block of tokens


async def post(proxy: ProxyHarness, value: object = TEXT, key: str = "", **fields: Any) -> aiohttp.ClientResponse:
    headers = {"X-Api-Key": key} if key else {}
    body = {"model": "any", "input": value, **fields}
    return await proxy.client.post(proxy.url + RESPONSES_PATH, json=body, headers=headers)


async def create(proxy: ProxyHarness, value: object = TEXT, key: str = "", **fields: Any) -> Any:
    response = await post(proxy, value, key, **fields)
    assert response.status == 200, await response.text()
    return await response.json()


async def create_large(proxy: ProxyHarness, size: int, **fields: Any) -> Any:
    """Response whose input has an item of that size, which no model reads."""
    return await create(proxy, [{"type": "web_search_call", "query": "x" * size}, *QUESTION], **fields)


async def fetch(proxy: ProxyHarness, rest: str, key: str = "", method: str = "GET") -> tuple[int, Any]:
    headers = {"X-Api-Key": key} if key else {}
    async with proxy.client.request(method, f"{proxy.url}{RESPONSES_PATH}/{rest}", headers=headers) as response:
        return response.status, await response.json()


async def hold_response(proxy: ProxyHarness, **fields: Any) -> "asyncio.Task[Any]":
    proxy.backend.hold_after = 1
    body, headers = {"input": TEXT, "stream": True, **fields}, {"X-Warmline-Request": "r-1"}
    asking = asyncio.create_task(proxy.client.post(proxy.url + RESPONSES_PATH, json=body, headers=headers))
    await proxy.backend.holding.wait()
    return asking
