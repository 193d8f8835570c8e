"""Requests as agents and SDKs were seen to send them: tests/fixtures/requests, without what was said in them.

A file has a client's path and headers, the fields that all its requests share (`body`), and its `turns`: the fields
that each adds, and what is to be answered.  ``CALL_ID`` stands for the id of the call that the model made before.
Terminal-Bench asks at a temperature of 0.7; here it is 0, for the answers to be the same each time.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.pair.pair import Pair, Reply
from warmline_common.protocol.sse import SseParser

FOLDER = Path(__file__).parents[2] / "fixtures" / "requests"
CLIENTS = sorted(path.stem for path in FOLDER.glob("*.json"))


@dataclass
class Told:
    """Content of an answer, in whatever API it was given."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0


def fixture(client: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / f"{client}.json").read_text())
    return read


def send(pair: Pair, client: dict[str, Any], turn: dict[str, Any], call_id: str) -> Told:
    body = json.dumps({**client["body"], **turn["body"]}).replace("CALL_ID", call_id)
    reply = pair.post(client["path"], body.encode(), **client["headers"])
    assert reply.status == 200, reply.raw
    read = {"/v1/messages": of_messages, "/v1/responses": of_responses, "/v1/chat/completions": of_chat}
    return read[client["path"].partition("?")[0]](answer_of(reply))


def answer_of(reply: Reply) -> list[Any]:
    """The events of a stream, or the one answer."""
    if "event-stream" not in reply.headers["Content-Type"]:
        return [reply.json]
    return [json.loads(event.data) for event in SseParser().feed(reply.raw) if event.data.startswith(b"{")]


def of_chat(chunks: list[Any]) -> Told:
    told = Told()
    for chunk in chunks:
        for choice in chunk["choices"]:
            said = choice.get("message") or choice["delta"]
            told.text += said.get("content") or ""
            told.reasoning += said.get("reasoning_content") or ""
            for call in said.get("tool_calls") or ():
                told.calls.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
                told.call_ids.append(call["id"])
        if usage := chunk.get("usage"):
            told.prompt_tokens, told.answer_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            told.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return told


def of_messages(events: list[Any]) -> Told:
    told, arguments = Told(), ""
    for event in events:
        delta, block = event.get("delta", {}), event.get("content_block", {})
        told.text += delta.get("text", "")
        told.reasoning += delta.get("thinking", "")
        arguments += delta.get("partial_json", "")
        if block.get("type") == "tool_use":
            told.call_ids.append(block["id"])
            told.calls.append((block["name"], {}))
        if event["type"] == "content_block_stop" and arguments:
            told.calls[-1], arguments = (told.calls[-1][0], json.loads(arguments)), ""
        usage = event.get("usage") or event.get("message", {}).get("usage") or {}
        told.answer_tokens = usage.get("output_tokens", told.answer_tokens)
        if "input_tokens" in usage:
            told.cached_tokens = usage.get("cache_read_input_tokens") or 0
            told.prompt_tokens = usage["input_tokens"] + told.cached_tokens
    return told


def of_responses(events: list[Any]) -> Told:
    response, told = events[-1].get("response", events[-1]), Told()  # the last event has it; without a stream it is all
    for item in response["output"]:
        if item["type"] == "function_call":
            told.calls.append((item["name"], json.loads(item["arguments"])))
            told.call_ids.append(item["call_id"])
        if item["type"] == "reasoning":
            told.reasoning += "".join(part["text"] for part in [*item["summary"], *item.get("content", [])])
        if item["type"] == "message":
            told.text += "".join(part["text"] for part in item["content"])
    usage = response["usage"]
    told.prompt_tokens, told.answer_tokens = usage["input_tokens"], usage["output_tokens"]
    told.cached_tokens = usage["input_tokens_details"]["cached_tokens"]
    return told
