"""What a purge has the backend forget and keep in memory, and when: also where that can't be told, or was not."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.proxy.fake_backend import packed, rendered
from support.proxy.harness import on_loop, pair
from support.proxy.purges import FIRST, NEXT, OTHER, ROOT, held, let_go, purged, slow_compaction, spoken
from warmline_common.storage.home import Home
from warmline_proxy.admin import purge as purging
from warmline_proxy.app import REQUEST_REGISTRY
from warmline_proxy.index.index import Index
from warmline_proxy.store.tables import Tables
from warmline_proxy.upstream.client import Upstream, UpstreamUnreachableError


@on_loop
async def test_what_is_in_memory_alone_and_was_not_meant_stays(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        session = await spoken(proxy, FIRST)
        proxy.backend.saves_fail = [507] * 8
        await proxy.chat(messages=OTHER)
        await proxy.chat(messages=NEXT)
        assert [record.saved_tokens for record in await proxy.settled()][:2] == [0, 0]
        others = min(proxy.backend.held, key=lambda name: len(proxy.backend.held[name]))
        await purged(proxy, session=session)
        assert proxy.backend.calls["forget"] == [[others]] and list(proxy.backend.held) == [others]
        assert (await proxy.chat(messages=OTHER)).headers["X-Warmline-Cache"].startswith("resident ")
        await purged(proxy, everything=True)
        assert proxy.backend.calls["forget"][1:] == [[]]


@on_loop
async def test_nobody_starts_from_what_the_backend_could_not_be_told_to_forget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreachable(_: Upstream, keep: object = ()) -> None:
        raise UpstreamUnreachableError("nobody listens")

    async with pair(tmp_path) as proxy:
        session = await spoken(proxy, FIRST)
        monkeypatch.setattr(Upstream, "purge_memory", unreachable)
        await purged(proxy, session=session)
        proxy.backend.generation += 1  # something is pushed out, so all that it has is listed anew
        assert (await proxy.chat(messages=NEXT)).headers["X-Warmline-Cache"] == "cold 0"
        await proxy.settled()
        assert proxy.index.has_purge_notice()


@on_loop
async def test_a_backend_that_could_not_be_told_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget, failing = Upstream.purge_memory, [UpstreamUnreachableError("nobody listens")] * 2

    async def unreachable(upstream: Upstream, keep: Sequence[str] = ()) -> None:
        if failing:
            raise failing.pop()
        await forget(upstream, keep)

    async with pair(tmp_path) as proxy:
        monkeypatch.setattr(Upstream, "purge_memory", unreachable)
        monkeypatch.setattr(purging, "NOTIFY_INTERVAL_S", 0.0)
        await purged(proxy, session=await spoken(proxy, FIRST))
        await proxy.backend.called("forget")
        assert not proxy.backend.held


@on_loop
async def test_what_ends_while_the_backend_is_told_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It left something in memory that is nowhere else, and nobody knew of that when the word was sent."""
    forget = Upstream.purge_memory

    async def late(upstream: Upstream, keep: Sequence[str] = ()) -> None:
        await let_go(proxy, running)
        await forget(upstream, keep)

    async with pair(tmp_path) as proxy:
        session = await spoken(proxy, FIRST)
        running = await held(proxy, OTHER)
        monkeypatch.setattr(Upstream, "purge_memory", late)
        await purged(proxy, session=session)
        assert (await proxy.settled())[0].saved_tokens > 0
        (kept,) = proxy.backend.held
        assert kept in proxy.backend.left_by.values() and len(proxy.index.sessions()) == 1


@on_loop
async def test_nobody_starts_from_what_is_purged_while_the_index_is_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path) as proxy:
        session = await spoken(proxy, FIRST)
        with slow_compaction(proxy, monkeypatch) as began:
            purge = asyncio.create_task(purged(proxy, session=session))
            await began.wait()
            assert (await proxy.chat(messages=NEXT)).headers["X-Warmline-Cache"] == "cold 0"
        await purge
        assert (await proxy.settled())[0].saved_tokens > 0, "it came after the purge"


@on_loop
async def test_nothing_of_an_earlier_proxy_is_used_before_the_backend_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget, asked, may_go_on = Upstream.purge_memory, asyncio.Event(), asyncio.Event()

    async def late(upstream: Upstream, keep: Sequence[str] = ()) -> None:
        asked.set()
        await may_go_on.wait()
        await forget(upstream, keep)

    home = Home(tmp_path / "home")
    home.prepare()
    with Index(home, 1 << 30) as index:
        index.transact(Tables.mark_purged)
    monkeypatch.setattr(Upstream, "purge_memory", late)
    async with pair(tmp_path) as proxy:
        proxy.backend.held["old"], proxy.backend.roots["old"] = packed(rendered({"messages": FIRST})[0]), ROOT
        await asked.wait()
        running = asyncio.create_task(proxy.chat(messages=NEXT))
        while not list(proxy.app[REQUEST_REGISTRY]):
            async with proxy.client.get(f"{proxy.url}/health") as response:
                assert response.status == 200
        assert not proxy.backend.calls["residents"]
        may_go_on.set()
        assert (await running).headers["X-Warmline-Cache"] == "cold 0"


@on_loop
async def test_a_start_tells_the_backend_of_a_purge_that_was_ended_before_that(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare()
    with Index(home, 1 << 30) as index:
        index.transact(Tables.mark_purged)
    async with pair(tmp_path) as proxy:
        await proxy.backend.called("forget")
        await proxy.backend.called("residents")
        assert proxy.backend.calls["forget"] == [[]] and not proxy.index.has_purge_notice()
