"""What a purge reaches beyond the index: both processes' memory, and what runs on what goes."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.proxy.harness import on_loop, pair
from support.proxy.purges import (
    CALL_ID,
    FIRST,
    LONG,
    NEXT,
    OTHER,
    held,
    let_go,
    purged,
    purged_while_read,
    slow_compaction,
    spoken,
)
from warmline_common.protocol.messages import SampledTurn, encode
from warmline_common.protocol.tokens import namespace, pack_tokens
from warmline_proxy.admin import purge as purging
from warmline_proxy.app import REQUEST_REGISTRY
from warmline_proxy.auth import key_store as keys_file
from warmline_proxy.index.index import IndexFullError


@on_loop
async def test_what_runs_on_what_is_purged_does_not_bring_it_back(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        session = await spoken(proxy, FIRST)
        proxy.backend.turn = SampledTurn(calls=[CALL_ID], tokens=pack_tokens([1, 2, 3]))
        running = await held(proxy, NEXT)
        assert (await purged(proxy, session=session))["sessions"] == [session]
        await let_go(proxy, running)
        record = (await proxy.settled())[0]
        assert (record.session, record.saved_tokens, record.outcome) == ("", 0, "ok")
        assert proxy.index.segments() == [] and proxy.index.sessions() == []
        assert not proxy.backend.held and not (await proxy.status())["residents"]
        assert proxy.index.turns(namespace("f" * 64), [CALL_ID]) == []
        assert await spoken(proxy, NEXT), "what is asked from now on is kept again"
        assert proxy.index.segments() and proxy.index.turns(namespace("f" * 64), [CALL_ID])


@on_loop
async def test_a_turn_that_was_sampled_but_not_yet_saved_goes_too(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        session = await spoken(proxy, FIRST)
        proxy.backend.turn = SampledTurn(calls=[CALL_ID], tokens=pack_tokens([1, 2, 3]))
        proxy.backend.saving_allowed.clear()
        await proxy.chat(messages=NEXT)
        await proxy.backend.called("save", 2)
        purge = asyncio.create_task(purged(proxy, session=session))
        proxy.backend.saving_allowed.set()
        await purge
        assert proxy.index.turns(namespace("f" * 64), [CALL_ID]) == [] and proxy.index.segments() == []


@on_loop
async def test_what_begins_while_a_purge_waits_does_not_bring_it_back_either(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        await spoken(proxy, FIRST)
        proxy.backend.saving_allowed.clear()
        await proxy.chat(messages=OTHER)
        await proxy.backend.called("save", 2)
        purge = asyncio.create_task(purged(proxy, everything=True))
        running = await held(proxy, NEXT)
        proxy.backend.saving_allowed.set()
        assert len((await purge)["sessions"]) == 2
        await let_go(proxy, running)
        assert (await proxy.settled())[0].saved_tokens == 0
        assert proxy.index.segments() == [] and not proxy.backend.held


@on_loop
async def test_a_part_that_waits_to_be_saved_meanwhile_does_not_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path, partial_save_tokens=16) as proxy:
        session = await spoken(proxy, FIRST)
        began, may_go_on, loop, prepare = (
            asyncio.Event(),
            threading.Event(),
            asyncio.get_running_loop(),
            purging.prepare_purge,
        )

        def preparing(*arguments: Any) -> None:
            loop.call_soon_threadsafe(began.set)
            may_go_on.wait()
            prepare(*arguments)

        monkeypatch.setattr(purging, "prepare_purge", preparing)
        purge = asyncio.create_task(purged(proxy, session=session))
        await began.wait()
        running = await held(proxy, NEXT)
        (life,) = proxy.app[REQUEST_REGISTRY]
        assert life.listener is not None
        life.listener.on_started()
        life.listener.on_prefilled(life.log.prompt_tokens)  # which waits for the purge to end
        await asyncio.sleep(0)
        may_go_on.set()
        await purge
        await let_go(proxy, running)
        await proxy.settled()
        assert [save.running for save in proxy.backend.calls["save"]] == [""] and proxy.index.segments() == []


@on_loop
async def test_a_purge_whose_caller_left_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(tmp_path) as proxy:
        session = await spoken(proxy, FIRST)
        with slow_compaction(proxy, monkeypatch) as began:
            purge = asyncio.create_task(purged(proxy, session=session))
            await began.wait()
            purge.cancel()
            while (await proxy.status())["connections"] > 1:
                pass
        await proxy.backend.called("forget")
        assert proxy.index.sessions() == [] and not proxy.backend.held


@on_loop
async def test_memory_is_emptied_though_the_index_can_not_be_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path) as proxy:
        session = await spoken(proxy, FIRST)
        running = await held(proxy, NEXT)

        def full() -> None:
            raise IndexFullError("no space left")

        monkeypatch.setattr(proxy.index, "compact", full)
        owner = {"Authorization": f"Bearer {proxy.home.load_secret()}"}
        url = f"{proxy.url}/warmline/purge"
        async with proxy.client.post(url, json={"session": session}, headers=owner) as response:
            assert response.status >= 500 and "no space left" in await response.text()
        await let_go(proxy, running)
        assert (await proxy.settled())[0].saved_tokens == 0
        assert proxy.backend.calls["forget"] and proxy.index.segments() == []


@on_loop
async def test_what_runs_on_something_else_is_kept(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        session = await spoken(proxy, FIRST)
        running = await held(proxy, OTHER)
        await purged(proxy, session=session)
        await let_go(proxy, running)
        assert (await proxy.settled())[0].saved_tokens > 0
        assert len(proxy.index.sessions()) == 1 and len(proxy.backend.held) == 1


@on_loop
async def test_nothing_that_runs_survives_a_purge_of_everything(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        running = await held(proxy, OTHER)
        await purged(proxy, everything=True)
        await let_go(proxy, running)
        await proxy.settled()
        assert proxy.index.segments() == [] and not proxy.backend.held


@pytest.mark.parametrize("is_removed", [False, True])
@on_loop
async def test_all_of_one_key_goes_and_nothing_of_another(tmp_path: Path, is_removed: bool) -> None:
    """What runs, what is in memory alone, what was sampled, and records."""
    async with pair(tmp_path) as proxy:
        mine, yours = (keys_file.add_key(proxy.home, name) for name in ("mine", "yours"))
        root_of = {each.name: namespace("f" * 64, each.tenant) for each in (mine, yours)}
        for messages in (FIRST, OTHER):
            for entry in (yours, mine):
                await proxy.chat(messages=messages, headers={"X-Api-Key": entry.key})
                await proxy.settled()
            proxy.backend.saves_fail = [507] * 4
        (kept,) = [row for row in proxy.index.sessions() if row.root == root_of["yours"]]
        proxy.backend.turn = SampledTurn(calls=[CALL_ID], tokens=pack_tokens([1, 2, 3]))
        running = await held(proxy, LONG, mine.key)
        if is_removed:
            keys_file.remove_key(proxy.home, "mine")
        asked = {"key": "a removed key" if is_removed else "mine"}
        assert len((await purged(proxy, **asked, dry_run=True))["sessions"]) == 1
        assert len((await purged(proxy, **asked))["sessions"]) == 1
        assert {proxy.backend.roots[name] for name in proxy.backend.held} == {root_of["yours"]}
        assert [each.key for each in proxy.index.requests()] == ["yours", "yours"]
        await let_go(proxy, running)
        assert (await proxy.settled())[0].saved_tokens == 0
        assert proxy.index.sessions() == [kept] and proxy.index.turns(root_of["mine"], [CALL_ID]) == []
        assert {row.root for row in proxy.index.segments()} == {root_of["yours"]}


@on_loop
async def test_what_of_a_key_arrives_while_that_is_purged_is_not_kept(tmp_path: Path) -> None:
    """It was let in by a key that is no more, so nobody could ever use it."""
    async with pair(tmp_path) as proxy:
        mine = keys_file.add_key(proxy.home, "mine")
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
        keys_file.remove_key(proxy.home, "mine")
        await purged(proxy, roots=[namespace("f" * 64, mine.tenant).hex()])
        rest.set()
        assert (await running).status == 200
        assert (await proxy.settled())[0].saved_tokens == 0 and proxy.index.sessions() == []


@on_loop
async def test_a_purge_of_a_key_that_is_not_there_is_refused(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        await spoken(proxy, FIRST)
        owner = {"Authorization": f"Bearer {proxy.home.load_secret()}"}
        for what, why in (
            ({"key": "mine"}, "there is no client key 'mine'; there is none"),
            ({"key": "mine", "everything": True}, "name exactly one of: a session, a model, a key, roots, "),
            ({"roots": ["f" * 30]}, "roots"),
        ):
            url = f"{proxy.url}/warmline/purge"
            async with proxy.client.post(url, json=what, headers=owner) as response:
                assert response.status == 400 and why in (await response.json())["error"]["message"]
        assert (await purged(proxy, roots=["f" * 32]))["sessions"] == [] and len(proxy.index.sessions()) == 1


@on_loop
async def test_a_dry_run_marks_and_forgets_nothing(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        session = await spoken(proxy, FIRST)
        running = await held(proxy, NEXT)
        assert (await purged(proxy, session=session, dry_run=True))["sessions"] == [session]
        await let_go(proxy, running)
        assert (await proxy.settled())[0].saved_tokens > 0
        assert not proxy.backend.calls["forget"]


@on_loop
async def test_a_file_that_is_being_read_goes_before_the_purge_answers(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        session = await spoken(proxy, FIRST)
        (row,) = proxy.index.segments()
        running, purge = await purged_while_read(proxy, session, NEXT)
        assert proxy.home.segment_file(row.id).exists() and not purge.done()
        proxy.backend.restoring_allowed.set()
        await purge
        assert not proxy.home.segment_file(row.id).exists()
        assert (await running).status == 200
        await proxy.settled()
        assert proxy.index.segments() == [] and not proxy.backend.held


@on_loop
async def test_nothing_of_what_was_said_is_left_in_the_proxys_own_state(tmp_path: Path) -> None:
    canary = "canary-in-memory"
    async with pair(tmp_path, audit_fraction=1.0) as proxy:
        proxy.backend.background_allowed.clear()
        system = {"role": "system", "content": f"{canary} is secret. " * 8}
        tools = [{"type": "function", "function": {"name": "look", "description": canary, "parameters": {}}}]
        proxy.backend.turn = SampledTurn(calls=[CALL_ID], tokens=pack_tokens(list(canary.encode())))
        for question in (FIRST, NEXT, OTHER):
            await proxy.chat(messages=[system, *question], tools=tools)
            await proxy.settled()
        wanted = (canary, canary.encode(), pack_tokens(list(canary.encode())))
        assert found(proxy.app, wanted), "the search sees what there is before"
        await purged(proxy, everything=True)
        assert not found(proxy.app, wanted)
        proxy.backend.background_allowed.set()


def found(root: object, wanted: tuple[str | bytes, ...]) -> list[str]:
    """Where in what our own objects hold one of these stands."""
    seen, waiting, places = set[int](), [("app", value) for value in _state_of(root)], list[str]()
    while waiting:
        place, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, str | bytes | bytearray):
            places += [place for each in wanted if type(each) is type(value) and each in value]  # type: ignore[operator]
        elif isinstance(value, dict):
            waiting += [(f"{place}[]", each) for pair_ in value.items() for each in pair_]
        elif isinstance(value, list | tuple | set | frozenset) or type(value).__name__ in ("deque", "OrderedDict"):
            waiting += [(f"{place}[]", each) for each in value]
        elif type(value).__module__.startswith("warmline_"):
            waiting += [(f"{place}.{name}", each) for name, each in _attributes(value)]
        elif hasattr(value, "__self__"):
            waiting.append((place, value.__self__))
    return places


def _state_of(app: Any) -> list[object]:
    return [*app.values()]


def _attributes(value: object) -> list[tuple[str, object]]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    fields = [*getattr(value, "__struct_fields__", ()), *slots]
    named = {name: getattr(value, name) for name in fields if hasattr(value, name)}
    return [*named.items(), *getattr(value, "__dict__", {}).items()]


@on_loop
async def test_what_is_being_read_meanwhile_is_left_to_nobody(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        session = await spoken(proxy, FIRST)
        running, purge = await purged_while_read(proxy, session, NEXT)
        proxy.backend.restoring_allowed.set()
        await purge
        assert (await running).headers["X-Warmline-Cache"] == "cold 0"
        assert len(proxy.backend.calls["drop"]) == 2, "what was read, and what was made of it"
