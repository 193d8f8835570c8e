"""Relay of the backend's stream: model names, special bytes, usage, failures."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.proxy.fake_backend import SERVED, make_chunk, make_usage_chunk
from support.proxy.harness import on_loop, run_proxy
from warmline_common.protocol.sse import SseParser

CHAT = {"messages": []}


def parse_events(body: bytes) -> list[dict[str, Any]]:
    parsed = [event.data for event in SseParser().feed(body) if event.data and event.data != b"[DONE]"]
    return [json.loads(data) for data in parsed]


def make_stream(*chunks: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(each, ensure_ascii=False).encode() + b"\n\n" for each in chunks)


@on_loop
async def test_response_has_client_model_name(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        for name in ("openai/glm-5.2", "gpt-4o", SERVED, 'odd "name" \u2028 é'):
            folded = await (await proxy.chat(model=name)).json()
            assert folded["model"] == name
            streamed = parse_events(await (await proxy.chat(model=name, stream=True)).read())
            assert [each["model"] for each in streamed] == [name] * len(streamed)
        assert {body["model"] for body in proxy.backend.calls["prompts"]} == {SERVED}


@on_loop
async def test_response_without_model_has_served_name(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        for model in ({"model": None}, {}):
            body = {"messages": [{"role": "user", "content": "hi"}], **model}
            async with proxy.client.post(f"{proxy.url}/v1/chat/completions", json=body) as response:
                assert (await response.json())["model"] == SERVED, model


@on_loop
async def test_unknown_fields_pass_and_nulls_are_absent(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        odd = {"big": 123456789012345678901234567890, "nested": {"null": None, "text": "\u2028"}}
        await proxy.chat(odd=odd, seed=None, stop=None)
        body = proxy.backend.calls["prompts"][0]
        assert body["odd"] == odd
        assert not {"seed", "stop"} & set(body)


@on_loop
async def test_json_response_is_complete(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        response = await proxy.chat()
        answer = await response.json()
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Paris.", "refusal": None}
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 6
        assert response.headers["X-Warmline-Cache"] == "cold 0"
        assert len(response.headers["X-Warmline-Request"]) == 24


@pytest.mark.parametrize("include_usage", [True, False])
@on_loop
async def test_stream_has_usage_only_when_asked(tmp_path: Path, include_usage: bool) -> None:
    async with run_proxy(tmp_path) as proxy:
        options = {"stream_options": {"include_usage": True}} if include_usage else {}
        body = await (await proxy.chat(stream=True, **options)).read()
        usages = [each["usage"] for each in parse_events(body) if each.get("usage")]
        assert [usage["completion_tokens"] for usage in usages] == [6] * include_usage
        assert all(("usage" in each) == include_usage for each in parse_events(body))
        assert body.endswith(b"data: [DONE]\n\n")
        assert b": prefill 0/" in body
        assert b"event: warmline" not in body


@on_loop
async def test_special_bytes_arrive_unchanged(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        text = 'line\u2028sep\u0085next "model": "x" data: [DONE]\r\n\n\\ \U0001f600'
        stream = make_stream(make_chunk(CHAT, text), make_chunk(CHAT, "", "stop"), make_usage_chunk(1, 1, 0))
        proxy.backend.raw = [bytes([byte]) for byte in stream] + [b"data: [DONE]\n\n"]
        answer = await (await proxy.chat()).json()
        assert answer["choices"][0]["message"]["content"] == text
        streamed = parse_events(await (await proxy.chat(stream=True)).read())
        assert streamed[0]["choices"][0]["delta"]["content"] == text
        assert streamed[0]["model"] == "any"


@on_loop
async def test_multi_line_data_is_one_event(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        lines = json.dumps(make_chunk(CHAT, "hi", "stop"), indent=1).encode().split(b"\n")
        event = b"".join(b"data: " + line + b"\n" for line in lines) + b"\n"
        proxy.backend.raw = [event[:40], event[40:], b"data: [DONE]\n\n"]
        streamed = parse_events(await (await proxy.chat(stream=True)).read())
        assert [each["choices"][0]["delta"] for each in streamed] == [{"content": "hi"}]


ERROR = {"error": {"message": "out of memory", "type": "server_error", "param": None, "code": None}}


@pytest.mark.parametrize("stream", [True, False])
@on_loop
async def test_error_before_content_is_http_status(tmp_path: Path, stream: bool) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.raw = [make_stream(ERROR)]
        response = await proxy.chat(stream=stream)
        assert response.status == 500
        assert await response.json() == ERROR
        assert response.headers["X-Warmline-Request"]


@on_loop
async def test_error_after_content_is_event_without_done(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.raw = [make_stream(make_chunk(CHAT, "Par"), ERROR)]
        response = await proxy.chat(stream=True)
        body = await response.read()
        assert response.status == 200
        assert parse_events(body)[-1] == ERROR
        assert b"[DONE]" not in body
        assert (await proxy.chat(stream=False)).status == 500


@on_loop
async def test_truncated_backend_stream_is_error(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        proxy.backend.raw = [make_stream(make_chunk(CHAT, "Par"))]
        body = await (await proxy.chat(stream=True)).read()
        assert "error" in parse_events(body)[-1] and b"[DONE]" not in body
        answer = await proxy.chat()
        assert answer.status == 502
        assert (await answer.json())["error"]["code"] == "backend_failed"


@on_loop
async def test_completions_are_aggregated(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as proxy:
        body = {"model": "m", "prompt": "The capital"}
        async with proxy.client.post(f"{proxy.url}/v1/completions", json=body) as response:
            answer = await response.json()
        assert (answer["choices"][0]["text"], answer["object"]) == ("Paris.", "text_completion")
