"""Effects of a purge on both processes' memory and on running requests."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.proxy.harness import on_loop, run_proxy
from support.proxy.purges import (
    CALL_ID,
    FIRST,
    LONG,
    NEXT,
    OTHER,
    hold_request,
    purge_during_restore,
    release,
    run_purge,
    slow_compaction,
    store_conversation,
)
from warmline_common.protocol.messages import SampledTurn, encode
from warmline_common.protocol.tokens import namespace, pack_tokens
from warmline_proxy.app import REQUEST_REGISTRY
from warmline_proxy.auth import key_store
from warmline_proxy.retention import purge as purging
from warmline_proxy.store.errors import IndexFullError


@on_loop
async def test_running_request_on_purged_session_is_not_saved(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        session = await store_conversation(proxy, FIRST)
        proxy.backend.turn = SampledTurn(calls=[CALL_ID], tokens=pack_tokens([1, 2, 3]))
        running = await hold_request(proxy, NEXT)
        assert (await run_purge(proxy, session=session))["sessions"] == [session]
        await release(proxy, running)
        record = (await proxy.wait_until_saved())[0]
        assert (record.session, record.saved_tokens, record.outcome) == ("", 0, "ok")
        assert proxy.index.segments() == [] and proxy.index.sessions() == []
        assert not proxy.backend.residents and not (await proxy.status())["residents"]
        assert proxy.index.turns(namespace("f" * 64), [CALL_ID]) == []
        assert await store_conversation(proxy, NEXT), "later requests are saved again"
        assert proxy.index.segments() and proxy.index.turns(namespace("f" * 64), [CALL_ID])


@on_loop
async def test_unsaved_sampled_turn_is_purged(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        session = await store_conversation(proxy, FIRST)
        proxy.backend.turn = SampledTurn(calls=[CALL_ID], tokens=pack_tokens([1, 2, 3]))
        proxy.backend.saving_allowed.clear()
        await proxy.chat(messages=NEXT)
        await proxy.backend.wait_for_calls("save", 2)
        purge = asyncio.create_task(run_purge(proxy, session=session))
        proxy.backend.saving_allowed.set()
        await purge
        assert proxy.index.turns(namespace("f" * 64), [CALL_ID]) == [] and proxy.index.segments() == []


@on_loop
async def test_request_started_during_purge_is_not_saved(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        await store_conversation(proxy, FIRST)
        proxy.backend.saving_allowed.clear()
        await proxy.chat(messages=OTHER)
        await proxy.backend.wait_for_calls("save", 2)
        purge = asyncio.create_task(run_purge(proxy, everything=True))
        running = await hold_request(proxy, NEXT)
        proxy.backend.saving_allowed.set()
        assert len((await purge)["sessions"]) == 2
        await release(proxy, running)
        assert (await proxy.wait_until_saved())[0].saved_tokens == 0
        assert proxy.index.segments() == [] and not proxy.backend.residents


@on_loop
async def test_partial_save_queued_during_purge_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_proxy(tmp_path, partial_save_tokens=16) as proxy:
        session = await store_conversation(proxy, FIRST)
        began, resume, loop, prepare = (
            asyncio.Event(),
            threading.Event(),
            asyncio.get_running_loop(),
            purging.prepare_purge,
        )

        def preparing(*arguments: Any) -> None:
            loop.call_soon_threadsafe(began.set)
            resume.wait()
            prepare(*arguments)

        monkeypatch.setattr(purging, "prepare_purge", preparing)
        purge = asyncio.create_task(run_purge(proxy, session=session))
        await began.wait()
        running = await hold_request(proxy, NEXT)
        (request,) = proxy.app[REQUEST_REGISTRY]
        assert request.listener is not None
        request.listener.on_started()
        request.listener.on_prefilled(request.log.prompt_tokens)  # the save waits for the purge
        await asyncio.sleep(0)
        resume.set()
        await purge
        await release(proxy, running)
        await proxy.wait_until_saved()
        assert [save.running for save in proxy.backend.calls["save"]] == [""] and proxy.index.segments() == []


@on_loop
async def test_purge_completes_after_caller_disconnect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_proxy(tmp_path) as proxy:
        session = await store_conversation(proxy, FIRST)
        with slow_compaction(proxy, monkeypatch) as began:
            purge = asyncio.create_task(run_purge(proxy, session=session))
            await began.wait()
            purge.cancel()
            while (await proxy.status())["connections"] > 1:
                pass
        await proxy.backend.wait_for_calls("forget")
        assert proxy.index.sessions() == [] and not proxy.backend.residents


@on_loop
async def test_memory_cleared_when_compaction_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_proxy(tmp_path) as proxy:
        session = await store_conversation(proxy, FIRST)
        running = await hold_request(proxy, NEXT)

        def full() -> None:
            raise IndexFullError("no space left")

        monkeypatch.setattr(proxy.index, "compact", full)
        owner = {"Authorization": f"Bearer {proxy.home.load_secret()}"}
        url = f"{proxy.url}/warmline/purge"
        async with proxy.client.post(url, json={"session": session}, headers=owner) as response:
            assert response.status >= 500 and "no space left" in await response.text()
        await release(proxy, running)
        assert (await proxy.wait_until_saved())[0].saved_tokens == 0
        assert proxy.backend.calls["forget"] and proxy.index.segments() == []


@on_loop
async def test_unrelated_running_request_is_saved(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        session = await store_conversation(proxy, FIRST)
        running = await hold_request(proxy, OTHER)
        await run_purge(proxy, session=session)
        await release(proxy, running)
        assert (await proxy.wait_until_saved())[0].saved_tokens > 0
        assert len(proxy.index.sessions()) == 1 and len(proxy.backend.residents) == 1


@on_loop
async def test_purge_everything_drops_running_request(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        running = await hold_request(proxy, OTHER)
        await run_purge(proxy, everything=True)
        await release(proxy, running)
        await proxy.wait_until_saved()
        assert proxy.index.segments() == [] and not proxy.backend.residents


@pytest.mark.parametrize("is_removed", [False, True])
@on_loop
async def test_purge_by_key_keeps_other_keys(tmp_path: Path, is_removed: bool) -> None:
    """Covers running requests, unsaved residents, sampled turns and records."""
    async with run_proxy(tmp_path) as proxy:
        mine, yours = (key_store.add_key(proxy.home, name) for name in ("mine", "yours"))
        root_of = {each.name: namespace("f" * 64, each.tenant) for each in (mine, yours)}
        for messages in (FIRST, OTHER):
            for entry in (yours, mine):
                await proxy.chat(messages=messages, headers={"X-Api-Key": entry.key})
                await proxy.wait_until_saved()
            proxy.backend.save_failures = [507] * 4
        (remaining,) = [row for row in proxy.index.sessions() if row.root == root_of["yours"]]
        proxy.backend.turn = SampledTurn(calls=[CALL_ID], tokens=pack_tokens([1, 2, 3]))
        running = await hold_request(proxy, LONG, mine.key)
        if is_removed:
            key_store.remove_key(proxy.home, "mine")
        query = {"key": "a removed key" if is_removed else "mine"}
        assert len((await run_purge(proxy, **query, dry_run=True))["sessions"]) == 1
        assert len((await run_purge(proxy, **query))["sessions"]) == 1
        assert {proxy.backend.roots[name] for name in proxy.backend.residents} == {root_of["yours"]}
        assert [each.key for each in proxy.index.requests()] == ["yours", "yours"]
        await release(proxy, running)
        assert (await proxy.wait_until_saved())[0].saved_tokens == 0
        assert proxy.index.sessions() == [remaining] and proxy.index.turns(root_of["mine"], [CALL_ID]) == []
        assert {row.root for row in proxy.index.segments()} == {root_of["yours"]}


@on_loop
async def test_request_arriving_for_purged_key_is_not_saved(tmp_path: Path) -> None:
    """The key is removed while the body arrives, so no client could reuse the KV."""
    async with run_proxy(tmp_path) as proxy:
        mine = key_store.add_key(proxy.home, "mine")
        headers, rest = {"X-Api-Key": mine.key, "Content-Type": "application/json"}, asyncio.Event()
        await proxy.chat(messages=FIRST, headers=headers)
        body = encode({"model": "any", "messages": FIRST})

        async def slowly() -> AsyncIterator[bytes]:
            yield body[:10]
            await rest.wait()
            yield body[10:]

        chat = f"{proxy.url}/v1/chat/completions"
        running = asyncio.create_task(proxy.client.post(chat, data=slowly(), headers=headers))
        while not (await proxy.status())["live"]:
            pass
        key_store.remove_key(proxy.home, "mine")
        await run_purge(proxy, roots=[namespace("f" * 64, mine.tenant).hex()])
        rest.set()
        assert (await running).status == 200
        assert (await proxy.wait_until_saved())[0].saved_tokens == 0 and proxy.index.sessions() == []


@on_loop
async def test_purge_of_unknown_key_returns_400(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        await store_conversation(proxy, FIRST)
        owner = {"Authorization": f"Bearer {proxy.home.load_secret()}"}
        for what, why in (
            ({"key": "mine"}, "there is no client key 'mine'; there is none"),
            ({"key": "mine", "everything": True}, "name exactly one of: a session, a model, a key, roots, "),
            ({"roots": ["f" * 30]}, "roots"),
        ):
            url = f"{proxy.url}/warmline/purge"
            async with proxy.client.post(url, json=what, headers=owner) as response:
                assert response.status == 400 and why in (await response.json())["error"]["message"]
        assert (await run_purge(proxy, roots=["f" * 32]))["sessions"] == [] and len(proxy.index.sessions()) == 1


@on_loop
async def test_dry_run_has_no_effect(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        session = await store_conversation(proxy, FIRST)
        running = await hold_request(proxy, NEXT)
        assert (await run_purge(proxy, session=session, dry_run=True))["sessions"] == [session]
        await release(proxy, running)
        assert (await proxy.wait_until_saved())[0].saved_tokens > 0
        assert not proxy.backend.calls["forget"]


@on_loop
async def test_file_under_restore_is_deleted_before_reply(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        session = await store_conversation(proxy, FIRST)
        (row,) = proxy.index.segments()
        running, purge = await purge_during_restore(proxy, session, NEXT)
        assert proxy.home.segment_file(row.id).exists() and not purge.done()
        proxy.backend.restoring_allowed.set()
        await purge
        assert not proxy.home.segment_file(row.id).exists()
        assert (await running).status == 200
        await proxy.wait_until_saved()
        assert proxy.index.segments() == [] and not proxy.backend.residents


@on_loop
async def test_purge_everything_clears_proxy_memory(tmp_path: Path) -> None:
    canary = "canary-in-memory"
    async with run_proxy(tmp_path, audit_fraction=1.0) as proxy:
        proxy.backend.background_allowed.clear()
        system = {"role": "system", "content": f"{canary} is secret. " * 8}
        tools = [{"type": "function", "function": {"name": "look", "description": canary, "parameters": {}}}]
        proxy.backend.turn = SampledTurn(calls=[CALL_ID], tokens=pack_tokens(list(canary.encode())))
        for question in (FIRST, NEXT, OTHER):
            await proxy.chat(messages=[system, *question], tools=tools)
            await proxy.wait_until_saved()
        needles = (canary, canary.encode(), pack_tokens(list(canary.encode())))
        assert find_places(proxy.app, needles), "the search finds the state before the purge"
        await run_purge(proxy, everything=True)
        assert not find_places(proxy.app, needles)
        proxy.backend.background_allowed.set()


def find_places(root: object, needles: tuple[str | bytes, ...]) -> list[str]:
    """Paths to any of the needles within the proxy's objects."""
    seen, waiting, places = set[int](), [("app", value) for value in _app_state(root)], list[str]()
    while waiting:
        place, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, str | bytes | bytearray):
            places += [place for each in needles if type(each) is type(value) and each in value]  # type: ignore[operator]
        elif isinstance(value, dict):
            waiting += [(f"{place}[]", each) for pair_ in value.items() for each in pair_]
        elif isinstance(value, list | tuple | set | frozenset) or type(value).__name__ in ("deque", "OrderedDict"):
            waiting += [(f"{place}[]", each) for each in value]
        elif type(value).__module__.startswith("warmline_"):
            waiting += [(f"{place}.{name}", each) for name, each in _attributes(value)]
        elif hasattr(value, "__self__"):
            waiting.append((place, value.__self__))
    return places


def _app_state(app: Any) -> list[object]:
    return [*app.values()]


def _attributes(value: object) -> list[tuple[str, object]]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    fields = [*getattr(value, "__struct_fields__", ()), *slots]
    named = {name: getattr(value, name) for name in fields if hasattr(value, name)}
    return [*named.items(), *getattr(value, "__dict__", {}).items()]


@on_loop
async def test_restore_during_purge_starts_cold(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        session = await store_conversation(proxy, FIRST)
        running, purge = await purge_during_restore(proxy, session, NEXT)
        proxy.backend.restoring_allowed.set()
        await purge
        assert (await running).headers["X-Warmline-Cache"] == "cold 0"
        assert len(proxy.backend.calls["drop"]) == 2, "the restored resident and the request's"
