"""Drafts of a real pair: a prediction changes no answer, and is counted in usage, records, metrics and explanations."""

from typing import Any

import openai
import pytest

from support.metrics_text import MetricsText
from support.pair.pair import Pair, Reply, send_request
from support.pair.waiting import wait_until

MESSAGES = [{"role": "user", "content": "plumcot writes a text of some length. " * 6}]
OPTIONS = {"max_tokens": 80, "ignore_eos": True}


def read_accepted(pair: Pair) -> float:
    text = send_request(f"{pair.backend_url}/metrics", None, {}, "GET").raw.decode()
    return MetricsText(text).total("warmline_backend_draft_tokens_accepted_total", source="prediction")


def get_text(reply: Reply) -> str:
    return str(reply.json["choices"][0]["message"]["content"])


def test_prediction_changes_no_answer_and_is_counted(warm_pair: Pair) -> None:
    pair = warm_pair
    plain = pair.chat(MESSAGES, **OPTIONS)
    text, before = get_text(plain), read_accepted(pair)
    assert "accepted_prediction_tokens" not in plain.json["usage"]["completion_tokens_details"]
    foreseen = text[:30] + " quite another " + text[40:]
    client = openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="any/name",
        messages=MESSAGES,  # type: ignore[arg-type]
        prediction={"type": "content", "content": [{"type": "text", "text": foreseen}]},
        max_tokens=80,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].message.content == text
    usage: Any = answer.usage
    details = usage.completion_tokens_details
    tokens = len(foreseen)  # a byte is a token
    assert 50 < details.accepted_prediction_tokens < tokens
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == tokens
    pair.settle()
    request_id = answer.id.removeprefix("chatcmpl-")
    wait_until(lambda: any(each["id"] == request_id for each in pair.requests()), "the request is not recorded")
    record = next(each for each in pair.requests() if each["id"] == request_id)
    assert record["generated_tokens"] == 80 and 0 < record["accepted_tokens"] <= record["drafted_tokens"]
    assert record["decode_passes"] == 80 - record["accepted_tokens"]
    by_source = record["accepted_by_source"]
    assert by_source["prediction"] > 40 and sum(by_source.values()) == record["accepted_tokens"]
    assert read_accepted(pair) - before == record["accepted_tokens"]
    explained = pair.cachectl("explain", record["id"])
    assert explained["request"]["accepted_tokens"] == record["accepted_tokens"]


@pytest.mark.parametrize(
    ("prediction", "problem"),
    [
        ("text", "'prediction' must be a JSON object, not a string"),
        ({"type": "file", "content": "x"}, "'prediction.type' must be \"content\""),
        ({"type": "content"}, "'prediction.content' must be a string or a list, and is missing; expected"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "'prediction.content' has a part that is no text"),
    ],
)
def test_unusable_prediction_is_refused(warm_pair: Pair, prediction: object, problem: str) -> None:
    body = {"model": "any/name", "messages": MESSAGES, "prediction": prediction, "max_tokens": 4}
    reply = warm_pair.post("/v1/chat/completions", body)
    assert reply.status == 400 and problem in reply.json["error"]["message"]
    assert reply.json["error"]["param"] == "prediction"
