"""Heartbeats to waiting clients, while there is progress."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from support.proxy.harness import on_loop, run_proxy
from warmline_proxy.pipeline import deadline_monitor

BODY = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}


@on_loop
async def test_json_heartbeat_is_whitespace(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, heartbeat_after_s=0.1) as proxy:
        proxy.backend.hold_after = 0
        async with proxy.client.post(f"{proxy.url}/v1/chat/completions", json=BODY) as answer:
            assert await answer.content.readexactly(1) == b" "
            proxy.backend.may_continue.set()
            body = await answer.read()
        assert json.loads(body)["choices"][0]["message"]["content"] == "Paris."
        assert answer.status == 200 and answer.content_type == "application/json"


@on_loop
async def test_json_failure_after_heartbeat_aborts_connection(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, heartbeat_after_s=0.1) as proxy:
        proxy.backend.hold_after = 0
        async with proxy.client.post(f"{proxy.url}/v1/chat/completions", json=BODY) as answer:
            proxy.pass_total_timeouts()  # a heartbeat has begun the answer
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        (record,) = await proxy.wait_until_saved()
        assert record.outcome == "error" and "total time" in record.error


@on_loop
async def test_json_failure_without_heartbeat_has_status(tmp_path: Path) -> None:
    async with run_proxy(tmp_path, total_timeout_s=0.5) as proxy:
        proxy.backend.hold_after = 0
        assert (await proxy.chat()).status == 504


@on_loop
async def test_queued_stream_gets_heartbeat_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline_monitor, "HEARTBEAT_INTERVAL_S", 0.1)
    async with run_proxy(tmp_path, running_count_max=1, wedge_timeout_s=1) as proxy:
        proxy.backend.hold_after = 1
        first = asyncio.create_task(proxy.chat("The first"))
        await proxy.backend.holding.wait()
        proxy.backend.advances_steps = True
        async with proxy.client.post(f"{proxy.url}/v1/chat/completions", json={**BODY, "stream": True}) as second:
            assert await second.content.readline() == b": working\n"
            proxy.backend.may_continue.set()
            assert b"[DONE]" in await second.read()
        assert (await first).status == 200


@on_loop
async def test_heartbeats_stop_without_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline_monitor, "HEARTBEAT_INTERVAL_S", 0.1)
    async with run_proxy(tmp_path, heartbeat_after_s=0.1, stall_timeout_s=1.0) as proxy:
        proxy.backend.hold_after = 0
        async with proxy.client.post(f"{proxy.url}/v1/chat/completions", json=BODY) as answer:
            received = b""
            with pytest.raises(aiohttp.ClientPayloadError):
                while True:
                    received += await answer.content.readexactly(1)
        assert received in (b" ", b"  "), "after the first chunk, or also before a late one; none without progress"
