"""What a purge reaches beyond the index: both processes' memory, and what runs on what goes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_backend import packed, rendered
from harness import Pair, on_loop, pair

from warmline_proxy import index_cut, keys_file
from warmline_proxy.admin import purging
from warmline_proxy.app import LIVES
from warmline_proxy.index import Index, IndexFull
from warmline_proxy.index_tables import Tables
from warmline_proxy.rows import SavePlan, SegmentRow
from warmline_proxy.upstream import Unreachable, Upstream
from warmline_wire.home import Home
from warmline_wire.keys import namespace, pack_tokens
from warmline_wire.messages import SampledTurn, SavedFile, encode

ROOT = namespace("f" * 64)  # of who needs no key
CALL_ID = "call_00112233445566778899aabb"
FIRST = [{"role": "user", "content": "a long first question " * 8}]
NEXT = [*FIRST, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "and then?"}]
LONG = [{"role": "user", "content": "What begins alike " * 8 + "and ends otherwise than the other one. " * 4}]
ALIKE = [{"role": "user", "content": "What begins alike " * 8 + "may be another matter altogether. " * 4}]
LONGER = [*LONG, *NEXT[1:]]
OTHER = [{"role": "user", "content": "something else " * 10}]


async def purged(proxy: Pair, **what: Any) -> Any:
    owner = {"Authorization": f"Bearer {proxy.home.secret()}"}
    async with proxy.client.post(f"{proxy.url}/warmline/purge", json=what, headers=owner) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def spoken(proxy: Pair, messages: list[dict[str, str]]) -> str:
    """Its conversation's id, once it is stored."""
    await proxy.chat(messages=messages)
    return (await proxy.settled())[0].session


async def held(proxy: Pair, messages: list[dict[str, str]], key: str = "") -> "asyncio.Task[Any]":
    """A request that is being answered, until the backend is let go on."""
    proxy.backend.hold_after = 1
    proxy.backend.holding.clear()
    running = asyncio.create_task(proxy.chat(messages=messages, headers={"X-Api-Key": key} if key else None))
    await proxy.backend.holding.wait()
    return running


async def let_go(proxy: Pair, running: "asyncio.Task[Any]") -> None:
    proxy.backend.hold_after = None
    proxy.backend.let_go.set()
    assert (await running).status == 200
    proxy.backend.let_go.clear()


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
            purging.prepare,
        )

        def preparing(*arguments: Any) -> None:
            loop.call_soon_threadsafe(began.set)
            may_go_on.wait()
            prepare(*arguments)

        monkeypatch.setattr(purging, "prepare", preparing)
        purge = asyncio.create_task(purged(proxy, session=session))
        await began.wait()
        running = await held(proxy, NEXT)
        (life,) = proxy.app[LIVES]
        assert life.hearing is not None
        life.hearing.started()
        life.hearing.prefilled(life.trace.prompt_tokens)  # which waits for the purge to end
        await asyncio.sleep(0)
        may_go_on.set()
        await purge
        await let_go(proxy, running)
        await proxy.settled()
        assert [save.running for save in proxy.backend.calls["save"]] == [""] and proxy.index.segments() == []


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
        raise Unreachable("nobody listens")

    async with pair(tmp_path) as proxy:
        session = await spoken(proxy, FIRST)
        monkeypatch.setattr(Upstream, "forget", unreachable)
        await purged(proxy, session=session)
        proxy.backend.generation += 1  # something is pushed out, so all that it has is listed anew
        assert (await proxy.chat(messages=NEXT)).headers["X-Warmline-Cache"] == "cold 0"
        await proxy.settled()
        assert proxy.index.is_untold()


@on_loop
async def test_a_backend_that_could_not_be_told_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget, failing = Upstream.forget, [Unreachable("nobody listens")] * 2

    async def unreachable(upstream: Upstream, keep: Sequence[str] = ()) -> None:
        if failing:
            raise failing.pop()
        await forget(upstream, keep)

    async with pair(tmp_path) as proxy:
        monkeypatch.setattr(Upstream, "forget", unreachable)
        monkeypatch.setattr(purging, "TELL_INTERVAL_S", 0.0)
        await purged(proxy, session=await spoken(proxy, FIRST))
        await proxy.backend.called("forget")
        assert not proxy.backend.held


