"""Bodies as JSON: halves of surrogate pairs, marks of byte order, and faults that are named."""

import json
from typing import Any

import msgspec
import pytest

from support.proxy.calls import read_call
from warmline_proxy.api.base import Api
from warmline_proxy.api.registry import CHAT, COMPLETION, MESSAGES, RESPONSES
from warmline_proxy.errors import ClientError
from warmline_proxy.http.body_fields import parse_object

HALF = "\ud83d"
APIS: list[tuple[Api, str]] = [(CHAT, "messages"), (MESSAGES, "messages"), (RESPONSES, "input"), (COMPLETION, "prompt")]


def read_fields(api: Api, body: bytes) -> Any:
    """Fields for the backend, as JSON values."""
    return msgspec.json.decode(msgspec.json.encode(read_call(api, body, {}).fields))


@pytest.mark.parametrize(("api", "field"), APIS, ids=[api.name for api, _ in APIS])
def test_half_a_surrogate_pair_is_a_replacement_character(api: Api, field: str) -> None:
    for text in (HALF, f"cut {HALF}", f"{HALF} and more text", "\ude00", f"{HALF}A", f"\\{HALF}\\ud83d"):
        value: Any = text if field == "prompt" else [{"role": "user", "content": text}]
        body = {"model": text, field: value, "max_tokens": 5, text: text, "metadata": {text: [text]}, "stop": [text]}
        broken = json.dumps(body).encode()
        sound = "".join(
            "\ufffd" if "\ud800" <= letter <= "\udfff" else letter for letter in json.dumps(body, ensure_ascii=False)
        )
        assert read_fields(api, broken) == read_fields(api, sound.encode()), text
    whole = json.dumps(body | {"metadata": {"user_id": "\U0001f600 stays"}}).encode()
    assert read_call(api, whole, {}).client_model == "\\\ufffd\\ud83d"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"messages": [{"role": "us', "ends within a value, after 26 bytes; send it whole"),
        (b'{"messages": "\\ud83d', "ends within a value"),
        (b'{"a": "\xff"}', "not UTF-8, by byte 7 (0xff)"),
        (b'{"a": "\xed\xa0\xbd"}', "not UTF-8, by byte 7 (0xed)"),
        (json.dumps({"a": 1}).encode("utf-16"), "not UTF-8, by byte 0"),
        (b'{"a": "\\q"}', "escape"),
        (b"{a: 1}", "keys must be strings (byte 1)"),
        (b"", "empty"),
        (b"[]", "must be a JSON object"),
    ],
)
def test_faulty_bodies_are_explained(body: bytes, words: str) -> None:
    with pytest.raises(ClientError) as caught:
        parse_object(body)
    assert caught.value.status == 400 and words in json.loads(caught.value.body)["error"]["message"]


@pytest.mark.parametrize(("api", "field"), APIS, ids=[api.name for api, _ in APIS])
def test_mark_of_byte_order_is_skipped(api: Api, field: str) -> None:
    value: Any = "x" if field == "prompt" else [{"role": "user", "content": "x"}]
    assert read_fields(api, json.dumps({field: value, "max_tokens": 5}).encode("utf-8-sig"))[
        "prompt" if field == "prompt" else "messages"
    ]
