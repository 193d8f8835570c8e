"""OpenAI's options besides one plain answer, through its own SDK: choices, prompts, echo, logprobs, models."""

import re
from collections import defaultdict
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from support import tiny_models
from support.pair.pair import Message, Pair
from warmline_common.protocol.messages import PromptReply, PromptRequest, decode, encode
from warmline_common.protocol.tokens import unpack_tokens

NO_REASONING = {str(256 + tiny_models.SPECIAL_TOKENS.index("<think>")): -100}
STORY = "Tell me a story about a fox and a hen that lived beside a river, long ago, and never met before winter. "


def make_messages(text: str) -> list[Message]:
    return [{"role": "user", "content": text + STORY}]


@pytest.fixture(scope="module")
def client(warm_pair: Pair) -> OpenAI:
    return OpenAI(base_url=f"{warm_pair.url}/v1", api_key="x", max_retries=0)


def collect_stream(chunks: Any) -> tuple[dict[int, str], dict[int, str], list[Any]]:
    """Collect texts and finish reasons by index, and the chunks without choices."""
    texts: dict[int, str] = defaultdict(str)
    finishes, rest, roles = {}, [], list[int]()
    for chunk in chunks:
        if not chunk.choices:
            rest.append(chunk)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
            roles += [choice.index] if choice.delta.role else []
    assert sorted(roles) == sorted(texts), "one role chunk each"
    return dict(texts), finishes, rest


def test_choices_equal_their_seeds_alone(client: OpenAI, warm_pair: Pair) -> None:
    request: dict[str, Any] = {
        "model": "several",
        "messages": make_messages("choices"),
        "max_tokens": 6,
        "temperature": 1.0,
    }
    whole = client.chat.completions.create(**request, n=3, seed=40)
    lines = warm_pair.perf_lines("several", 3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    alone = [client.chat.completions.create(**request, seed=40 + number) for number in range(3)]
    assert texts == [each.choices[0].message.content for each in alone] and len(set(texts)) == 3
    assert whole.usage and alone[0].usage and whole.usage.completion_tokens == 18
    assert whole.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 18
    options = {"include_usage": True}
    stream_texts, finishes, (last,) = collect_stream(
        client.chat.completions.create(**request, n=3, seed=40, stream=True, stream_options=options)
    )
    assert [stream_texts[index] for index in range(3)] == texts and set(finishes.values()) == {"length"}
    assert last.usage.completion_tokens == 18 and last.usage.prompt_tokens == whole.usage.prompt_tokens
    ids = sorted(line.split("request=")[1].split()[0] for line in lines)
    assert ids == [f"{whole.id.removeprefix('chatcmpl-')}.{number}" for number in range(3)]
    prefilled = sum(int(number) for line in lines for number in re.findall(r" prefilled=(\d+)", line))
    assert prefilled < 1.5 * whole.usage.prompt_tokens, "they share a prefill"


def test_completions_with_prompts_and_choices(client: OpenAI) -> None:
    request: dict[str, Any] = {"model": "m", "max_tokens": 5}
    prompts = ["A fox said", "A hen said", "Nobody said"]
    alone = [client.completions.create(**request, prompt=prompt) for prompt in prompts]
    whole = client.completions.create(**request, prompt=prompts, n=2)
    texts = [choice.text for choice in whole.choices]
    assert texts == [each.choices[0].text for each in alone for _ in range(2)]
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert whole.usage and whole.usage.completion_tokens == 30
    assert whole.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone if each.usage)
    stream_texts: dict[int, str] = defaultdict(str)
    for chunk in client.completions.create(**request, prompt=[list(b"A fox said"), list(b"A hen said")], stream=True):
        for choice in chunk.choices:
            stream_texts[choice.index] += choice.text
    ids = client.completions.create(**request, prompt=[list(b"A fox said"), list(b"A hen said")])
    assert [stream_texts[0], stream_texts[1]] == [choice.text for choice in ids.choices]


def encode_ids(pair: Pair, text: str) -> list[int]:
    request = PromptRequest(request_id="ids", endpoint="completion", body={"prompt": text})
    reply = pair.as_owner("POST", pair.backend_url + "/kv/prompts", encode(request))
    return unpack_tokens(decode(reply.raw, PromptReply).tokens)


def test_echo_returns_prompt_first(client: OpenAI, warm_pair: Pair) -> None:
    request: dict[str, Any] = {"model": "m", "prompt": "Once  upon a “time”", "max_tokens": 5}
    plain = client.completions.create(**request).choices[0].text
    echoing = client.completions.create(**request, echo=True)
    assert echoing.choices[0].text == request["prompt"] + plain
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**request, echo=True, stream=True)) == (
        request["prompt"] + plain
    )
    both = client.completions.create(
        **{**request, "prompt": ["one", encode_ids(warm_pair, "two")], "max_tokens": 0}, echo=True, n=2
    )
    assert [choice.text for choice in both.choices] == ["one", "one", "two", "two"]
    assert {choice.finish_reason for choice in both.choices} == {"length"}
    assert both.usage and both.usage.completion_tokens == 0
    again = client.completions.create(**request)
    assert again.choices[0].text == plain


