"""Recorded requests of agents and SDKs: tests/fixtures/requests, with other texts than the recorded ones.

A file has a client's path and headers, the fields that all its requests share (`body`), and its `turns`: the fields
that each adds, and the expected answer.  ``CALL_ID`` stands for the id of the model's previous tool call.
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
GENERATION_PROMPT = 3  # tokens: whose turn it is, where the model's begins


@dataclass
class RecordedAnswer:
    """Content of an answer, independent of the API."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0


def read_client(client: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / f"{client}.json").read_text())
    return read


def send_turn(
    pair: Pair, client: dict[str, Any], turn: dict[str, Any], call_id: str = "", **fields: object
) -> RecordedAnswer:
    """Send a recorded turn, with some fields of its body replaced."""
    body = json.dumps({**client["body"], **turn["body"], **fields}).replace("CALL_ID", call_id)
    reply = pair.post(client["path"], body.encode(), **client["headers"])
    assert reply.status == 200, reply.raw
    read = {"/v1/messages": parse_messages, "/v1/responses": parse_responses, "/v1/chat/completions": parse_chat}
    return read[client["path"].partition("?")[0]](parse_events(reply))


def parse_events(reply: Reply) -> list[Any]:
    """Parse the events of a stream, or the one JSON answer."""
    if "event-stream" not in reply.headers["Content-Type"]:
        return [reply.json]
    return [json.loads(event.data) for event in SseParser().feed(reply.raw) if event.data.startswith(b"{")]


def parse_chat(chunks: list[Any]) -> RecordedAnswer:
    answer = RecordedAnswer()
    for chunk in chunks:
        for choice in chunk["choices"]:
            message = choice.get("message") or choice["delta"]
            answer.text += message.get("content") or ""
            answer.reasoning += message.get("reasoning_content") or ""
            for call in message.get("tool_calls") or ():
                answer.calls.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
                answer.call_ids.append(call["id"])
        if usage := chunk.get("usage"):
            answer.prompt_tokens, answer.answer_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return answer


def parse_messages(events: list[Any]) -> RecordedAnswer:
    answer, arguments = RecordedAnswer(), ""
    for event in events:
        delta, block = event.get("delta", {}), event.get("content_block", {})
        answer.text += delta.get("text", "")
        answer.reasoning += delta.get("thinking", "")
        arguments += delta.get("partial_json", "")
        if block.get("type") == "tool_use":
            answer.call_ids.append(block["id"])
            answer.calls.append((block["name"], {}))
        if event["type"] == "content_block_stop" and arguments:
            answer.calls[-1], arguments = (answer.calls[-1][0], json.loads(arguments)), ""
        usage = event.get("usage") or event.get("message", {}).get("usage") or {}
        answer.answer_tokens = usage.get("output_tokens", answer.answer_tokens)
        if "input_tokens" in usage:
            answer.cached_tokens = usage.get("cache_read_input_tokens") or 0
            answer.prompt_tokens = usage["input_tokens"] + answer.cached_tokens
    return answer


def parse_responses(events: list[Any]) -> RecordedAnswer:
    response = events[-1].get("response", events[-1])  # the last event has it; without a stream it is all
    answer = RecordedAnswer()
    for item in response["output"]:
        if item["type"] == "function_call":
            answer.calls.append((item["name"], json.loads(item["arguments"])))
            answer.call_ids.append(item["call_id"])
        if item["type"] == "reasoning":
            answer.reasoning += "".join(part["text"] for part in [*item["summary"], *item.get("content", [])])
        if item["type"] == "message":
            answer.text += "".join(part["text"] for part in item["content"])
    usage = response["usage"]
    answer.prompt_tokens, answer.answer_tokens = usage["input_tokens"], usage["output_tokens"]
    answer.cached_tokens = usage["input_tokens_details"]["cached_tokens"]
    return answer


def count_reusable(answers: list[RecordedAnswer], goes_on_from: str) -> int:
    """Count the tokens that the next turn may reuse, by its relation to the last one.

    - "answer": all that was said comes back and is shown: to the last token said, which has no row yet.
    - "request": the template leaves out the last reasoning: to the end of what was answered with it.
    - "first request": the user has spoken again, and the template leaves out all reasoning since the request before.
    """
    if goes_on_from == "answer":
        return answers[-1].prompt_tokens + answers[-1].answer_tokens - 1
    return (answers[-1] if goes_on_from == "request" else answers[0]).prompt_tokens - GENERATION_PROMPT
