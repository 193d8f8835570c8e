"""Stored responses through the proxy: read, listed, deleted and continued by their own key, gone with a purge."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.proxy.harness import TEST_TIMEOUT_S, ProxyHarness, on_loop, run_proxy
from support.proxy.purges import run_purge
from support.proxy.responses import RESPONSES_PATH, read_events
from support.proxy.stored_responses import TEXT, create, create_large, fetch, hold_response, post
from warmline_proxy.auth.key_store import add_key
from warmline_proxy.index.index import Index
from warmline_proxy.index.responses import MB
from warmline_proxy.store.errors import IndexFullError


@on_loop
async def test_response_is_read_continued_and_deleted(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        first = await create(proxy)
        assert await fetch(proxy, first["id"]) == (200, first) and first["store"] is True
        second = await create(proxy, "And of Spain?", previous_response_id=first["id"])
        whole = [{"role": "user", "content": TEXT}, *first["output"], {"role": "user", "content": "And of Spain?"}]
        third = await create(proxy, whole)
        prompts = [call["messages"] for call in proxy.backend.calls["prompts"]]
        assert prompts[1] == prompts[2] and len(prompts[1]) == 3
        cached = [each["usage"]["input_tokens_details"]["cached_tokens"] for each in (second, third)]
        assert cached[0] > len(TEXT) and cached[1] >= cached[0]
        assert await fetch(proxy, first["id"], method="DELETE") == (
            200,
            {"id": first["id"], "object": "response", "deleted": True},
        )
        for method in ("GET", "DELETE"):
            status, reply = await fetch(proxy, first["id"], method=method)
            assert (
                status == 404 and reply["error"]["code"] == "not_found" and "store: false" in reply["error"]["message"]
            )
        again = await create(proxy, "And of Italy?", previous_response_id=second["id"])
        assert again["previous_response_id"] == second["id"], "a later response has the whole conversation"


@on_loop
async def test_streamed_response_can_be_used_once_its_end_is_seen(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        events = await read_events(await post(proxy, stream=True))
        response = events[-1]["response"]
        assert await fetch(proxy, response["id"]) == (200, response)
        reference = {"type": "item_reference", "id": response["output"][0]["id"]}
        await create(proxy, [{"role": "user", "content": TEXT}, reference, {"role": "user", "content": "And?"}])
        assert proxy.backend.calls["prompts"][1]["messages"][1]["content"] == "Paris."


@on_loop
async def test_input_items_are_paged(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        first = await create(proxy, "One?")
        second = await create(proxy, "Two?", previous_response_id=first["id"])
        _, page = await fetch(proxy, f"{second['id']}/input_items?limit=2&order=asc")
        assert page["has_more"] and [item["role"] for item in page["data"]] == ["user", "assistant"]
        assert page["data"][1] == first["output"][0]
        _, rest = await fetch(proxy, f"{second['id']}/input_items?order=asc&after={page['last_id']}")
        assert [item["content"][0]["text"] for item in rest["data"]] == ["Two?"] and not rest["has_more"]
        for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")):
            status, reply = await fetch(proxy, f"{second['id']}/input_items?{query}")
            assert status == 400 and reply["error"]["param"] == param
        status, reply = await fetch(proxy, f"{second['id']}?stream=true")
        assert status == 400 and reply["error"]["param"] == "stream"


@on_loop
async def test_response_that_is_larger_than_all_may_be_says_that_it_is_not_stored(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, responses_keep_mb=0.1) as proxy:
        for size, is_stored in ((60_000, True), (120_000, False)):
            response = await create_large(proxy, size)
            assert response["store"] is is_stored
            assert (await fetch(proxy, response["id"]))[0] == (200 if is_stored else 404)
        proxy.backend.answer = ["x" * 120_000]
        events = await read_events(await post(proxy, stream=True))
        stored = [event["response"]["store"] for event in events if "response" in event]
        assert stored == [True, True, False], "it is its answer that is too large"
        assert (await fetch(proxy, events[-1]["response"]["id"]))[0] == 404


@on_loop
async def test_response_of_another_key_is_unknown(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, share_cache=True, client_key="mine") as proxy:
        other = add_key(proxy.home, "other").key
        first = await create(proxy, key="mine")
        unknown = first["id"][:-1] + "_"
        for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            theirs = await fetch(proxy, first["id"] + rest, other, method)
            none = await fetch(proxy, unknown + rest, other, method)
            assert theirs[0] == none[0] == 404
            assert str(theirs[1]).replace(first["id"], "ID") == str(none[1]).replace(unknown, "ID")
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        assert (await post(proxy, key=other, previous_response_id=first["id"])).status == 400
        assert (await post(proxy, [reference], key=other)).status == 404
        assert (await fetch(proxy, first["id"], "mine"))[0] == 200


@pytest.mark.parametrize("settings", [{"responses_keep_days": 0.0}, {"responses_keep_mb": 0.0}])
@on_loop
async def test_nothing_is_stored_where_it_is_off(settings: dict[str, float], tmp_path: Path) -> None:
    async with run_proxy(tmp_path, **settings) as proxy:
        first = await create(proxy)
        assert first["store"] is False and (await fetch(proxy, first["id"]))[0] == 404
        error = (await (await post(proxy, previous_response_id=first["id"])).json())["error"]
        assert error["code"] == "previous_response_not_found" and "stores no responses" in error["message"]
        await proxy.wait_until_saved()
        assert proxy.index.responses() == []


@on_loop
async def test_store_false_is_obeyed(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        first = await create(proxy, store=False)
        assert first["store"] is False and (await fetch(proxy, first["id"]))[0] == 404
        await proxy.wait_until_saved()
        assert proxy.index.responses() == []


@on_loop
async def test_limits_of_settings_hold(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, responses_keep_days=2.0, responses_keep_mb=1.0, disk_budget_bytes=5 * MB) as proxy:
        assert proxy.index.response_limits.age_max_s == 172_800.0
        assert proxy.index.response_limits.bytes_max == MB // 2, "a tenth of the disk budget at most"


@on_loop
async def test_input_tokens_counts_previous_response(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        first = await create(proxy, "Hi.")
        body = {"input": "And?", "previous_response_id": first["id"]}
        counted = await (await proxy.client.post(f"{proxy.url}{RESPONSES_PATH}/input_tokens", json=body)).json()
        assert counted["input_tokens"] == len("<user>Hi.\n<assistant>Paris.\n<user>And?\n<assistant>")


# ---- written before the end of the answer


@contextmanager
def hold_writer(index: Index) -> Iterator[threading.Event]:
    """Keep the index from writing until the event is set, at the end at last."""
    may_write = threading.Event()
    index._writer.submit(lambda: may_write.wait(TEST_TIMEOUT_S))
    try:
        yield may_write
    finally:
        may_write.set()


@pytest.mark.parametrize(
    ("stream", "fault", "status"),
    [(True, "", "completed"), (False, "", "completed"), (True, "cut after content", "failed")],
)
@on_loop
async def test_answer_ends_once_its_response_is_written(
    tmp_path: Path, stream: bool, fault: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmline_proxy.pipeline.response_store.WRITE_TIMEOUT_S", TEST_TIMEOUT_S)
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.generation_faults = [fault]
        with hold_writer(proxy.index) as may_write:
            asking = asyncio.create_task(read_answer(proxy, stream, id_="r-1"))
            while (await fetch(proxy, "resp_r-1"))[0] == 404 or not proxy.index.find_response("", "r-1"):
                pass
            await asyncio.sleep(0.05)  # in which the answer could end
            assert proxy.index.responses() == [] and not asking.done()
            may_write.set()
            response = await asking
            assert [row.id for row in proxy.index.responses()] == ["r-1"]
        assert response["status"] == status and await fetch(proxy, "resp_r-1") == (200, response)


async def read_answer(proxy: ProxyHarness, stream: bool, id_: str = "r") -> Any:
    """Read the response, streamed or not, to its end."""
    body, headers = {"input": TEXT, "stream": stream}, {"X-Warmline-Request": id_}
    async with proxy.client.post(proxy.url + RESPONSES_PATH, json=body, headers=headers) as answer:
        return (await read_events(answer))[-1]["response"] if stream else await answer.json()


@pytest.mark.parametrize("stream", [True, False])
@on_loop
async def test_answer_ends_though_the_index_hangs(
    tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmline_proxy.pipeline.response_store.WRITE_TIMEOUT_S", 0.05)
    async with run_proxy(tmp_path) as proxy:
        with hold_writer(proxy.index):
            response = await read_answer(proxy, stream)
            assert response["store"] is True and await fetch(proxy, response["id"]) == (200, response)
            assert proxy.index.responses() == []
        await proxy.wait_until_saved()
        assert len(proxy.index.responses()) == 1


@on_loop
async def test_answer_ends_at_once_where_nothing_is_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without storing, by another API, and where the disk refuses the write."""
    monkeypatch.setattr("warmline_proxy.pipeline.response_store.WRITE_TIMEOUT_S", TEST_TIMEOUT_S)

    def refuse(change: object) -> None:
        raise IndexFullError("the disk is full")

    async with run_proxy(tmp_path) as proxy:
        with hold_writer(proxy.index):
            assert (await create(proxy, store=False))["store"] is False
            assert (await proxy.chat()).status == 200
        with monkeypatch.context() as broken:
            broken.setattr(proxy.index._environment, "write", refuse)
            response = await create(proxy)
            assert response["store"] is True and await fetch(proxy, response["id"]) == (200, response)


