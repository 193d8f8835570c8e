"""Notification of the backend after a purge, with failures, delays and restarts."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.proxy.fake_replies import pack_text, render_prompt
from support.proxy.harness import on_loop, run_proxy
from support.proxy.purges import (
    FIRST,
    NEXT,
    OTHER,
    ROOT,
    hold_request,
    release,
    run_purge,
    slow_compaction,
    store_conversation,
)
from warmline_common.storage.home import Home
from warmline_proxy.admin import purge as purge_module
from warmline_proxy.app import REQUEST_REGISTRY
from warmline_proxy.index.index import Index
from warmline_proxy.store.tables import Tables
from warmline_proxy.upstream.client import Upstream, UpstreamUnreachableError


@on_loop
async def test_unsaved_resident_outside_purge_is_kept(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        session = await store_conversation(proxy, FIRST)
        proxy.backend.save_failures = [507] * 8
        await proxy.chat(messages=OTHER)
        await proxy.chat(messages=NEXT)
        assert [record.saved_tokens for record in await proxy.wait_until_saved()][:2] == [0, 0]
        others = min(proxy.backend.residents, key=lambda name: len(proxy.backend.residents[name]))
        await run_purge(proxy, session=session)
        assert proxy.backend.calls["forget"] == [[others]] and list(proxy.backend.residents) == [others]
        assert (await proxy.chat(messages=OTHER)).headers["X-Warmline-Cache"].startswith("resident ")
        await run_purge(proxy, everything=True)
        assert proxy.backend.calls["forget"][1:] == [[]]


@on_loop
async def test_purged_resident_not_reused_when_backend_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreachable(_: Upstream, keep: object = ()) -> None:
        raise UpstreamUnreachableError("nobody listens")

    async with run_proxy(tmp_path) as proxy:
        session = await store_conversation(proxy, FIRST)
        monkeypatch.setattr(Upstream, "purge_memory", unreachable)
        await run_purge(proxy, session=session)
        proxy.backend.generation += 1  # forces a new listing of residents
        assert (await proxy.chat(messages=NEXT)).headers["X-Warmline-Cache"] == "cold 0"
        await proxy.wait_until_saved()
        assert proxy.index.has_purge_notice()


@on_loop
async def test_purge_notification_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget, failing = Upstream.purge_memory, [UpstreamUnreachableError("nobody listens")] * 2

    async def unreachable(upstream: Upstream, keep: Sequence[str] = ()) -> None:
        if failing:
            raise failing.pop()
        await forget(upstream, keep)

    async with run_proxy(tmp_path) as proxy:
        monkeypatch.setattr(Upstream, "purge_memory", unreachable)
        monkeypatch.setattr(purge_module, "NOTIFY_INTERVAL_S", 0.0)
        await run_purge(proxy, session=await store_conversation(proxy, FIRST))
        await proxy.backend.wait_for_calls("forget")
        assert not proxy.backend.residents


@on_loop
async def test_request_ending_during_notification_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request leaves an unsaved resident that the notification could not list."""
    forget = Upstream.purge_memory

    async def delayed(upstream: Upstream, keep: Sequence[str] = ()) -> None:
        await release(proxy, running)
        await forget(upstream, keep)

    async with run_proxy(tmp_path) as proxy:
        session = await store_conversation(proxy, FIRST)
        running = await hold_request(proxy, OTHER)
        monkeypatch.setattr(Upstream, "purge_memory", delayed)
        await run_purge(proxy, session=session)
        assert (await proxy.wait_until_saved())[0].saved_tokens > 0
        (remaining,) = proxy.backend.residents
        assert remaining in proxy.backend.resident_by_request.values() and len(proxy.index.sessions()) == 1


@on_loop
async def test_purged_kv_not_reused_during_compaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_proxy(tmp_path) as proxy:
        session = await store_conversation(proxy, FIRST)
        with slow_compaction(proxy, monkeypatch) as began:
            purge = asyncio.create_task(run_purge(proxy, session=session))
            await began.wait()
            assert (await proxy.chat(messages=NEXT)).headers["X-Warmline-Cache"] == "cold 0"
        await purge
        assert (await proxy.wait_until_saved())[0].saved_tokens > 0, "the request came after the purge"


@on_loop
async def test_residents_not_adopted_before_pending_purge_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget, requested, resume = Upstream.purge_memory, asyncio.Event(), asyncio.Event()

    async def delayed(upstream: Upstream, keep: Sequence[str] = ()) -> None:
        requested.set()
        await resume.wait()
        await forget(upstream, keep)

    home = Home(tmp_path / "home")
    home.prepare()
    with Index(home, 1 << 30) as index:
        index.transact(Tables.mark_purged)
    monkeypatch.setattr(Upstream, "purge_memory", delayed)
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.residents["old"], proxy.backend.roots["old"] = (
            pack_text(render_prompt({"messages": FIRST})[0]),
            ROOT,
        )
        await requested.wait()
        running = asyncio.create_task(proxy.chat(messages=NEXT))
        while not list(proxy.app[REQUEST_REGISTRY]):
            async with proxy.client.get(f"{proxy.url}/health") as response:
                assert response.status == 200
        assert not proxy.backend.calls["residents"]
        resume.set()
        assert (await running).headers["X-Warmline-Cache"] == "cold 0"


@on_loop
async def test_startup_delivers_pending_purge_notice(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare()
    with Index(home, 1 << 30) as index:
        index.transact(Tables.mark_purged)
    async with run_proxy(tmp_path) as proxy:
        await proxy.backend.wait_for_calls("forget")
        await proxy.backend.wait_for_calls("residents")
        assert proxy.backend.calls["forget"] == [[]] and not proxy.index.has_purge_notice()
