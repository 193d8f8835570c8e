"""The OpenAI SDK and LiteLLM, pointed at the pair with any model name."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from support.pair.pair import Message, Pair

TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}


def make_messages(text: str) -> list[Message]:
    return [{"role": "system", "content": "You are brief."}, {"role": "user", "content": text}]


@pytest.fixture(scope="module")
def client(warm_pair: Pair) -> OpenAI:
    return OpenAI(base_url=f"{warm_pair.url}/v1", api_key="x", max_retries=0)


def join_stream_text(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def find_progress(chunks: list[Any]) -> list[dict[str, int]]:
    return [chunk.prompt_progress for chunk in chunks if "prompt_progress" in chunk.model_extra]


@pytest.mark.parametrize("model", ["openai/glm-5.2", "gpt-4o", 'ünïcode "quoted" \\ name'])
def test_chat_streamed_and_not(client: OpenAI, model: str) -> None:
    request: dict[str, Any] = {"model": model, "messages": make_messages(f"chat {model}"), "max_tokens": 12}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert whole.model == model and {chunk.model for chunk in chunks} == {model}
    assert whole.choices[0].message.content == join_stream_text(chunks) != ""
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].choices[0].delta.role == "assistant"
    assert whole.usage and whole.usage.completion_tokens == 12


def test_stream_usage_on_request(client: OpenAI) -> None:
    request: dict[str, Any] = {"model": "m", "messages": make_messages("usage"), "max_tokens": 5, "stream": True}
    plain = list(client.chat.completions.create(**request))
    assert all("usage" not in chunk.model_fields_set and chunk.choices for chunk in plain)
    options: dict[str, Any] = {"stream_options": {"include_usage": True}, "extra_body": {"return_progress": True}}
    chunks = list(client.chat.completions.create(**request, **options))
    assert chunks[-1].choices == [] and chunks[-1].model == "m" and len({chunk.id for chunk in chunks}) == 1
    first, last = (find_progress(chunks)[place] for place in (0, -1))
    assert (
        first["cache"] == first["processed"] == last["cache"] == last["total"] - 1
        and last["processed"] == last["total"]
    )
    usage = chunks[-1].usage
    assert usage and usage.completion_tokens == 5 and usage.prompt_tokens_details
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_completions_streamed_and_not(client: OpenAI) -> None:
    request: dict[str, Any] = {"model": "davinci", "prompt": "Once upon a time", "max_tokens": 12}
    whole = client.completions.create(**request)
    chunks = list(client.completions.create(**request, stream=True))
    assert whole.object == "text_completion" and {whole.model, *(chunk.model for chunk in chunks)} == {"davinci"}
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks) != ""
    ids = client.completions.create(**{**request, "prompt": list(b"Once upon a time")})
    assert ids.choices[0].text != ""


def test_response_headers_report_reuse(client: OpenAI) -> None:
    request: dict[str, Any] = {"model": "m", "messages": make_messages("headers"), "max_tokens": 5}
    cold = client.chat.completions.with_raw_response.create(**request)
    source, reused = cold.headers["X-Warmline-Cache"].split()
    assert (source, int(reused)) in {("cold", 0), ("resident", get_cached_tokens(cold.parse()))}
    warm = client.chat.completions.with_raw_response.create(**request)
    assert warm.headers["X-Warmline-Cache"] == f"resident {get_cached_tokens(warm.parse())}"
    assert get_cached_tokens(warm.parse()) == warm.parse().usage.prompt_tokens - 1  # type: ignore[union-attr]
    assert warm.headers["X-Warmline-Request"] not in ("", cold.headers["X-Warmline-Request"])
    with client.chat.completions.with_streaming_response.create(**request, stream=True) as response:
        assert response.headers["X-Warmline-Cache"].startswith("resident ")


def get_cached_tokens(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def test_models_are_listed(client: OpenAI, warm_pair: Pair) -> None:
    (model,) = client.models.list().data
    assert model.id == warm_pair.status().model
    assert client.models.retrieve(model.id).id == model.id


def test_seeds_and_stop_strings(client: OpenAI) -> None:
    request: dict[str, Any] = {"model": "m", "messages": make_messages("seeds"), "max_tokens": 24}

    def text(**options: Any) -> str:
        return client.chat.completions.create(**request, **options).choices[0].message.content or ""

    one, again, other = (text(temperature=1.0, seed=seed) for seed in (7, 7, 8))
    assert one == again != other
    greedy = text()
    word = greedy[10:13]
    stopped = client.chat.completions.create(**request, stop=["never said", word])
    assert stopped.choices[0].message.content == greedy[: greedy.index(word)]
    assert stopped.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**request, stop=word, stream=True))
    assert join_stream_text(chunks) == greedy[: greedy.index(word)]


def test_unknown_fields_are_accepted(client: OpenAI) -> None:
    extra = {"metadata_of_mine": {"a": [1, None]}, "session_id": "s-1", "top_k": 0, "reasoning": None}
    answer = client.chat.completions.create(
        model="m", messages=make_messages("extra"), max_tokens=4, extra_body=extra, user="me", store=False, n=1
    )  # type: ignore[call-overload]
    assert answer.usage.completion_tokens == 4


def test_prompt_with_tools_is_reused(client: OpenAI) -> None:
    request: dict[str, Any] = {"model": "m", "messages": make_messages("tools"), "max_tokens": 6, "tools": [TOOL]}
    first, second = (client.chat.completions.create(**request, tool_choice="auto") for _ in range(2))
    assert second.usage and get_cached_tokens(second) == second.usage.prompt_tokens - 1
    assert first.choices[0].message.content == second.choices[0].message.content
    turn: list[Any] = [
        *make_messages("tools"),
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And now?"},
    ]
    third = client.chat.completions.create(**{**request, "messages": turn})
    assert (
        second.usage and get_cached_tokens(third) >= second.usage.prompt_tokens + 5
    )  # all but the last token generated


def test_request_without_model_is_served(warm_pair: Pair) -> None:
    body = {"messages": make_messages("no model"), "max_tokens": 3}
    for request in (body, {**body, "model": None}):
        answer = warm_pair.post("/v1/chat/completions", request)
        assert answer.status == 200 and answer.json["model"] == warm_pair.status().model


def test_async_client(warm_pair: Pair) -> None:
    async def ask() -> None:
        async with AsyncOpenAI(base_url=f"{warm_pair.url}/v1/", api_key="x", max_retries=0) as client:
            request: dict[str, Any] = {"model": "a/b", "messages": make_messages("async"), "max_tokens": 12}
            whole, stream = await asyncio.gather(
                client.chat.completions.create(**request), client.chat.completions.create(**request, stream=True)
            )
            chunks = [chunk async for chunk in stream]
            assert whole.choices[0].message.content == join_stream_text(chunks) != ""
            assert {whole.model, *(chunk.model for chunk in chunks)} == {"a/b"}
            assert [model.id async for model in client.models.list()] == [warm_pair.status().model]

    asyncio.run(ask())


def test_litellm(litellm: Any, warm_pair: Pair) -> None:
    request = {
        "model": "openai/glm-5.2",
        "api_base": f"{warm_pair.url}/v1",
        "api_key": "x",
        "messages": make_messages("litellm"),
        "max_tokens": 12,
        "num_retries": 0,
    }
    whole = litellm.completion(**request)
    options = {"stream_options": {"include_usage": True}, "extra_body": {"return_progress": True}}
    chunks = list(litellm.completion(**request, stream=True, **options))
    later = asyncio.run(litellm.acompletion(**request))
    text = whole.choices[0].message.content
    assert text == join_stream_text(chunks) == later.choices[0].message.content != ""
    assert {answer.model for answer in (whole, later, *chunks)} == {"glm-5.2"}  # LiteLLM strips its provider's name
    assert get_cached_tokens(later) == later.usage.prompt_tokens - 1
    assert [get_cached_tokens(chunk) for chunk in chunks if getattr(chunk, "usage", None)] == [get_cached_tokens(later)]


def test_litellm_recognizes_context_overflow(litellm: Any, warm_pair: Pair) -> None:
    messages = make_messages("x" * warm_pair.status().context_tokens_max)
    with pytest.raises(litellm.exceptions.ContextWindowExceededError):
        litellm.completion(
            model="openai/m", api_base=f"{warm_pair.url}/v1", api_key="x", messages=messages, num_retries=0
        )
