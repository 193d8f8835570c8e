"""Progress of the prefill as data: chunks for a client that asks, events of Messages and Responses."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from warmline_common.protocol.sse import SseEvent, SseParser
from warmline_proxy.api.anthropic import adapter as messages
from warmline_proxy.api.anthropic import response as message_events
from warmline_proxy.api.responses import adapter as responses
from warmline_proxy.pipeline import deadline_monitor

TEXT = "A long question. " * 20
PROMPT_TOKENS = len(f"<user>{TEXT}\n<assistant>")
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": TEXT}], "return_progress": True},
    "completions": {"prompt": f"<user>{TEXT}\n<assistant>", "return_progress": True},
    "messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 9},
    "responses": {"input": TEXT},
}


async def stream(
    proxy: ProxyHarness, path: str, headers: dict[str, str] | None = None, **fields: Any
) -> tuple[list[SseEvent], list[Any]]:
    """All events of a stream, and their data."""
    body = {**BODIES[path], "stream": True, **fields}
    async with proxy.client.post(f"{proxy.url}/v1/{path}", json=body, headers=headers) as answer:
        return read_events(await answer.read())


def read_events(text: bytes) -> tuple[list[SseEvent], list[Any]]:
    events = list(SseParser().feed(text))
    return events, [json.loads(each.data) for each in events if each.data not in (b"", b"[DONE]")]


def send_all_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Messages and Responses have each event of progress, however short the prefill."""
    for module in (messages, responses):
        monkeypatch.setattr(module, "PROGRESS_INTERVAL_S", 0.0)
    monkeypatch.setattr(message_events, "UNCHANGED_INTERVAL_S", 0.0)


def list_processed(data: list[Any]) -> list[tuple[int, int, int]]:
    reports = [each["prompt_progress"] for each in data if "prompt_progress" in each]
    return [(each["cache"], each["processed"], each["total"]) for each in reports]


