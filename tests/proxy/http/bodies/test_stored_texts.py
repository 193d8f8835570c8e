"""Stored responses that requests read: bounded in memory and structure, as bodies are."""

from pathlib import Path
from typing import Any

import pytest

from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from support.proxy.raw_connections import open_client, wait_until
from support.proxy.responses import RESPONSES_PATH, read_events
from support.proxy.stored_responses import QUESTION, create, create_large, fetch, hold_response, post
from warmline_proxy.app import COMPONENTS
from warmline_proxy.http.bodies import JSON_CONTAINERS_MAX, BodyReader, StoredText
from warmline_proxy.http.body_budget import BodyBudget, RequestBody


def find_budget(proxy: ProxyHarness) -> BodyBudget:
    return proxy.app[COMPONENTS].body_reader._budget


@on_loop
async def test_unread_pages_of_large_items_stay_within_the_budget(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, body_budget_mb=8) as proxy:
        rest, budget = f"{(await create_large(proxy, 1_900_000))['id']}/input_items", find_budget(proxy)
        clients = [await open_client(int(proxy.url.rpartition(":")[2]), 4096) for _ in range(6)]
        for client in clients:
            client.get(f"{RESPONSES_PATH}/{rest}")
        statuses = sorted([int((await client.reader.readline()).split()[1]) for client in clients])
        assert statuses[:2] == [200, 200] and statuses[3:] == [503] * 3, "three quarters of the budget are one client's"
        assert statuses.count(200) * 1_900_000 < budget.counted_bytes <= 6_000_000
        async with proxy.client.get(f"{proxy.url}/health") as health:
            assert health.status == 200
        for client in clients:
            client.reset()
        await wait_until(lambda: not budget.counted_bytes)
        status, page = await fetch(proxy, rest)
        assert status == 200 and len(page["data"][1]["query"]) == 1_900_000


@on_loop
async def test_continued_response_counts_until_its_answer(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, body_budget_mb=8) as proxy:
        first, budget = await create_large(proxy, 500_000), find_budget(proxy)
        await wait_until(lambda: not budget.counted_bytes)
        asking = await hold_response(proxy, input="And?", previous_response_id=first["id"])
        assert 500_000 < budget.counted_bytes < 600_000
        proxy.backend.may_continue.set()
        assert (await read_events(await asking))[-1]["response"]["store"] is True
        await wait_until(lambda: not budget.counted_bytes)


@on_loop
async def test_references_keep_their_items_alone_and_read_each_response_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, sizes = BodyReader.read_stored, list[int]()

    async def record(reader: BodyReader, body: RequestBody, data: bytes, coding: str) -> StoredText:
        text = await read(reader, body, data, coding)
        sizes.append(len(text.data))
        return text

    monkeypatch.setattr(BodyReader, "read_stored", record)
    async with run_proxy(tmp_path, body_budget_mb=1) as proxy:
        budget, references = find_budget(proxy), list[dict[str, str]]()
        for _ in range(4):  # all at once would exceed the budget
            response = await create_large(proxy, 300_000)
            references += [{"type": "item_reference", "id": response["output"][0]["id"]}, *QUESTION] * 2
        await proxy.wait_until_saved()
        asking = await hold_response(proxy, input=references, store=False)
        assert len(sizes) == 4 and 0 < budget.counted_bytes < 50_000
        proxy.backend.may_continue.set()
        await read_events(await asking)
        asked = proxy.backend.calls["prompts"][-1]["messages"]
        assert [each["content"] for each in asked] == ["Paris.", "Who?"] * 8


@on_loop
async def test_response_that_never_fits_into_the_budget_is_a_413(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, body_budget_mb=1) as proxy:
        proxy.backend.answer = ["x" * 400_000]
        first = await create_large(proxy, 400_000)
        for rest in (first["id"], f"{first['id']}/input_items"):
            status, reply = await fetch(proxy, rest)
            assert status == 413 and "750000 bytes" in reply["error"]["message"]
        assert (await post(proxy, previous_response_id=first["id"])).status == 413
        await wait_until(lambda: not find_budget(proxy).counted_bytes)


@on_loop
async def test_continued_conversation_is_bounded_as_if_it_were_sent_whole(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        part = {"type": "web_search_call", "parts": [{}] * (JSON_CONTAINERS_MAX * 2 // 3)}
        first = await create(proxy, [part, *QUESTION])
        await create(proxy, "And?", previous_response_id=first["id"])
        reference = {"type": "item_reference", "id": f"item_{first['id'].removeprefix('resp_')}_i0"}
        bodies: list[dict[str, Any]] = [
            {"value": [part], "previous_response_id": first["id"]},
            {"value": [reference, *QUESTION, reference]},
        ]
        for fields in bodies:
            answer = await post(proxy, **fields)
            message = (await answer.json())["error"]["message"]
            assert answer.status == 400 and "objects and lists, with the stored items" in message
        assert (await fetch(proxy, f"{first['id']}/input_items"))[0] == 200, "it is read all the same"


@on_loop
async def test_damaged_response_is_not_used(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        first = await create(proxy)
        await proxy.wait_until_saved()
        proxy.index.transact(lambda tables: tables.put("response_bodies", next(tables.items("responses"))[0], b"x" * 9))
        assert (await fetch(proxy, first["id"]))[0] == 404
        assert (await post(proxy, previous_response_id=first["id"])).status == 400
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        assert (await post(proxy, [reference])).status == 404
