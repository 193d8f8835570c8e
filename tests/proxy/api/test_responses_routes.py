"""Responses through the proxy: records, failures, cancels, unknown responses."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from warmline_common.protocol.sse import SseParser

PATH = "/v1/responses"


async def post_response(
    proxy: ProxyHarness, stream: bool = False, headers: dict[str, str] | None = None
) -> aiohttp.ClientResponse:
    body = {"model": "any", "input": "What is the capital of France?", "stream": stream}
    return await proxy.client.post(proxy.url + PATH, json=body, headers=headers)


async def read_events(response: aiohttp.ClientResponse) -> list[Any]:
    return [json.loads(event.data) for event in SseParser().feed(await response.read()) if event.data]


@on_loop
async def test_response_is_recorded_and_shares_cache_with_chat(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        answer = await (await post_response(proxy)).json()
        assert answer["output"][0]["content"][0]["text"] == "Paris." and answer["usage"]["output_tokens"] == 6
        assert proxy.backend.calls["prompts"][0]["messages"][0]["role"] == "user"
        chat = await proxy.chat()
        assert chat.headers["X-Warmline-Cache"].startswith("resident ")
        assert [record.endpoint for record in await proxy.wait_until_saved()] == ["chat", "responses"]


@on_loop
async def test_broken_stream_ends_with_response_failed(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.generation_faults = ["cut after content"]
        events = await read_events(await post_response(proxy, stream=True))
        assert events[-2]["delta"] == "Par" and events[-1]["type"] == "response.failed"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["response"]["error"]["code"] == "backend_failed"


@on_loop
async def test_lost_response_without_content_is_dispatched_again(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.generation_faults = ["cut"]
        events = await read_events(await post_response(proxy, stream=True))
        assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.completed"


@pytest.mark.parametrize(("method", "rest"), [("DELETE", ""), ("POST", "/cancel")])
@on_loop
async def test_cancel_running_response(method: str, rest: str, tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        asking = asyncio.create_task(post_response(proxy, stream=True, headers={"X-Warmline-Request": "r-1"}))
        await proxy.backend.holding.wait()
        ended = await proxy.client.request(method, f"{proxy.url}{PATH}/resp_r-1{rest}")
        reply = await ended.json()
        assert ended.status == 200 and reply["id"] == "resp_r-1"
        assert reply.get("deleted") or reply["status"] == "cancelled"
        events = await read_events(await asking)
        assert events[-1]["type"] == "response.failed" and events[-1]["response"]["error"]["code"] == "cancelled"


@on_loop
async def test_unknown_responses_return_404(tmp_path: Path) -> None:
    cases = [
        ("GET", "resp_1", "nor stored"),
        ("DELETE", "resp_1", "nor stored"),
        ("POST", "resp_1/cancel", "nor stored"),
        ("GET", "resp_1/input_items", "nor stored"),
        ("POST", "compact", "not compacted"),
    ]
    async with run_proxy(tmp_path) as proxy:
        for method, rest, word in cases:
            answer = await proxy.client.request(method, f"{proxy.url}{PATH}/{rest}")
            error = (await answer.json())["error"]
            assert answer.status == 404 and error["code"] == "not_found", (method, rest)
            assert word in error["message"], (method, rest)
        assert (await proxy.client.get(proxy.url + PATH)).status == 405


@on_loop
async def test_input_tokens_needs_no_ticket(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        counted = await proxy.client.post(f"{proxy.url}{PATH}/input_tokens", json={"input": "Hi."})
        assert await counted.json() == {
            "object": "response.input_tokens",
            "input_tokens": len("<user>Hi.\n<assistant>"),
        }
        assert not proxy.backend.calls["generate"] and not await proxy.wait_until_saved()


@on_loop
async def test_unknown_content_encoding_returns_415(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        data, headers = b"(\xb5/\xfd", {"Content-Encoding": "zstd"}
        answer = await proxy.client.post(proxy.url + PATH, data=data, headers=headers)
        assert answer.status == 415 and "gzip" in (await answer.json())["error"]["message"]
        assert "gzip" in answer.headers["Accept-Encoding"]
        for coding, status in (("br", 415), ("gzip", 400)):
            answer = await proxy.client.post(
                f"{proxy.url}/v1/messages", data=data, headers={"Content-Encoding": coding}
            )
            assert answer.status == status and (await answer.json())["type"] == "error"
        assert (await post_response(proxy)).status == 200
