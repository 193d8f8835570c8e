"""Requests ended from outside: DELETE, drain, disconnects with a prefill to finish."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from warmline_proxy.app import COMPONENTS, REQUEST_REGISTRY
from warmline_proxy.errors import request_cancelled
from warmline_proxy.http.connections import CONNECTIONS

NAMED = {"X-Warmline-Request": "mine-1"}


async def delete_request(proxy: ProxyHarness, name: str) -> aiohttp.ClientResponse:
    response = await proxy.client.delete(f"{proxy.url}/v1/requests/{name}")
    await response.read()
    return response


@pytest.mark.parametrize("name", ["mine-1", "chatcmpl-mine-1"])
@on_loop
async def test_delete_returns_after_engine_release(tmp_path: Path, name: str) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        asking = asyncio.create_task(proxy.chat(headers=NAMED))
        await proxy.backend.holding.wait()
        deleted = await delete_request(proxy, name)
        assert (deleted.status, await deleted.json()) == (200, {"id": "mine-1", "object": "request", "cancelled": True})
        assert not proxy.backend.is_running
        answer = await asking
        assert answer.status == 499 and (await answer.json())["error"]["code"] == "cancelled"
        assert (await delete_request(proxy, name)).status == 404


@on_loop
async def test_cancel_empty_id_returns_404(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        asking = asyncio.create_task(proxy.chat())
        await proxy.backend.holding.wait()
        for path in ("requests/", "requests/chatcmpl-", "requests/resp_", "responses/resp_"):
            response = await proxy.client.delete(f"{proxy.url}/v1/{path}")
            assert response.status == 404, path
        proxy.backend.may_continue.set()
        assert (await asking).status == 200


@on_loop
async def test_delete_ends_stream_with_error_event(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        asking = asyncio.create_task(proxy.chat(headers=NAMED, stream=True))
        await proxy.backend.holding.wait()
        assert (await delete_request(proxy, "mine-1")).status == 200
        text = await (await asking).text()
        assert '"Par"' in text and '"code":"cancelled"' in text and "[DONE]" not in text


@on_loop
async def test_delete_removes_queued_request(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, running_count_max=1) as proxy:
        proxy.backend.hold_after = 1
        first = asyncio.create_task(proxy.chat("The first"))
        await proxy.backend.holding.wait()
        second = asyncio.create_task(proxy.chat(headers=NAMED))
        while not (await proxy.status())["queued"]:
            pass
        assert (await delete_request(proxy, "mine-1")).status == 200
        assert (await second).status == 499 and (await proxy.status())["queued"] == 0
        proxy.backend.may_continue.set()
        assert (await first).status == 200
        assert len(proxy.backend.calls["generate"]) == 1


@on_loop
async def test_delete_cancels_restore(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        question = "A long question. " * 20
        await proxy.chat(question)
        await proxy.wait_until_saved()
        proxy.backend.restart()
        proxy.backend.restoring_allowed.clear()
        asking = asyncio.create_task(proxy.chat(question, headers=NAMED))
        await proxy.backend.wait_for_calls("restore")
        assert (await delete_request(proxy, "mine-1")).status == 200
        assert proxy.backend.calls["cancel"] == ["mine-1"]
        assert (await asking).status == 499 and len(proxy.backend.calls["generate"]) == 1


@on_loop
async def test_duplicate_request_name_returns_409(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        asking = asyncio.create_task(proxy.chat(headers=NAMED))
        await proxy.backend.holding.wait()
        assert (await proxy.chat(headers=NAMED)).status == 409
        assert (await proxy.chat(headers={"X-Warmline-Request": "no spaces, please"})).status == 400
        proxy.backend.may_continue.set()
        assert (await asking).headers["X-Warmline-Request"] == "mine-1"


@on_loop
async def test_request_name_is_reusable_after_disconnect(tmp_path: Path) -> None:
    """The engine may still compute a chunk of the first try."""
    async with run_proxy(tmp_path, on_disconnect="finish-prefill") as proxy:
        proxy.backend.hold_after = 0
        asking = asyncio.create_task(proxy.chat("A long question. " * 20, headers=NAMED))
        await proxy.backend.holding.wait()
        asking.cancel()
        await proxy.backend.wait_for_calls("finish")
        retry = asyncio.create_task(proxy.chat("A long question. " * 20, headers=NAMED))
        await proxy.backend.wait_for_calls("generate", 2)
        assert (await delete_request(proxy, "mine-1")).status == 200, "the later try is meant"
        answer = await retry
        assert answer.status == 499 and answer.headers["X-Warmline-Request"].startswith("mine-1.")
        proxy.backend.may_continue.set()


@on_loop
async def test_drain_finishes_running_and_refuses_new_requests(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        running = asyncio.create_task(proxy.chat())
        await proxy.backend.holding.wait()
        draining = asyncio.create_task(proxy.app[COMPONENTS].drain())
        await asyncio.sleep(0)
        refused = await proxy.chat("Another one")
        assert refused.status == 503 and refused.headers["Retry-After"].isdigit()
        async with proxy.client.get(f"{proxy.url}/ready") as ready:
            assert ready.status == 503 and (await ready.json())["reason"] == "The proxy is being stopped."
        proxy.backend.may_continue.set()
        assert (await running).status == 200
        await draining
        assert (await proxy.status())["totals"]["tokens"] > 0, "answered requests are on disk"


@on_loop
async def test_drain_cancels_requests_after_timeout(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, drain_timeout_s=0.1) as proxy:
        proxy.backend.hold_after = 1
        running = asyncio.create_task(proxy.chat())
        await proxy.backend.holding.wait()
        await proxy.app[COMPONENTS].drain()
        answer = await running
        assert answer.status == 503 and (await answer.json())["error"]["code"] == "shutting_down"
        assert len(proxy.backend.calls["cancel"]) == 1 and (await proxy.status())["totals"]["tokens"] > 0


@on_loop
async def test_finish_prefill_after_disconnect(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, on_disconnect="finish-prefill") as proxy:
        proxy.backend.hold_after = 0
        asking = asyncio.create_task(proxy.chat("A long question. " * 20))
        await proxy.backend.holding.wait()
        asking.cancel()
        await proxy.backend.wait_for_calls("finish")
        assert not proxy.backend.calls["cancel"] and proxy.backend.is_running
        retry = asyncio.create_task(proxy.chat("A long question. " * 20))
        await proxy.backend.wait_for_calls("generate", 2)
        assert "X-Warmline-Follow" in proxy.backend.calls["generate"][1]
        proxy.backend.may_continue.set()
        assert (await retry).status == 200


@on_loop
async def test_disconnect_while_decoding_cancels(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, on_disconnect="finish-prefill") as proxy:
        proxy.backend.hold_after = 1
        body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
        async with proxy.client.post(f"{proxy.url}/v1/chat/completions", json=body) as answer:
            async for line in answer.content:
                if b"Par" in line:
                    break
        await proxy.backend.wait_for_calls("cancel")
        assert not proxy.backend.calls["finish"]


@on_loop
async def test_drain_cancels_all_requests_concurrently(tmp_path: Path) -> None:
    """A cancel that takes long does not delay the others' errors."""
    async with run_proxy(tmp_path, on_disconnect="finish-prefill", drain_timeout_s=0.1) as proxy:
        proxy.backend.hold_after = 0
        left = asyncio.create_task(proxy.chat("A first question", headers={"X-Warmline-Request": "left"}))
        await proxy.backend.holding.wait()
        left.cancel()
        await proxy.backend.wait_for_calls("finish")
        proxy.backend._running["left"] = asyncio.Event()  # never notices its cancel
        stays = asyncio.create_task(proxy.chat("Another question"))
        await proxy.backend.wait_for_calls("generate", 2)
        draining = asyncio.create_task(proxy.app[COMPONENTS].drain())
        try:
            assert (await asyncio.wait_for(stays, 5.0)).status == 503
        finally:
            draining.cancel()
            proxy.backend.may_continue.set()


