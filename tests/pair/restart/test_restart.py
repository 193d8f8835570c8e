"""Restart after kill -9 of all processes: a conversation's next turn prefills nothing twice."""

from pathlib import Path
from typing import Any

import pytest

from support.pair.answers import (
    QUANTIZED_APART_FLAGS,
    TOLERANCE,
    TOLERANCE_QUANTIZED_APART,
    WITH_LOGPROBS,
    explain_difference,
)
from support.pair.pair import FolderOf, Message, Pair, Reply
from warmline_common.protocol.tokens import TOKEN_BYTES, count_common_tokens
from warmline_common.storage.home import Home

STORED_INPUT = "Which animals live in the sea, and which of them are fish?"
QUESTIONS = ["Hello, who are you?", "Tell me about the sea.", "And about ships?", "Thanks. And the moon?"]


def hold_conversation(pair: Pair, turns: int, **options: object) -> tuple[list[Message], Reply]:
    messages: list[Message] = [{"role": "system", "content": "You answer shortly."}]
    for question in QUESTIONS[:turns]:
        messages.append({"role": "user", "content": question})
        reply = pair.chat(messages, **options)
        messages.append({"role": "assistant", "content": reply.text})
    return messages, reply


def check_restart(pair: Pair, tolerance: float, tokens: int, stored_input: str = STORED_INPUT) -> None:
    """Compare with the backend's own computation, asked directly.

    `stored_input` is so long that restoring it takes less time than computing it.
    """
    answer = {"max_tokens": tokens, **WITH_LOGPROBS}
    with pair:
        messages, _ = hold_conversation(pair, 3, **answer)
        pair.settle()
        held = pair.longest_resident()
        stored = pair.post("/v1/responses", {"input": stored_input, "max_output_tokens": 8}).json
        pair.settle()
        turn_end = pair.render_prompt(messages[:-1]).turn_end
        pair.kill()
    messages.append({"role": "user", "content": QUESTIONS[3]})
    with pair:
        prompt = pair.render_prompt(messages).tokens
        warm = pair.chat(messages, **answer)
        cold = pair.ask_backend(messages, **answer)
        check_stored_response(pair, stored, stored_input)
        pair.settle()
        assert warm.headers["X-Warmline-Cache"] == f"restored {warm.cached}"
    repeated = min(count_common_tokens(held, prompt), len(prompt) // TOKEN_BYTES - 1)
    assert repeated > turn_end, "the next turn repeats what was generated"
    if repeated == len(held) // TOKEN_BYTES or not has_states(pair):
        assert warm.cached == repeated, "every token whose KV the last turn computed, the generated ones too"
    else:
        assert turn_end <= warm.cached <= repeated
    assert cold.cached == 0
    assert explain_difference(cold, warm, tolerance) == ""


def check_stored_response(pair: Pair, stored: Any, stored_input: str) -> None:
    """Check that a turn by reference has the prompt of one sent whole, and starts as warm."""
    question = {"role": "user", "content": QUESTIONS[1]}
    whole = [{"role": "user", "content": stored_input}, *stored["output"], question]
    bodies = [{"previous_response_id": stored["id"], "input": [question]}, {"input": whole}]
    first, second = (pair.post("/v1/responses", {**body, "max_output_tokens": 2}) for body in bodies)
    assert first.headers["X-Warmline-Cache"].startswith("restored ")
    assert first.json["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert first.json["usage"]["input_tokens"] == second.json["usage"]["input_tokens"]


def has_states(pair: Pair) -> bool:
    return "qwen3_5" in str(pair._model)


# The demo model is a llama.
@pytest.mark.parametrize("family", ["qwen3_5", "gemma3", "glm_moe_dsa", "quantized_apart"])
def test_next_turn_after_kill_9_is_warm(family: str, tiny_folder: FolderOf, tmp_path: Path) -> None:
    is_quantized = family == "quantized_apart"
    pair = Pair(
        tmp_path,
        tiny_folder("llama_wide" if is_quantized else family),
        *(QUANTIZED_APART_FLAGS if is_quantized else ()),
    )
    tolerance = TOLERANCE_QUANTIZED_APART if is_quantized else TOLERANCE
    check_restart(pair, tolerance, tokens=40, stored_input=STORED_INPUT * 50)


def test_next_turn_after_kill_9_on_real_model(demo_home: Home, tmp_path: Path) -> None:
    from warmline_backend import demo

    model = demo.prepare_demo_model(demo_home, "float32")
    check_restart(Pair(tmp_path, model), 5e-3, tokens=8)
