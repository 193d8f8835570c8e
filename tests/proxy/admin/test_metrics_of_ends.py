"""Metrics of requests that end early: phase and cancel source."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from support.proxy.metric_values import count_cancels, scrape, wait_until, wait_until_async
from warmline_common.protocol.messages import HEADER_REQUEST
from warmline_proxy.app import COMPONENTS, REQUEST_REGISTRY
from warmline_proxy.errors import ClientError, gateway_timeout, request_cancelled, service_unavailable
from warmline_proxy.metrics import find_cancel_source

LONG = "A long question. " * 20
WITH_ID = {HEADER_REQUEST: "mine-1"}


async def delete_request(proxy: ProxyHarness) -> None:
    async with proxy.client.delete(f"{proxy.url}/v1/requests/mine-1") as response:
        assert response.status == 200


@on_loop
async def test_cancel_while_queued(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, running_count_max=1) as proxy:
        proxy.backend.hold_after = 1
        first = asyncio.create_task(proxy.chat("The first"))
        await proxy.backend.holding.wait()
        second = asyncio.create_task(proxy.chat(headers=WITH_ID))
        await wait_until_async(lambda: is_queued(proxy))
        await delete_request(proxy)
        proxy.backend.may_continue.set()
        assert [(await each).status for each in (first, second)] == [200, 499]
        assert await count_cancels(proxy) == {("waiting", "delete"): 1}
        found = await scrape(proxy)
        assert found.group_by("warmline_requests_total", "outcome", "status") == {
            ("ok", "2xx"): 1,
            ("cancelled", "4xx"): 1,
        }
        assert found.group_by("warmline_errors_total", "status", "code") == {("499", "cancelled"): 1}


async def is_queued(proxy: ProxyHarness) -> bool:
    found = await scrape(proxy)
    return found.total("warmline_requests_queued") == 1 == found.total("warmline_requests_running")


@on_loop
async def test_cancel_while_restoring(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        await proxy.chat(LONG)
        await proxy.wait_until_saved()
        proxy.backend.restart()
        proxy.backend.restoring_allowed.clear()
        running = asyncio.create_task(proxy.chat(LONG, headers=WITH_ID))
        await proxy.backend.wait_for_calls("restore")
        await delete_request(proxy)
        assert (await running).status == 499
        assert await count_cancels(proxy) == {("restoring", "delete"): 1}


@pytest.mark.parametrize(("after", "phase"), [(0, "prefill"), (1, "decode")])
@on_loop
async def test_client_disconnect_by_phase(tmp_path: Path, after: int, phase: str) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after, proxy.backend.reports_start = after, True
        running = asyncio.create_task(proxy.chat())
        await proxy.backend.holding.wait()
        await wait_until_async(lambda: has_phase(proxy, phase))
        running.cancel()
        await proxy.backend.wait_for_calls("cancel")
        assert await count_cancels(proxy) == {(phase, "client"): 1}
        found = await scrape(proxy)
        assert found.group_by("warmline_requests_total", "outcome", "status") == {("cancelled", "none"): 1}
        assert found.total("warmline_errors_total") == 0


async def has_phase(proxy: ProxyHarness, phase: str) -> bool:
    await asyncio.sleep(0)
    status = {"prefill": "prefilling", "decode": "answering"}[phase]
    return [request.status for request in proxy.app[REQUEST_REGISTRY]] == [status]


@on_loop
async def test_client_disconnect_during_body(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        host, port = "127.0.0.1", int(proxy.url.rpartition(":")[2])
        _, writer = await asyncio.open_connection(host, port)
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 99\r\n\r\n{{".encode())
        await wait_until(lambda: len(proxy.app[REQUEST_REGISTRY]))
        writer.close()
        assert await count_cancels(proxy) == {("arriving", "client"): 1}


@pytest.mark.parametrize(
    ("settings", "by"), [({}, "total_timeout"), ({"stall_timeout_s": 0.1}, "stall_timeout")], ids=["total", "stall"]
)
@on_loop
async def test_deadline_exceeded(tmp_path: Path, settings: dict[str, Any], by: str) -> None:
    async with run_proxy(tmp_path, **settings) as proxy:
        proxy.backend.hold_after = 1
        running = asyncio.create_task(proxy.chat())
        if by == "total_timeout":
            await wait_until_async(lambda: has_phase(proxy, "decode"))
            proxy.pass_total_timeouts()
        assert (await running).status == 504
        assert await count_cancels(proxy) == {("decode", by): 1}
        assert (await scrape(proxy)).group_by("warmline_requests_total", "outcome", "status") == {("error", "5xx"): 1}


@on_loop
async def test_queue_timeout(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, running_count_max=1) as proxy:
        proxy.backend.hold_after = 1
        first = asyncio.create_task(proxy.chat())
        await proxy.backend.holding.wait()
        assert (await proxy.chat("Another", headers={"X-Warmline-Queue-Timeout": "0.1"})).status == 503
        proxy.backend.may_continue.set()
        assert (await first).status == 200
        assert await count_cancels(proxy) == {("waiting", "queue_timeout"): 1}


@on_loop
async def test_retry_supersedes_running_request(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        session = {"X-Session-ID": "s-1"}
        first = asyncio.create_task(proxy.chat(headers={**session, "x-stainless-retry-count": "0"}))
        await proxy.backend.holding.wait()
        proxy.backend.hold_after = None
        assert (await proxy.chat(headers={**session, "x-stainless-retry-count": "1"})).status == 200
        assert (await first).status == 499
        assert await count_cancels(proxy) == {("decode", "superseded"): 1}


@on_loop
async def test_shutdown_ends_running_request(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, drain_timeout_s=0.0) as proxy:
        proxy.backend.hold_after = 1
        running = asyncio.create_task(proxy.chat())
        await proxy.backend.holding.wait()
        await proxy.app[COMPONENTS].drain()
        assert (await running).status == 503
        assert await count_cancels(proxy) == {("decode", "shutdown"): 1}


@pytest.mark.parametrize(
    ("reason", "by"),
    [
        (request_cancelled("by DELETE"), "delete"),
        (request_cancelled("another has failed", cancel_source="choice"), "choice"),
        (gateway_timeout("nobody reads it", "client_too_slow"), "slow_reader"),
        (service_unavailable("it is being stopped", "shutting_down"), "shutdown"),
        (service_unavailable("for another reason"), "other"),
        (ClientError(500, b"no JSON"), "other"),
    ],
)
def test_find_cancel_source(reason: ClientError, by: str) -> None:
    assert find_cancel_source(reason) == by


@on_loop
async def test_choices_are_counted_separately(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        running = asyncio.create_task(proxy.chat(headers=WITH_ID, n=2))
        await proxy.backend.wait_for_calls("generate", 2)
        await wait_until(lambda: [request.status for request in proxy.app[REQUEST_REGISTRY]].count("answering") == 3)
        live = [(each["phase"], each["choices"]) for each in (await proxy.status())["live"]]
        assert live == [("answering", 2), ("answering", 0), ("answering", 0)]
        await delete_request(proxy)
        assert (await running).status == 499
        assert await count_cancels(proxy) == {("decode", "delete"): 2}
        found = await scrape(proxy)
        assert found.total("warmline_requests_total", outcome="cancelled") == 2
        assert found.total("warmline_errors_total") == 1, "one response for both choices"