@on_loop
async def test_finish_prefill_of_second_dispatch(tmp_path: Path) -> None:
    """Tokens of a lost dispatch are no content that the client has seen."""
    async with run_proxy(tmp_path, on_disconnect="finish-prefill") as proxy:
        proxy.backend.generation_faults, proxy.backend.hold_after = ["cut after content"], 0
        asking = asyncio.create_task(proxy.chat("A long question. " * 20))
        await proxy.backend.holding.wait()
        asking.cancel()
        calls: Any = proxy.backend.calls
        while not calls["finish"] and not calls["cancel"]:
            await proxy.status()
        proxy.backend.may_continue.set()
        assert calls["finish"] and not calls["cancel"]


@on_loop
async def test_second_dispatch_keeps_ticket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer between two dispatches must not displace an admitted request."""
    async with run_proxy(tmp_path, running_count_max=1, queue_count_max=0) as proxy:
        settle, failures = proxy.backend._finish, ["once"]

        def fail_once(*given: Any) -> Any:
            if failures.pop() if failures else "":
                raise RuntimeError("as scripted: the connection breaks off")
            return settle(*given)

        monkeypatch.setattr(proxy.backend, "_finish", fail_once)
        first = asyncio.create_task(proxy.chat("The first"))
        await proxy.backend.wait_for_calls("generate")
        while (await proxy.status())["running"] and not first.done():
            pass
        proxy.backend.hold_after = 0
        second = asyncio.create_task(proxy.chat("A newcomer"))
        if not first.done():
            await proxy.backend.wait_for_calls("generate", 2)
        await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        proxy.backend.may_continue.set()
        assert (await first).status == 200, await (await first).text()
        await second


@on_loop
async def test_delete_with_disconnect_does_not_finish_prefill(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, on_disconnect="finish-prefill") as proxy:
        proxy.backend.hold_after = 0
        asking = asyncio.create_task(proxy.chat("A long question. " * 20))
        await proxy.backend.holding.wait()
        await proxy.status()  # by then the proxy has the generation
        (request,) = proxy.app[REQUEST_REGISTRY]
        request.cancel(request_cancelled("The request was cancelled by DELETE."))
        proxy.app[CONNECTIONS].abort()  # in the same turn of the loop
        calls: Any = proxy.backend.calls
        while not calls["finish"] and not calls["cancel"]:
            await proxy.status()
        proxy.backend.may_continue.set()
        await asyncio.wait([asking])
        assert asking.exception() and calls["cancel"] and not calls["finish"]
