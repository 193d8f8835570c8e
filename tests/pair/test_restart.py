"""What was prefilled once is never prefilled again: a conversation, kill -9 of everything, and its next turn."""

from pathlib import Path

import pytest

from conftest import FolderOf
from pair import Message, Pair, Reply
from warmline_wire.home import Home
from warmline_wire.keys import TOKEN_BYTES, common_prefix

# What logits of a warm run may differ by: rows computed while decoding, and in chunks that end elsewhere, round
# differently; quantized rows turn a last bit into a step.
TOLERANCE = {"quantized": 2e-2}
QUANTIZED = ("--kv-bits", "8", "--kv-group-size", "32")
QUESTIONS = ["Hello, who are you?", "Tell me about the sea.", "And about ships?", "Thanks. And the moon?"]


def converse(pair: Pair, turns: int, **options: object) -> tuple[list[Message], Reply]:
    messages: list[Message] = [{"role": "system", "content": "You answer shortly."}]
    for question in QUESTIONS[:turns]:
        messages.append({"role": "user", "content": question})
        reply = pair.chat(messages, **options)
        messages.append({"role": "assistant", "content": reply.text})
    return messages, reply


def explain_difference(cold: Reply, warm: Reply, tolerance: float) -> str:
    """ "" where the greedy answers are equal, or differ first where the two likeliest tokens were nearly tied."""
    mine, theirs = (reply.json["choices"][0]["logprobs"]["content"] for reply in (cold, warm))
    for place, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one["token"] != other["token"]:
            first, second = (entry["logprob"] for entry in one["top_logprobs"])
            if first - second <= tolerance:
                print(f"a near tie: {first - second:.1e} between the two likeliest at token {place}")
                return ""
            return f"token {place}: {one['token']!r} cold, {other['token']!r} warm, {first - second:.1e} apart"
    return "" if len(mine) == len(theirs) else f"{len(mine)} tokens cold, {len(theirs)} warm"


def check_restart(pair: Pair, fresh: Pair, tolerance: float, tokens: int) -> None:
    answer = {"max_tokens": tokens, "logprobs": True, "top_logprobs": 2}
    with pair:
        messages, _ = converse(pair, 3, **answer)
        pair.settle()
        held = pair.longest_resident()
        turn_end = pair.rendered(messages[:-1]).turn_end
        pair.kill()
    messages.append({"role": "user", "content": QUESTIONS[3]})
    with pair:
        prompt = pair.rendered(messages).tokens
        warm = pair.chat(messages, **answer)
        pair.settle()
        assert warm.headers["X-Warmline-Cache"] == f"restored {warm.cached}"
    repeated = min(common_prefix(held, prompt), len(prompt) // TOKEN_BYTES - 1)
    assert repeated > turn_end, "the next turn repeats what was generated"
    if repeated == len(held) // TOKEN_BYTES or not has_states(pair):
        assert warm.cached == repeated, "every token whose KV the last turn computed, the generated ones too"
    else:
        assert turn_end <= warm.cached <= repeated
    with fresh:
        cold = fresh.chat(messages, **answer)
        assert cold.cached == 0
    assert explain_difference(cold, warm, tolerance) == ""


def has_states(pair: Pair) -> bool:
    return "qwen3_5" in str(pair._model)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3", "deepseek_v32", "quantized"])
def test_the_next_turn_after_kill_9(family: str, tiny_folder: FolderOf, tmp_path: Path) -> None:
    model = tiny_folder("llama" if family == "quantized" else family)
    flags = QUANTIZED if family == "quantized" else ()
    pair, fresh = (Pair(tmp_path / name, model, *flags) for name in ("home", "fresh"))
    check_restart(pair, fresh, TOLERANCE.get(family, 1e-3), tokens=40)


def test_the_next_turn_after_kill_9_on_a_real_model(demo_home: Home, tmp_path: Path) -> None:
    from warmline_backend import demo

    model = demo.prepare(demo_home, "float32")
    pair, fresh = (Pair(tmp_path / name, model) for name in ("home", "fresh"))
    check_restart(pair, fresh, 5e-3, tokens=12)
