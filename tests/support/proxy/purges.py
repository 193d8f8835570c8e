"""Helpers of purge tests: conversations, held requests, slow compaction."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.proxy.harness import ProxyHarness
from warmline_common.protocol.tokens import namespace
from warmline_proxy.index.index import Index

ROOT = namespace("f" * 64)  # of requests without a key
CALL_ID = "call_00112233445566778899aabb"
FIRST = [{"role": "user", "content": "a long first question " * 8}]
NEXT = [*FIRST, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "and then?"}]
LONG = [{"role": "user", "content": "What begins alike " * 8 + "and ends otherwise than the other one. " * 4}]
ALIKE = [{"role": "user", "content": "What begins alike " * 8 + "may be another matter altogether. " * 4}]
LONGER = [*LONG, *NEXT[1:]]
OTHER = [{"role": "user", "content": "something else " * 10}]


async def run_purge(proxy: ProxyHarness, **what: Any) -> Any:
    owner = {"Authorization": f"Bearer {proxy.home.load_secret()}"}
    async with proxy.client.post(f"{proxy.url}/warmline/purge", json=what, headers=owner) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def store_conversation(proxy: ProxyHarness, messages: list[dict[str, str]]) -> str:
    """Store a conversation; its session's id."""
    await proxy.chat(messages=messages)
    return (await proxy.wait_until_saved())[0].session


async def hold_request(proxy: ProxyHarness, messages: list[dict[str, str]], key: str = "") -> "asyncio.Task[Any]":
    """Start a request whose answer is held until the backend may continue."""
    proxy.backend.hold_after = 1
    proxy.backend.holding.clear()
    running = asyncio.create_task(proxy.chat(messages=messages, headers={"X-Api-Key": key} if key else None))
    await proxy.backend.holding.wait()
    return running


async def release(proxy: ProxyHarness, running: "asyncio.Task[Any]") -> None:
    proxy.backend.hold_after = None
    proxy.backend.may_continue.set()
    assert (await running).status == 200
    proxy.backend.may_continue.clear()


async def purge_during_restore(
    proxy: ProxyHarness, session: str, messages: list[dict[str, str]]
) -> "tuple[asyncio.Task[Any], asyncio.Task[Any]]":
    """Purge a session during a restore; (the request, whose restore waits for the backend, and the purge)."""
    proxy.backend.restart()
    proxy.backend.restoring_allowed.clear()
    running = asyncio.create_task(proxy.chat(messages=messages))
    await proxy.backend.wait_for_calls("restore")
    purge = asyncio.create_task(run_purge(proxy, session=session))
    await proxy.backend.wait_for_calls("forget")
    return running, purge


@contextmanager
def slow_compaction(proxy: ProxyHarness, monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Event]:
    """Delay compaction until the block ends; the event is set when compaction begins."""
    began, may_go_on, loop, compact = asyncio.Event(), threading.Event(), asyncio.get_running_loop(), Index.compact

    def compacting() -> None:
        loop.call_soon_threadsafe(began.set)
        may_go_on.wait()
        compact(proxy.index)

    monkeypatch.setattr(proxy.index, "compact", compacting)
    try:
        yield began
    finally:
        may_go_on.set()
