"""Forms through a whole pair and OpenAI's SDK: several choices, streams, warm turns, legacy completions, refusals."""

import json
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError, OpenAI

from support import tiny_models
from support.pair.pair import Pair

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["one", "other", None]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
NO_REASONING = {str(256 + tiny_models.SPECIAL_TOKENS.index("<think>")): -100}
ASKS: dict[str, Any] = {
    "model": "formed",
    "messages": [{"role": "user", "content": "Describe a thing, as JSON, in words that fill a block or two. " * 4}],
    "response_format": FORM,
    "temperature": 1.0,
    "seed": 11,
    "logit_bias": NO_REASONING,
    "max_tokens": 200,
}


@pytest.fixture(scope="module")
def client(warm_pair: Pair) -> OpenAI:
    return OpenAI(base_url=f"{warm_pair.url}/v1", api_key="x", max_retries=0)


def parse_answer(text: str | None) -> Any:
    assert text
    value = json.loads(text)
    jsonschema.validate(value, SCHEMA)
    return value


def test_structured_choices_and_streams_are_valid_and_warm(client: OpenAI) -> None:
    whole = client.chat.completions.create(**ASKS, n=3)
    texts = [choice.message.content for choice in whole.choices]
    assert len({json.dumps(parse_answer(text)) for text in texts}) > 1
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**ASKS, stream=True)
    )
    assert streamed == texts[0]
    turns = [*ASKS["messages"], {"role": "assistant", "content": texts[0]}, {"role": "user", "content": "And another."}]
    follow = client.chat.completions.create(**{**ASKS, "messages": turns})
    parse_answer(follow.choices[0].message.content)
    assert follow.usage and follow.usage.prompt_tokens_details
    assert (follow.usage.prompt_tokens_details.cached_tokens or 0) >= 192


def test_structured_completions_are_valid(client: OpenAI) -> None:
    made = client.completions.create(
        model="formed",
        prompt="a thing:",
        max_tokens=20,
        extra_body={"structured_outputs": {"choice": ["left", "right"]}},
    )
    assert made.choices[0].text in ("left", "right") and made.choices[0].finish_reason == "stop"


def test_unreadable_schema_is_refused_if_strict(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "https://example.com/a.json"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    with pytest.raises(BadRequestError, match=r"at /properties/a has \$ref") as caught:
        client.chat.completions.create(**{**ASKS, "response_format": form})
    assert caught.value.param == "response_format.json_schema.schema"