def test_logprobs_have_openai_shape(client: OpenAI) -> None:
    ascii_only = {"allowed_token_ids": list(range(94))}  # else some tokens are parts of characters
    request: dict[str, Any] = {"model": "m", "messages": make_messages("logprobs"), "max_tokens": 4}
    request["extra_body"] = ascii_only
    chat = client.chat.completions.create(**request, logprobs=True, top_logprobs=2)
    logprobs = chat.choices[0].logprobs
    assert logprobs and logprobs.refusal is None and len(logprobs.content or ()) == 4
    for entry in logprobs.content or ():
        assert entry.bytes is not None and bytes(entry.bytes).decode(errors="replace") == entry.token
        assert len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob == entry.logprob <= 0
    assert b"".join(bytes(entry.bytes or ()) for entry in logprobs.content or ()).decode(errors="replace") == (
        chat.choices[0].message.content
    )
    completion = client.completions.create(
        model="m", prompt="Once upon", max_tokens=4, logprobs=2, extra_body=ascii_only
    )
    legacy = completion.choices[0].logprobs
    assert legacy and len(legacy.tokens or ()) == len(legacy.token_logprobs or ()) == 4
    assert all(len(top) == 2 for top in legacy.top_logprobs or ()) and (legacy.text_offset or [None])[0] == 0
    two = client.chat.completions.create(**request, logprobs=True, n=2)
    assert [len(choice.logprobs.content or ()) for choice in two.choices if choice.logprobs] == [4, 4]


def test_answer_cut_within_a_character_continues_warm(client: OpenAI, warm_pair: Pair) -> None:
    text, messages = "日é😀", make_messages("cut")
    form: dict[str, Any] = {"structured_outputs": {"choice": [text]}, "logit_bias": NO_REASONING}
    for limit, expected in ((2, ""), (3, "日"), (4, "日"), (8, "日é"), (9, "日é😀")):
        options = {**form, "max_tokens": limit, "session_id": f"cut-{limit}"}
        reply = warm_pair.chat(messages, **options)
        assert reply.text == expected, limit
        chunks = client.chat.completions.create(model="m", messages=messages, stream=True, extra_body=options)
        assert collect_stream(chunks)[0] == {0: expected}
        following = [*messages, {"role": "assistant", "content": expected}, {"role": "user", "content": "And?"}]
        warm, cold = (ask(following, max_tokens=6) for ask in (warm_pair.chat, warm_pair.ask_backend))
        assert warm.text == cold.text and warm.cached >= reply.prompt_tokens - 1


def test_any_model_name_is_served(client: OpenAI, warm_pair: Pair) -> None:
    (listed,) = client.models.list().data
    served = warm_pair.status()
    assert listed.id == served.model and listed.owned_by == "warmline" and listed.created > 1_600_000_000
    extra = listed.model_extra or {}
    assert extra == {"root": served.model, "max_model_len": served.context_tokens_max}
    other = client.models.retrieve("openai/glm-5.2")
    assert other.id == "openai/glm-5.2" and (other.model_extra or {})["root"] == served.model


def test_probes_and_unknown_paths(client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as refused:
        client.embeddings.create(model="m", input="x")
    assert "/v1/chat/completions" in refused.value.message


IGNORED: dict[str, Any] = {
    "user": "me",
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "store": True,
    "modalities": ["text"],
    "prediction": {"type": "content", "content": "x"},
    "stream_options": None,
    "extra_body": {
        "prompt_cache_retention": "24h",
        "safety_identifier": "s",
        "verbosity": "low",
        "function_call": "none",
        "n": None,
    },
}


def test_fields_without_effect_are_accepted(client: OpenAI) -> None:
    request: dict[str, Any] = {"model": "m", "messages": make_messages("ignored"), "max_tokens": 4}
    plain, other = client.chat.completions.create(**request), client.chat.completions.create(**request, **IGNORED)
    assert other.choices[0].message.content == plain.choices[0].message.content


def test_request_without_reuse_is_cold(client: OpenAI, warm_pair: Pair) -> None:
    request: dict[str, Any] = {"model": "m", "messages": make_messages("cold"), "max_tokens": 4}
    first = client.chat.completions.create(**request)
    cold = client.chat.completions.with_raw_response.create(**request, extra_body={"cache_prompt": False})
    assert cold.headers["X-Warmline-Cache"] == "cold 0"
    assert cold.parse().choices[0].message.content == first.choices[0].message.content
    warm = client.chat.completions.with_raw_response.create(**request)
    assert warm.headers["X-Warmline-Cache"].startswith("resident ")


def test_context_overflow_is_one_error_for_all_choices(client: OpenAI, warm_pair: Pair) -> None:
    messages = [{"role": "user", "content": "x" * (warm_pair.status().context_tokens_max + 1)}]
    with pytest.raises(BadRequestError, match="maximum context length") as refused:
        client.chat.completions.create(model="m", messages=messages, n=2)  # type: ignore[arg-type]
    assert refused.value.code == "context_length_exceeded"