@on_loop
async def test_client_that_asks_gets_chunks_beside_comments(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.reports_start, proxy.backend.hold_after = True, 0
        url, body = f"{proxy.url}/v1/chat/completions", {**BODIES["chat/completions"], "stream": True, "model": "any"}
        async with proxy.client.post(url, json=body) as answer:
            first = json.loads((await answer.content.readuntil(b"\n\n")).removeprefix(b"data: "))
            assert first["prompt_progress"].keys() == {"total", "cache", "processed", "time_ms"}
            assert list_processed([first]) == [(0, 0, PROMPT_TOKENS)] and first["model"] == "any"
            assert first["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}]
            proxy.backend.hold_after = None
            proxy.backend.may_continue.set()
            assert b": prefill 0/" in await answer.read()
        await proxy.wait_until_saved()
        for path, options in (("chat/completions", {"n": 2}), ("completions", {})):
            events, data = await stream(proxy, path, **options)
            cached, reports = PROMPT_TOKENS - 1, [each for each in data if "prompt_progress" in each]
            expected = [(cached, cached, PROMPT_TOKENS)] * 2 + [(cached, PROMPT_TOKENS, PROMPT_TOKENS)]
            assert list_processed(data) == expected, "once for all choices; the last before the first token"
            assert {each["choices"][0]["index"] for each in reports} == {0} and events[-1].data == b"[DONE]"
            assert all(isinstance(each["prompt_progress"]["time_ms"], int) for each in reports)
        assert reports[0]["object"] == "text_completion" and reports[0]["choices"][0]["text"] == ""
        assert "prompt_progress" not in await (await proxy.chat(TEXT, return_progress=True)).text()
        for wrong in ("yes", 1, []):
            assert (refusal := await proxy.chat(TEXT, return_progress=wrong)).status == 400
            assert (await refusal.json())["error"]["param"] == "return_progress"


@on_loop
@pytest.mark.parametrize("path", ["messages", "responses"])
async def test_events_of_progress_survive_loss_of_backend(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.reports_start = True
        assert not list_processed((await stream(proxy, path))[1]), "none in a short prefill"
        await proxy.wait_until_saved()
        send_all_progress(monkeypatch)
        proxy.backend.generation_faults = ["cut"]
        events, data = await stream(proxy, path, {"User-Agent": "claude-cli/2.1.197 (external, cli)"})
        processed = [PROMPT_TOKENS - 1] * 3 + [PROMPT_TOKENS]
        assert list_processed(data) == [(PROMPT_TOKENS - 1, each, PROMPT_TOKENS) for each in processed]
        names = [each["type"] for each in data]
        assert [each.name.decode() for each in events if each.data] == names
        if path == "responses":
            assert [each["sequence_number"] for each in data] == list(range(len(data)))
            assert names[:3] == ["response.created", "response.in_progress", "keepalive"]
            assert names[-1] == "response.completed" and names.count("response.created") == 1
        else:
            assert names[:4] == ["ping", "message_start", "message_delta", "ping"] and names.count("message_start") == 1
            assert data[1]["message"]["usage"]["input_tokens"] == data[2]["usage"]["output_tokens"] == 0
            assert data[-2]["usage"]["cache_read_input_tokens"] == PROMPT_TOKENS - 1 and names[-1] == "message_stop"


@on_loop
async def test_sdks_read_streams_with_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send_all_progress(monkeypatch)
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.reports_start = True
        async with AsyncAnthropic(base_url=proxy.url, api_key="unused") as anthropic:
            async with anthropic.messages.stream(model="any", **BODIES["messages"]) as answer:
                message = await answer.get_final_message()
            assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Paris."}]
            assert (message.stop_reason, message.usage.input_tokens) == ("end_turn", PROMPT_TOKENS)
            headers = {"User-Agent": "claude-cli/2.1.197 (external, cli)"}
            async with anthropic.messages.stream(model="any", extra_headers=headers, **BODIES["messages"]) as answer:
                types = [event.type async for event in answer]
            assert types[:2] == ["message_start", "message_delta"] and (await answer.get_final_text()) == "Paris."
        async with AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="unused") as openai:
            async with openai.responses.stream(model="any", **BODIES["responses"]) as response:
                events: list[Any] = [event async for event in response]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert "keepalive" in [event.type for event in events]
            assert events[-1].response.output_text == "Paris."
            fields: Any = {"messages": BODIES["chat/completions"]["messages"], "extra_body": {"return_progress": True}}
            async with openai.chat.completions.stream(model="any", **fields) as chat:
                chunks: list[Any] = [event.chunk async for event in chat if event.type == "chunk"]
            assert (await chat.get_final_completion()).choices[0].message.content == "Paris."
            progress = [chunk.prompt_progress for chunk in chunks if "prompt_progress" in chunk.model_extra]
            assert progress[0]["processed"] < progress[-1]["processed"] == progress[-1]["total"]


@on_loop
@pytest.mark.parametrize("path", ["messages", "responses", "chat/completions"])
async def test_queued_client_gets_events(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline_monitor, "HEARTBEAT_INTERVAL_S", 0.1)
    async with run_proxy(tmp_path, running_count_max=1, wedge_timeout_s=1) as proxy:
        proxy.backend.hold_after = 1
        first = asyncio.create_task(proxy.chat("The first"))
        await proxy.backend.holding.wait()
        proxy.backend.advances_steps = True
        async with proxy.client.post(f"{proxy.url}/v1/{path}", json={**BODIES[path], "stream": True}) as second:
            beginning = await second.content.readuntil(b"prompt_progress")
            proxy.backend.may_continue.set()
            data = read_events(beginning + await second.read())[1]
        assert list_processed(data)[0] == (0, 0, PROMPT_TOKENS) and (await first).status == 200
        if path == "responses":
            assert [each["sequence_number"] for each in data] == list(range(len(data)))
            assert data[-1]["type"] == "response.completed" and data[0]["response"]["id"] == data[-1]["response"]["id"]


@on_loop
async def test_stream_that_fails_after_progress_ends_as_its_api_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_all_progress(monkeypatch)
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.hold_after = 0
        for path, last in (("responses", "response.failed"), ("messages", "error")):
            url, body = f"{proxy.url}/v1/{path}", {**BODIES[path], "stream": True}
            async with proxy.client.post(url, json=body) as answer:
                beginning = await answer.content.readuntil(b"prompt_progress")
                proxy.pass_total_timeouts()
                data = read_events(beginning + await answer.read())[1]
            assert data[-1]["type"] == last and "total time" in json.dumps(data[-1])
            if path == "responses":
                assert [each["sequence_number"] for each in data] == list(range(len(data)))
