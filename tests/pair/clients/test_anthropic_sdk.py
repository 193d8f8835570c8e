"""Anthropic's SDK, pointed at the pair with any model name."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message
from pydantic import BaseModel

from support.pair.pair import FolderOf, Pair
from support.pair.waiting import wait_until
from support.tiny_models import SPECIAL_TOKENS

LOOK = {
    "name": "look",
    "description": "Looks out of the window.",
    "input_schema": {"type": "object", "properties": {"at": {"enum": ["sea", "land"]}}, "required": ["at"]},
}
CLOSES_REASONING = {"logit_bias": {str(256 + SPECIAL_TOKENS.index("</think>")): 100}}  # at once, where it may
BRIEF = "You know ships, and you are brief."


@pytest.fixture(scope="module")
def client(warm_pair: Pair) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=warm_pair.url, api_key="x", max_retries=0)


@pytest.fixture(scope="module")
def tool_client(
    tiny_folder: FolderOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[anthropic.Anthropic, Pair]]:
    """Client of a model that reasons and calls tools when forced to."""
    with Pair(tmp_path_factory.mktemp("calling"), tiny_folder("llama", tools=True)) as pair:
        yield anthropic.Anthropic(base_url=pair.url, api_key="x", max_retries=0), pair


def make_messages(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "claude-any", "max_tokens": 12, "messages": [{"role": "user", "content": text}], **fields}


def remove_variable_fields(message: Message) -> dict[str, Any]:
    """Remove ids and numbers of reused tokens."""
    fields: Any = message.to_dict()
    for item in (fields, *fields["content"]):
        item.pop("id", None)
    fields["usage"]["input_tokens"] += fields["usage"].pop("cache_read_input_tokens")
    return dict(fields)


def count_prompt_tokens(message: Message) -> int:
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def join_text(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_messages_streamed_equals_whole(client: anthropic.Anthropic) -> None:
    request = make_messages("Which sails does a ketch have?", system=BRIEF, extra_body={"ignore_eos": True})
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert remove_variable_fields(whole) == remove_variable_fields(streamed)
    assert whole.model == "claude-any" and whole.id.startswith("msg_") and whole.role == "assistant"
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 12
    assert [block.to_dict() for block in whole.content] == [{"type": "text", "text": text}] and text


def test_count_tokens_equals_prompt_tokens(client: anthropic.Anthropic, warm_pair: Pair) -> None:
    request: Any = make_messages("How many masts has a yawl?", system=[{"type": "text", "text": BRIEF}], tools=[LOOK])
    fields = {name: value for name, value in request.items() if name != "max_tokens"}
    counted = client.messages.count_tokens(**fields, extra_headers={"X-Warmline-Request": "a-count"})
    message = client.messages.create(**request)
    assert counted.input_tokens == count_prompt_tokens(message)
    wait_until(lambda: message.id.removeprefix("msg_") in list_request_ids(warm_pair), "the request has no record")
    assert "a-count" not in list_request_ids(warm_pair), "it is no generation"


def list_request_ids(pair: Pair) -> list[str]:
    return [record["id"] for record in pair.requests()]


def test_next_turn_is_warm_and_shared_with_chat(client: anthropic.Anthropic, warm_pair: Pair) -> None:
    """Whatever API a conversation goes on in, and however its client writes the blocks."""
    request = make_messages("Where does a sloop carry its jib?", system=BRIEF)
    first = client.messages.create(**request)
    warm_pair.settle()
    cached = {"cache_control": {"type": "ephemeral"}}
    talk: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": request["messages"][0]["content"], **cached}]},
        {"role": "assistant", "content": [block.to_dict() for block in first.content]},
        {"role": "user", "content": "And a cutter?"},
    ]
    second = client.messages.create(**{**request, "messages": talk}, extra_query={"beta": "true"})
    held = count_prompt_tokens(first) + first.usage.output_tokens - 1  # the last token has no row yet
    assert (second.usage.cache_read_input_tokens or 0) >= held - 1
    warm_pair.settle()
    chat: list[Any] = [
        {"role": "system", "content": BRIEF},
        request["messages"][0],
        {"role": "assistant", "content": join_text(first)},
        {"role": "user", "content": "And a cutter?"},
    ]
    assert warm_pair.chat(chat, max_tokens=1).cached == count_prompt_tokens(second) - 1


def test_thinking_and_tool_results_are_accepted(client: anthropic.Anthropic) -> None:
    """A turn with all that an agent sends back, as text to the model: the same however it is asked again."""
    talk: list[Any] = [
        {"role": "user", "content": "What ship is that?"},
        {"role": "system", "content": "The window is clean."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should look.", "signature": "d2FybWxpbmU="},
                {"type": "tool_use", "id": "toolu_0123456789abcdef01234567", "name": "look", "input": {"at": "sea"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_0123456789abcdef01234567", "content": "a brig"},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    request = make_messages("", system=BRIEF, tools=[LOOK], thinking={"type": "adaptive"}) | {"messages": talk}
    answer = client.messages.create(**request)
    again = client.messages.create(**request)
    assert remove_variable_fields(answer) == remove_variable_fields(again)
    assert again.usage.input_tokens == 1


def test_tool_use_loop(tool_client: tuple[anthropic.Anthropic, Pair]) -> None:
    """The model is made to call; its call comes back as its client writes it, with what the tool says."""
    client, pair = tool_client
    request: Any = make_messages("Which ship? " * 20, max_tokens=90, tools=[LOOK])
    request["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    request["extra_body"] = CLOSES_REASONING
    first = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        assert remove_variable_fields(stream.get_final_message()) == remove_variable_fields(first)
    call = first.content[-1]
    assert first.stop_reason == "tool_use" and call.type == "tool_use"
    assert call.name == "look" and call.input["at"] in ("sea", "land") and call.id.startswith("toolu_")
    pair.settle()
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "a brig"}]}
    request["messages"] += [
        {"role": "assistant", "content": [block.to_dict() for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(**request)
    assert (
        second.stop_reason == "tool_use"
        and (second.usage.cache_read_input_tokens or 0) >= count_prompt_tokens(first) - 20
    )


def test_thinking_is_separate_block(tool_client: tuple[anthropic.Anthropic, Pair]) -> None:
    client, _ = tool_client
    request: Any = make_messages("Think of a ship.", thinking={"type": "enabled", "budget_tokens": 1024})
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        thinking = [event.thinking for event in stream if event.type == "thinking"]
        assert remove_variable_fields(stream.get_final_message()) == remove_variable_fields(whole)
    assert [block.type for block in whole.content] == ["thinking"]  # cut off before it said anything
    assert whole.content[0].to_dict()["thinking"] == "".join(thinking) != "" and whole.content[0].to_dict()["signature"]
    assert whole.usage.output_tokens_details and whole.usage.output_tokens_details.thinking_tokens == 12


def test_stop_sequence_is_reported(client: anthropic.Anthropic) -> None:
    request: Any = make_messages("Say anything at all.", max_tokens=60, extra_body={"ignore_eos": True})
    words = list("abcdefghijklmnop")
    whole = client.messages.create(**request, stop_sequences=words)
    with client.messages.stream(**request, stop_sequences=words) as stream:
        assert remove_variable_fields(stream.get_final_message()) == remove_variable_fields(whole)
    assert whole.stop_reason == "stop_sequence" and whole.stop_sequence in words


class Ship(BaseModel):
    afloat: bool


def test_messages_structured_answer(client: anthropic.Anthropic) -> None:
    at_once = {"logit_bias": {str(256 + SPECIAL_TOKENS.index("<think>")): -100}}
    parsed = client.messages.parse(
        **make_messages("Is she afloat?", max_tokens=40), output_format=Ship, extra_body=at_once
    )
    assert isinstance(parsed.parsed_output, Ship) and parsed.stop_reason == "end_turn"


def test_prefilled_assistant_answer_continues(client: anthropic.Anthropic) -> None:
    request = make_messages("Name the parts of a rig.", max_tokens=8, extra_body={"ignore_eos": True})
    text = join_text(client.messages.create(**request))
    messages = [*request["messages"], {"role": "assistant", "content": text[:3]}]
    went_on = client.messages.create(**{**request, "messages": messages})
    assert join_text(went_on).startswith(text[3:]) and len(text) == 8


def test_max_tokens_0_prefills_only(client: anthropic.Anthropic, warm_pair: Pair) -> None:
    request = make_messages("What is the burgee for?", system=BRIEF)
    ahead = client.messages.create(**{**request, "max_tokens": 0})
    assert ahead.content == [] and ahead.usage.output_tokens == 0
    warm_pair.settle()
    assert client.messages.create(**request).usage.input_tokens == 1


def test_any_model_name_is_accepted(client: anthropic.Anthropic) -> None:
    listed = client.models.list()
    assert [model.type for model in listed.data] == ["model"] and not listed.has_more
    model = client.models.retrieve("claude/any")
    assert (model.id, model.display_name) == ("claude/any", listed.data[0].id)


def test_errors_use_anthropic_envelope(client: anthropic.Anthropic, warm_pair: Pair) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r'messages.0.content.0: of type "image"') as refused:
        image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
        client.messages.create(**make_messages("") | {"messages": [{"role": "user", "content": [image]}]})
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="'temperature' must be"):
        client.messages.create(**make_messages("x"), extra_body={"temperature": -1})
    limit = warm_pair.status().context_tokens_max
    long = make_messages("x" * limit)
    with pytest.raises(anthropic.BadRequestError, match=rf"prompt is too long: \d+ tokens > {limit} maximum"):
        client.messages.create(**long)
    assert client.messages.count_tokens(model="m", messages=long["messages"]).input_tokens > limit
    with pytest.raises(anthropic.BadRequestError, match=rf"prompt is too long: \d+ tokens > {limit} maximum"):
        client.messages.count_tokens(model="m", messages=make_messages("x" * 10 * limit)["messages"])
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.batches.list()
    assert missing.value.type == "not_found_error"
