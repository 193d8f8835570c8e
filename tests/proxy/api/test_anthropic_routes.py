"""Anthropic's paths of a proxy before a fake backend: messages, counts, models, failures."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.proxy.fake_backend import make_chunk
from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from warmline_common.protocol.sse import SseParser, encode_event

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"


def make_body(text: str = "Where?", **fields: Any) -> dict[str, Any]:
    return {"model": "claude", "max_tokens": 9, "messages": [{"role": "user", "content": text}], **fields}


async def post_body(proxy: ProxyHarness, path: str, sent: Any, **headers: str) -> aiohttp.ClientResponse:
    response = await proxy.client.post(proxy.url + path, json=sent, headers=headers)
    await response.read()
    return response


async def read_error(response: aiohttp.ClientResponse) -> tuple[int, str]:
    body_json = await response.json()
    assert body_json["type"] == "error"
    return response.status, str(body_json["error"]["type"])


@pytest.mark.parametrize("path", [f"{PATH}?beta=true", f"{PATH}/"])
@on_loop
async def test_message_is_recorded_and_next_turn_is_warm(tmp_path: Path, path: str) -> None:
    async with run_proxy(tmp_path) as proxy:
        first = await (await post_body(proxy, path, make_body())).json()
        assert first["content"] == [{"type": "text", "text": "Paris."}] and first["stop_reason"] == "end_turn"
        talk = [
            *make_body()["messages"],
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": "?"},
        ]
        response = await post_body(proxy, path, make_body(messages=talk), **{"X-Claude-Code-Session-Id": "s-1"})
        usage, reused = (await response.json())["usage"], len("<user>Where?\n<assistant>Paris.")
        assert usage["cache_read_input_tokens"] == reused
        assert response.headers["X-Warmline-Cache"] == f"resident {reused}"
        record = (await proxy.wait_until_saved())[0]
        assert (record.endpoint, record.client_model, record.cached_tokens) == ("messages", "claude", reused)


@on_loop
async def test_count_tokens_needs_no_ticket(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, running_count_max=1, queue_count_max=0) as proxy:
        proxy.backend.hold_after = 1
        running = asyncio.create_task(proxy.chat())
        await proxy.backend.holding.wait()
        assert await read_error(await post_body(proxy, PATH, make_body())) == (429, "rate_limit_error")
        response = await post_body(proxy, COUNT, {**make_body(), "max_tokens": None})
        assert await response.json() == {"input_tokens": len("<user>Where?\n<assistant>")}
        proxy.backend.may_continue.set()
        await running
        assert len(proxy.backend.calls["generate"]) == 1


@on_loop
async def test_count_tokens_equals_usage_of_stabilized_prompt(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, stabilize="times") as proxy:
        sent = make_body(system="It is 14:22.")
        counted = (await (await post_body(proxy, COUNT, sent)).json())["input_tokens"]
        response = await post_body(proxy, PATH, sent)
        usage = (await response.json())["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert response.headers["X-Warmline-Stabilized"] == "times=1"
        assert proxy.backend.calls["prompts"][0]["messages"] == proxy.backend.calls["prompts"][1]["messages"]


@on_loop
async def test_models_are_listed_under_any_name(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.client.headers["anthropic-version"] = "2023-06-01"
        async with proxy.client.get(f"{proxy.url}/v1/models?limit=1000") as response:
            listed = await response.json()
        assert listed["data"][0]["type"] == "model" and listed["first_id"] == listed["last_id"] == "fake-model"
        async with proxy.client.get(f"{proxy.url}/v1/models/claude-any") as response:
            model = await response.json()
        assert (model["id"], model["display_name"], model["max_input_tokens"]) == ("claude-any", "fake-model", 100_000)
        assert model["created_at"] == "2023-11-14T22:13:20+00:00"


@on_loop
async def test_wrong_keys_and_methods_are_refused(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, client_key="sesame") as proxy:
        assert await read_error(await post_body(proxy, PATH, make_body())) == (401, "authentication_error")
        assert await read_error(await post_body(proxy, COUNT, make_body(), **{"x-api-key": "other"})) == (
            401,
            "authentication_error",
        )
        assert (await post_body(proxy, PATH, make_body(), **{"x-api-key": "sesame"})).status == 200
        proxy.client.headers["Authorization"] = "Bearer sesame"
        for path in (PATH, COUNT):
            assert await read_error(await proxy.client.get(proxy.url + path)) == (405, "invalid_request_error")
        assert await read_error(await post_body(proxy, f"{PATH}/batches", {})) == (404, "not_found_error")


@on_loop
async def test_refusals_have_anthropic_error_types(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        assert await read_error(await post_body(proxy, PATH, {})) == (400, "invalid_request_error")
        assert await read_error(await post_body(proxy, COUNT, {"messages": []})) == (400, "invalid_request_error")
        refused = await post_body(proxy, PATH, make_body(stop_sequences=["x"]))  # as scripted
        assert (await refused.json())["error"]["message"] == "'stop' must be a string"
        await proxy.stop_backend()
        assert await read_error(await post_body(proxy, COUNT, make_body())) == (503, "overloaded_error")


@on_loop
async def test_broken_stream_ends_with_error_event(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.generation_faults = ["cut after content"]
        response = await post_body(proxy, PATH, make_body(stream=True))
        events = list(SseParser().feed(await response.read()))
        names = [event.name.decode() for event in events if event.data]
        assert names == ["message_start", "content_block_start", "content_block_delta", "error"]
        assert json.loads(events[-1].data)["error"]["type"] == "api_error"


@on_loop
async def test_invalid_chunk_returns_502(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        nonsense = {**make_chunk({"messages": []}, "x"), "choices": [{"delta": {"content": 5}}]}
        proxy.backend.raw = [encode_event(json.dumps(nonsense).encode()), b"data: [DONE]\n\n"]
        assert await read_error(await post_body(proxy, PATH, make_body())) == (502, "api_error")


@on_loop
async def test_delete_by_message_id_cancels(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 1
        async with proxy.client.post(proxy.url + PATH, json=make_body(stream=True)) as response:
            parser, start = SseParser(), dict[str, Any]()
            while start.get("type") != "message_start":
                for event in parser.feed(await response.content.readany()):
                    start = json.loads(event.data) if event.name == b"message_start" else start
            name = start["message"]["id"]
            async with proxy.client.delete(f"{proxy.url}/v1/requests/{name}") as deleted:
                assert deleted.status == 200
            rest = await response.read()
        assert list(parser.feed(rest))[-1].name == b"error"
