"""Prompts, layouts and stream chunks of the fake backend's model."""

import struct
from typing import Any

from warmline_common.measurement.recent_durations import WorkDuration
from warmline_common.protocol.messages import FirstLogits, KvLayout, Timings
from warmline_common.protocol.tokens import pack_tokens

SERVED = "fake-model"


def render_prompt(body: dict[str, Any]) -> tuple[bytes, list[int]]:
    """Render a body; (prompt text, ends of its messages)."""
    if isinstance(body.get("prompt"), list):
        return bytes(body["prompt"]), []
    text, ends = b"", []
    for message in body.get("messages", ()):
        text += f"<{message['role']}>{message.get('content') or ''}\n".encode()
        ends.append(len(text))
    return (text + b"<assistant>", ends) if "messages" in body else (body["prompt"].encode(), [])


def pack_text(text: bytes) -> bytes:
    """Pack the tokens of a text, one per byte."""
    return pack_tokens(list(text))


def make_layout(**changes: Any) -> KvLayout:
    facts: dict[str, Any] = {
        "row_bytes": 100,
        "state_bytes": 0,
        "has_rows": True,
        "has_states": False,
        "has_windows": False,
        "persistent": True,
        "families": ["KVCache"],
    }
    return KvLayout(**facts | changes)


def make_first_logits(logprob: float) -> FirstLogits:
    """Make the first logits of a model with one token."""
    return FirstLogits(digest=str(logprob), ids=pack_tokens([0]), logprobs=struct.pack("<f", logprob))


def make_chunk(body: dict[str, Any], text: str, finish: str | None = None) -> dict[str, Any]:
    head = {"id": "c-1", "created": 1, "model": SERVED, "usage": None}
    if "messages" in body:
        choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
        return {**head, "object": "chat.completion.chunk", "choices": [choice]}
    return {**head, "object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def make_usage_chunk(prompt: int, generated: int, cached: int) -> dict[str, Any]:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    head = {"id": "c-1", "created": 1, "model": SERVED, "object": "chat.completion.chunk"}
    return {**head, "choices": [], "usage": usage}


def make_chunk_durations(tokens_per_s: float) -> list[WorkDuration]:
    """Make durations of chunks at one speed for all sizes, each often enough to be usual."""
    sizes = ((16, 8), (512, 256), (512, 8_000))
    return 3 * [WorkDuration(amount=each, context=context, seconds=each / tokens_per_s) for each, context in sizes]


def make_timings(prefilled: int, decoded: int, tokens_per_s: float) -> Timings:
    chunks = make_chunk_durations(tokens_per_s)
    return Timings(prefill_s=0.1, decode_s=0.1, prefilled=prefilled, decoded=decoded, chunks=chunks)
