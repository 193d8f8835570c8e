"""Refusals of tools name the client's own fields, by the indexes of its list."""

import json
from typing import Any

import pytest

from support.proxy.calls import read_call
from warmline_proxy.api.anthropic.adapter import MessagesApi
from warmline_proxy.api.openai import OpenAIApi
from warmline_proxy.api.responses.adapter import ResponsesApi
from warmline_proxy.api.tool_fields import ToolFields
from warmline_proxy.errors import encode_error_body

MESSAGES_BODY = {
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [
        {"type": "web_search_20250305", "name": "web_search"},
        {"name": "look", "input_schema": {"type": "object"}},
        {"name": "wait", "input_schema": {"type": "object"}},
    ],
}
RESPONSES_BODY = {
    "input": "hi",
    "tools": [
        {"type": "web_search"},
        {"type": "function", "name": "look", "parameters": {}},
        {"type": "namespace", "name": "n", "tools": [{"type": "mcp"}, {"type": "function", "name": "wait"}]},
    ],
}


def rename(fields: ToolFields | None, name: str, message: str = "'{}' is odd", param: str | None = None) -> list[str]:
    assert fields is not None
    body = encode_error_body(message.format(name), "invalid_request_error", "code", param or name)
    error = json.loads(fields.replace_names(body))["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "code")
    return [error["message"], error["param"]]


@pytest.mark.parametrize(
    ("theirs", "messages", "responses"),
    [
        ("tools[0].function.parameters", "tools[1].input_schema", "tools[1].parameters"),
        ("tools[1].function.parameters", "tools[2].input_schema", "tools[2].tools[1].parameters"),
        ("tools[1].function.name", "tools[2].name", "tools[2].tools[1].name"),
        ("tools[0].function.strict", "tools[1].strict", "tools[1].strict"),
        ("tools[0].function.description", "tools[1].description", "tools[1].description"),
        ("tools[0]", "tools[1]", "tools[1]"),
        ("tools[7].function.name", "tools[7].function.name", "tools[7].function.name"),
        ("tools", "tools", "tools"),
        ("temperature", "temperature", "temperature"),
    ],
)
def test_refusal_names_client_field(theirs: str, messages: str, responses: str) -> None:
    for api, body, ours in ((MessagesApi(), MESSAGES_BODY, messages), (ResponsesApi(), RESPONSES_BODY, responses)):
        fields = read_call(api, json.dumps(body).encode()).tool_fields  # type: ignore[arg-type]
        assert rename(fields, theirs) == [f"'{ours}' is odd", ours]


def test_client_words_are_unchanged() -> None:
    fields = ToolFields(("tools[3]",), "input_schema")
    words = "'{}' (f) is refused: 'tools[0].function.parameters'"
    assert rename(fields, "tools[0]", words)[0] == "'tools[3]' (f) is refused: 'tools[0].function.parameters'"
    assert rename(fields, "tools[0].function.strict", param="tools[0]") == ["'tools[3].strict' is odd", "tools[3]"]
    assert fields.replace_names(b"no JSON") == b"no JSON"


def test_reordered_tools_keep_their_places() -> None:
    tools: list[Any] = [{"name": name} for name in "cab"]
    fields = ToolFields(("tools[0]", "tools[2]", "tools[4]")).reorder(tools, [tools[1], tools[2], tools[0]])
    assert fields.places == ("tools[2]", "tools[4]", "tools[0]")


def test_chat_has_no_other_names() -> None:
    assert read_call(OpenAIApi("chat"), b'{"messages": [], "tools": []}').tool_fields is None
