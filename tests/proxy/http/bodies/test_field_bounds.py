"""Bounds of single fields, the same by all APIs: counts of messages, and sizes of what is no prompt."""

import json
from typing import Any

import pytest

from support.proxy.calls import read_call
from warmline_proxy.api.base import Api
from warmline_proxy.api.registry import CHAT, COMPLETION, MESSAGES, RESPONSES
from warmline_proxy.errors import ClientError
from warmline_proxy.http.body_fields import FIELD_BYTES_MAX, MESSAGES_MAX

MESSAGE = {"role": "user", "content": "a"}
LISTS = [(CHAT, "messages"), (MESSAGES, "messages"), (RESPONSES, "input")]


def catch_refusal(api: Api, **fields: Any) -> str:
    """Message of the 400; "" where there is none."""
    try:
        read_call(api, json.dumps({"model": "m", "max_tokens": 5, **fields}).encode(), {})
    except ClientError as error:
        assert error.status == 400
        return str(json.loads(error.body)["error"]["message"])
    return ""


@pytest.mark.parametrize(("api", "field"), LISTS, ids=[api.name for api, _ in LISTS])
def test_messages_are_counted(api: Api, field: str) -> None:
    assert not catch_refusal(api, **{field: [MESSAGE] * MESSAGES_MAX})
    message = catch_refusal(api, **{field: [MESSAGE] * (MESSAGES_MAX + 1)})
    assert f"'{field}' has 10001 elements; 10000 are the most" in message


@pytest.mark.parametrize(
    ("api", "field", "value"),
    [
        (CHAT, "messages", [MESSAGE]),
        (COMPLETION, "prompt", "a"),
        (MESSAGES, "messages", [MESSAGE]),
        (RESPONSES, "input", "a"),
    ],
)
def test_only_the_prompts_fields_may_be_long(api: Api, field: str, value: object) -> None:
    long = "a" * FIELD_BYTES_MAX
    for name in ("user", "stop", "unknown", "x" * 500):
        message = catch_refusal(api, **{field: value, name: long})
        assert message.startswith(f"'{name[:128]}' has 2097154 bytes; 2097152 are the most")
    prompt = [{"role": "user", "content": long}] if field == "messages" else long
    assert not catch_refusal(api, **{field: prompt})