@on_loop
async def test_heartbeats_wait_with_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmline_proxy.pipeline.response_store.WRITE_TIMEOUT_S", 0.25)
    async with run_proxy(tmp_path, heartbeat_after_s=0.05) as proxy:
        with hold_writer(proxy.index):
            for stream in (False, True):
                assert (await read_answer(proxy, stream))["status"] == "completed"


# ---- running responses


@on_loop
async def test_running_response_is_in_progress_and_stored_as_cancelled(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        asking = await hold_response(proxy)
        assert (await fetch(proxy, "resp_r-1"))[1]["status"] == "in_progress"
        continued = await post(proxy, previous_response_id="resp_r-1")
        referred = await post(proxy, [{"type": "item_reference", "id": "msg_r-1_0"}])
        refusals = [(each.status, await each.json()) for each in (continued, referred)]
        for status, reply in (await fetch(proxy, "resp_r-1/input_items"), *refusals):
            assert (status, reply["error"]["code"]) == (409, "response_in_progress")
            assert "'resp_r-1' is still being answered: wait for its end" in reply["error"]["message"]
        cancelled = await fetch(proxy, "resp_r-1/cancel", method="POST")
        await read_events(await asking)
        assert cancelled == await fetch(proxy, "resp_r-1") and cancelled[1]["status"] == "cancelled"
        assert cancelled == await fetch(proxy, "resp_r-1/cancel", method="POST"), "it has ended, and stays as it is"


@on_loop
async def test_running_chat_is_no_response(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        asking = asyncio.create_task(proxy.chat(headers={"X-Warmline-Request": "r-1"}))
        await proxy.backend.holding.wait()
        for method, rest in (("GET", ""), ("POST", "/cancel"), ("DELETE", ""), ("GET", "/input_items")):
            assert (await fetch(proxy, f"resp_r-1{rest}", method=method))[0] == 404
        proxy.backend.may_continue.set()
        assert (await asking).status == 200


@on_loop
async def test_deleted_running_response_is_not_stored(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        asking = await hold_response(proxy)
        assert (await fetch(proxy, "resp_r-1", method="DELETE"))[0] == 200
        await read_events(await asking)
        assert (await fetch(proxy, "resp_r-1"))[0] == 404


@on_loop
async def test_broken_stream_is_stored_as_failed(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.generation_faults = ["cut after content"]
        response = (await read_events(await post(proxy, stream=True)))[-1]["response"]
        assert response["status"] == "failed" and await fetch(proxy, response["id"]) == (200, response)


# ---- purges


@on_loop
async def test_purges_of_a_session_and_of_all(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        first = await create(proxy)
        session = (await proxy.wait_until_saved())[0].session
        other = await create(proxy, "Something else entirely. " * 8)
        assert (await run_purge(proxy, session=session, dry_run=True))["responses"] == 1
        assert (await run_purge(proxy, session=session))["responses"] == 1
        assert (await fetch(proxy, first["id"]))[0] == 404 and (await fetch(proxy, other["id"]))[0] == 200
        await run_purge(proxy, everything=True)
        assert (await fetch(proxy, other["id"]))[0] == 404
        assert not any(b"something else" in path.read_bytes().lower() for path in proxy.home.index.rglob("data.mdb"))


@on_loop
async def test_purge_of_a_session_after_a_kill_before_its_responses_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first turn is saved, the second is not; a conversation that begins alike keeps its response."""
    monkeypatch.setattr(Index, "record_response_session", lambda *arguments: None)
    async with run_proxy(tmp_path) as proxy:
        first = await create(proxy)
        session = (await proxy.wait_until_saved())[0].session
        other = await create(proxy, TEXT + "Or of Spain?")
        proxy.backend.save_failures = [500]
        second = await create(proxy, "And?", previous_response_id=first["id"])
        await proxy.wait_until_saved()
        assert {row.session for row in proxy.index.responses()} == {""}
        assert (await run_purge(proxy, session=session))["responses"] == 2
        statuses = [(await fetch(proxy, each["id"]))[0] for each in (first, second, other)]
        assert statuses == [404, 404, 200]


@on_loop
async def test_purge_while_its_request_is_running_or_being_saved(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        first = await create(proxy)
        session = (await proxy.wait_until_saved())[0].session
        proxy.backend.saving_allowed.clear()
        second = await create(proxy, "And?", previous_response_id=first["id"])  # its session is not known yet
        asking = await hold_response(proxy, input="Or?", previous_response_id=first["id"])
        purge = asyncio.create_task(run_purge(proxy, session=session))
        await asyncio.sleep(0)
        proxy.backend.saving_allowed.set()
        assert (await purge)["responses"] == 2, "of the session, and of the request that is being saved in it"
        proxy.backend.hold_after = None
        proxy.backend.may_continue.set()
        third = (await read_events(await asking))[-1]["response"]
        assert third["status"] == "completed"
        for response in (first, second, third):
            assert (await fetch(proxy, response["id"]))[0] == 404


@on_loop
async def test_purge_of_a_key_removes_its_responses_alone(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, share_cache=True) as proxy:
        keys = [add_key(proxy.home, name).key for name in ("laptop", "desk")]
        first, second = [await create(proxy, key=key) for key in keys]
        await proxy.wait_until_saved()
        assert (await run_purge(proxy, key="laptop"))["responses"] == 1
        assert (await fetch(proxy, first["id"], keys[0]))[0] == 404
        assert (await fetch(proxy, second["id"], keys[1]))[0] == 200
        assert (await run_purge(proxy, key="shared"))["responses"] == 1, "with the conversations that all keys share"
