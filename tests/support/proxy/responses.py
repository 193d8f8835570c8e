"""Requests and answers of OpenAI's Responses: items, tools, the backend's chunks, events."""

import json
from typing import Any

import aiohttp

from warmline_common.protocol.sse import SseParser

RESPONSES_PATH = "/v1/responses"
LOOK = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "text"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [{**LOOK, "name": "spawn"}]}
USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


def make_message(role: str, text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def make_call(name: str, arguments: str = "{}", call_id: str = "call_1", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": arguments, "call_id": call_id, **fields}


def make_result(value: object, call_id: str = "call_1") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": value}


def make_thinking(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}], **fields}


def make_delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def make_chunks(*parts: dict[str, Any], finish: str = "stop", stop_reason: str | None = None) -> list[dict[str, Any]]:
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": finish, "stop_reason": stop_reason}]}
    return [make_delta(role="assistant", content=""), *parts, end, {"choices": [], "usage": USAGE}]


async def read_events(response: aiohttp.ClientResponse) -> list[Any]:
    return [json.loads(event.data) for event in SseParser().feed(await response.read()) if event.data]