@on_loop
async def test_what_ends_while_the_backend_is_told_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It left something in memory that is nowhere else, and nobody knew of that when the word was sent."""
    forget = Upstream.forget

    async def late(upstream: Upstream, keep: Sequence[str] = ()) -> None:
        await let_go(proxy, running)
        await forget(upstream, keep)

    async with pair(tmp_path) as proxy:
        session = await spoken(proxy, FIRST)
        running = await held(proxy, OTHER)
        monkeypatch.setattr(Upstream, "forget", late)
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
        began, may_go_on, loop, compact = asyncio.Event(), threading.Event(), asyncio.get_running_loop(), Index.compact

        def compacting() -> None:
            loop.call_soon_threadsafe(began.set)
            may_go_on.wait()
            compact(proxy.index)

        monkeypatch.setattr(proxy.index, "compact", compacting)
        purge = asyncio.create_task(purged(proxy, session=session))
        await began.wait()
        try:
            assert (await proxy.chat(messages=NEXT)).headers["X-Warmline-Cache"] == "cold 0"
        finally:
            may_go_on.set()
        await purge
        assert (await proxy.settled())[0].saved_tokens > 0, "it came after the purge"


@on_loop
async def test_nothing_of_an_earlier_proxy_is_used_before_the_backend_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget, asked, may_go_on = Upstream.forget, asyncio.Event(), asyncio.Event()

    async def late(upstream: Upstream, keep: Sequence[str] = ()) -> None:
        asked.set()
        await may_go_on.wait()
        await forget(upstream, keep)

    home = Home(tmp_path / "home")
    home.prepare()
    with Index(home, 1 << 30) as index:
        index.change(Tables.leaves_traces)
    monkeypatch.setattr(Upstream, "forget", late)
    async with pair(tmp_path) as proxy:
        proxy.backend.held["old"], proxy.backend.roots["old"] = packed(rendered({"messages": FIRST})[0]), ROOT
        await asked.wait()
        running = asyncio.create_task(proxy.chat(messages=NEXT))
        while not list(proxy.app[LIVES]):
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
        index.change(Tables.leaves_traces)
    async with pair(tmp_path) as proxy:
        await proxy.backend.called("forget")
        await proxy.backend.called("residents")
        assert proxy.backend.calls["forget"] == [[]] and not proxy.index.is_untold()


@on_loop
async def test_a_purge_whose_caller_left_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(tmp_path) as proxy:
        session = await spoken(proxy, FIRST)
        began, may_go_on, loop, compact = asyncio.Event(), threading.Event(), asyncio.get_running_loop(), Index.compact

        def compacting() -> None:
            loop.call_soon_threadsafe(began.set)
            may_go_on.wait()
            compact(proxy.index)

        monkeypatch.setattr(proxy.index, "compact", compacting)
        purge = asyncio.create_task(purged(proxy, session=session))
        await began.wait()
        purge.cancel()
        while (await proxy.status())["connections"] > 1:
            pass
        may_go_on.set()
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
            raise IndexFull("no space left")

        monkeypatch.setattr(proxy.index, "compact", full)
        owner = {"Authorization": f"Bearer {proxy.home.secret()}"}
        url = f"{proxy.url}/warmline/purge"
        async with proxy.client.post(url, json={"session": session}, headers=owner) as response:
            assert response.status >= 500 and "no space left" in await response.text()
        await let_go(proxy, running)
        assert (await proxy.settled())[0].saved_tokens == 0
        assert proxy.backend.calls["forget"] and proxy.index.segments() == []


def written(home: Home, row: SegmentRow, plan: SavePlan) -> SavedFile:
    """The rest of a file such as the fake backend writes them: nothing is in it."""
    path = home.segment_file(plan.segments[0].id)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(b"rest")
    return SavedFile(id=plan.segments[0].id, bytes_written=4, checksum="rest")


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cut, "_written", written)


@pytest.mark.usefixtures("cuts")
@on_loop
async def test_what_runs_on_what_is_cut_away_does_not_bring_it_back(tmp_path: Path) -> None:
    """And what runs on the rest of the same file is kept."""
    async with pair(tmp_path) as proxy:
        session, other = await spoken(proxy, LONG), await spoken(proxy, ALIKE)
        running = await held(proxy, LONGER)
        (cut,) = (await purged(proxy, session=session))["cuts"]
        assert cut["until"] < cut["end"] and not cut["why_not"]
        await let_go(proxy, running)
        assert (await proxy.settled())[0].saved_tokens == 0
        assert [row.id for row in proxy.index.sessions()] == [other]
        assert proxy.index.segment(cut["became"])
        running = await held(proxy, [*ALIKE, *LONGER[1:]])
        await purged(proxy, session="0" * 12)
        await let_go(proxy, running)
        assert (await proxy.settled())[0].saved_tokens > 0


@on_loop
async def test_what_begins_while_the_rest_of_a_file_is_written_does_not_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path) as proxy:
        session, _ = await spoken(proxy, LONG), await spoken(proxy, ALIKE)
        began, may_go_on, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

        def writing(*arguments: Any) -> Any:
            loop.call_soon_threadsafe(began.set)
            may_go_on.wait()
            return written(*arguments)

        monkeypatch.setattr(index_cut, "_written", writing)
        purge = asyncio.create_task(purged(proxy, session=session))
        await began.wait()
        running = await held(proxy, LONGER)
        may_go_on.set()
        assert [cut["why_not"] for cut in (await purge)["cuts"]] == [""]
        await let_go(proxy, running)
        assert (await proxy.settled())[0].saved_tokens == 0
        assert len(proxy.index.sessions()) == 1


@pytest.mark.usefixtures("cuts")
@on_loop
async def test_a_file_that_is_cut_and_being_read_goes_before_the_purge_answers(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        session, _ = await spoken(proxy, LONG), await spoken(proxy, ALIKE)
        (old,) = [row.id for row in proxy.index.segments() if not row.parent]
        proxy.backend.restart()
        proxy.backend.restoring_allowed.clear()
        running = asyncio.create_task(proxy.chat(messages=ALIKE))
        await proxy.backend.called("restore")
        purge = asyncio.create_task(purged(proxy, session=session))
        await proxy.backend.called("forget")
        assert proxy.home.segment_file(old).exists() and not purge.done()
        proxy.backend.restoring_allowed.set()
        await purge
        assert not proxy.home.segment_file(old).exists()
        assert (await running).status == 200
        assert (await proxy.settled())[0].source == "restored"


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
        mine, yours = (keys_file.add(proxy.home, name) for name in ("mine", "yours"))
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
            keys_file.remove(proxy.home, "mine")
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
        mine = keys_file.add(proxy.home, "mine")
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
        keys_file.remove(proxy.home, "mine")
        await purged(proxy, roots=[namespace("f" * 64, mine.tenant).hex()])
        rest.set()
        assert (await running).status == 200
        assert (await proxy.settled())[0].saved_tokens == 0 and proxy.index.sessions() == []


@on_loop
async def test_a_purge_of_a_key_that_is_not_there_is_refused(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        await spoken(proxy, FIRST)
        owner = {"Authorization": f"Bearer {proxy.home.secret()}"}
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
        proxy.backend.restart()
        proxy.backend.restoring_allowed.clear()
        running = asyncio.create_task(proxy.chat(messages=NEXT))
        await proxy.backend.called("restore")
        purge = asyncio.create_task(purged(proxy, session=session))
        await proxy.backend.called("forget")
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
    (route,) = app.router.routes()
    return [route.handler.__self__, *app.values()]


def _attributes(value: object) -> list[tuple[str, object]]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    fields = [*getattr(value, "__struct_fields__", ()), *slots]
    named = {name: getattr(value, name) for name in fields if hasattr(value, name)}
    return [*named.items(), *getattr(value, "__dict__", {}).items()]


@on_loop
async def test_what_is_being_read_meanwhile_is_left_to_nobody(tmp_path: Path) -> None:
    async with pair(tmp_path) as proxy:
        session = await spoken(proxy, FIRST)
        proxy.backend.restart()
        proxy.backend.restoring_allowed.clear()
        running = asyncio.create_task(proxy.chat(messages=NEXT))
        await proxy.backend.called("restore")
        purge = asyncio.create_task(purged(proxy, session=session))
        await proxy.backend.called("forget")
        proxy.backend.restoring_allowed.set()
        await purge
        assert (await running).headers["X-Warmline-Cache"] == "cold 0"
        assert len(proxy.backend.calls["drop"]) == 2, "what was read, and what was made of it"
