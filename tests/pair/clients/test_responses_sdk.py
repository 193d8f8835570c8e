"""OpenAI's Responses through its own SDK, before the pair."""

from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from support.pair.pair import Pair
from support.tiny_models import SPECIAL_TOKENS

LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]},
}
THINK_TOKEN = str(256 + SPECIAL_TOKENS.index("<think>"))


class Location(BaseModel):
    capital: bool


@pytest.fixture(scope="module")
def client(warm_pair: Pair) -> OpenAI:
    return OpenAI(base_url=f"{warm_pair.url}/v1", api_key="x", max_retries=0)


def make_input(text: str, **options: Any) -> dict[str, Any]:
    user = {"role": "user", "content": text}
    return {"model": "gpt-5", "instructions": "Be brief.", "input": [user], "max_output_tokens": 12, **options}


def get_cached_tokens(response: Any) -> int:
    return int(response.usage.input_tokens_details.cached_tokens)


def remove_variable_fields(response: Any) -> dict[str, Any]:
    """Remove what differs between two answers: ids, times, and reused tokens."""
    fields: dict[str, Any] = response.model_dump()
    for name in ("id", "created_at", "completed_at"):
        fields.pop(name)
    fields["usage"].pop("input_tokens_details")
    for item in fields["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return fields


def stream_response(client: OpenAI, **request: Any) -> Any:
    """Stream a response; the last event's response.  The SDK raises where events don't fit together."""
    with client.responses.stream(**request) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events[-1].response  # type: ignore[union-attr]


def test_responses_streamed_equals_whole(client: OpenAI) -> None:
    request = make_input("responses, twice", metadata={"a": "b"}, temperature=0.0)
    whole, stream = client.responses.create(**request), stream_response(client, **request)
    assert remove_variable_fields(whole) == remove_variable_fields(stream) and whole.output_text
    assert (whole.model, whole.status, whole.usage and whole.usage.output_tokens) == ("gpt-5", "incomplete", 12)
    assert whole.instructions == "Be brief." and whole.metadata == {"a": "b"}
    assert whole.usage and get_cached_tokens(stream) == whole.usage.input_tokens - 1


def test_next_turn_is_warm(client: OpenAI) -> None:
    request = make_input("responses, turns")
    first = client.responses.create(**request)
    later = [*request["input"], *first.output, {"role": "user", "content": "And now?"}]
    second = client.responses.create(**{**request, "input": later})
    assert first.usage and get_cached_tokens(second) >= first.usage.total_tokens - 1


def test_chat_and_responses_share_cache(client: OpenAI) -> None:
    request = make_input("responses and chat", tools=[LOOK], tool_choice="auto")
    first = client.responses.create(**request)
    look = {"type": "function", "function": {name: LOOK[name] for name in ("name", "description", "parameters")}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "responses and chat"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And now?"},
    ]
    second = client.chat.completions.create(model="m", messages=messages, tools=[look], max_tokens=4)  # type: ignore[list-item]
    details = second.usage and second.usage.prompt_tokens_details
    assert first.usage and details and (details.cached_tokens or 0) >= first.usage.total_tokens - 1


def test_conversation_with_calls_and_reasoning_is_accepted(client: OpenAI, warm_pair: Pair) -> None:
    items: list[Any] = [
        {"role": "user", "content": "responses, calls"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"where": "here"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "a cat"},
    ]
    function = {"name": "look", "arguments": '{"where": "here"}'}
    messages = [
        {"role": "user", "content": "responses, calls"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "a cat"},
    ]
    assert warm_pair.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2}).status == 200
    answer = client.responses.create(model="m", input=items, max_output_tokens=2)
    assert answer.usage and get_cached_tokens(answer) == answer.usage.input_tokens - 1


def test_structured_output_is_parsed(client: OpenAI) -> None:
    no_thought = {"logit_bias": {THINK_TOKEN: -100}}  # the tiny model would think without end
    request = make_input("responses, parsed", text_format=Location, max_output_tokens=64, extra_body=no_thought)
    parsed = client.responses.parse(**request)
    assert isinstance(parsed.output_parsed, Location) and parsed.status == "completed"
    assert stream_response(client, **request).output_parsed == parsed.output_parsed


def test_input_tokens_count_equals_request(client: OpenAI) -> None:
    request = make_input("responses, counted")
    counted = client.responses.input_tokens.count(
        **{name: request[name] for name in ("model", "instructions", "input")}
    )
    answer = client.responses.create(**request)
    assert answer.usage and counted.input_tokens == answer.usage.input_tokens


def test_turn_by_reference_starts_as_one_sent_whole(client: OpenAI) -> None:
    request = make_input("responses, by reference")
    first = client.responses.create(**request)
    question: Any = {"role": "user", "content": "And now?"}
    options: dict[str, Any] = {**request, "max_output_tokens": 2}
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    by_id = client.responses.create(**{**options, "input": [question]}, previous_response_id=first.id)
    assert first.usage and get_cached_tokens(by_id) >= first.usage.total_tokens - 1
    for items in (references, first.output):
        other = client.responses.create(**{**options, "input": [*request["input"], *items, question]})
        assert other.usage and by_id.usage and other.usage.input_tokens == by_id.usage.input_tokens
        assert get_cached_tokens(other) == other.usage.input_tokens - 1, "the same prompt"


def test_stored_response_is_retrieved_listed_and_deleted(client: OpenAI) -> None:
    first = client.responses.create(**make_input("responses, stored"))
    second = client.responses.create(**make_input("responses, next"), previous_response_id=first.id)
    assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
    items = list(client.responses.input_items.list(second.id, limit=1, order="asc"))  # over several pages
    assert [item.type for item in items] == ["message", *(item.type for item in first.output), "message"]
    assert [item.id for item in items[1:-1]] == [item.id for item in first.output]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(first.id)
    assert client.responses.retrieve(second.id).previous_response_id == first.id


def test_unknown_responses_are_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="store: false") as refused:
        client.responses.create(model="m", input="Hi.", previous_response_id="resp_1")
    assert refused.value.code == "previous_response_not_found" and refused.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.create(model="m", input="Hi.", background=True)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not stored"):
            ask("resp_1")


def test_backend_refusal_is_returned(client: OpenAI, warm_pair: Pair) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.responses.create(**make_input("responses, refused", temperature=-1.0))
    with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
        client.responses.create(model="m", input="x" * (warm_pair.status().context_tokens_max + 1))
    assert refused.value.code == "context_length_exceeded"
