"""Conversion of Anthropic's Messages bodies into chat bodies."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from support.proxy.calls import read_call
from warmline_proxy.api.anthropic.adapter import MessagesApi
from warmline_proxy.api.base import ApiCall
from warmline_proxy.errors import ClientError

CALL, TOOLU = "call_0123456789abcdef01234567", "toolu_0123456789abcdef01234567"
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
LOOK_CHAT = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def convert(headers: dict[str, str] | None = None, **fields: Any) -> ApiCall:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **fields}
    return read_call(MessagesApi(), json.dumps(body).encode(), headers or {})


def convert_to_chat(**fields: Any) -> Any:
    """Fields for the backend, as JSON values."""
    return msgspec.json.decode(msgspec.json.encode(convert(**fields).fields))


def convert_messages(*sent: dict[str, Any], **fields: Any) -> Any:
    return convert_to_chat(messages=list(sent), **fields)["messages"]


def make_text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def join_text(message: Any) -> str:
    """Content as the backend joins it."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def catch_refusal(**fields: Any) -> str:
    with pytest.raises(ClientError) as caught:
        convert(**fields)
    assert caught.value.status == 400
    error = json.loads(MessagesApi().encode_error(caught.value))
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    return str(error["error"]["message"])


def test_simplest_body() -> None:
    assert convert_to_chat() == {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def test_call_has_model_stream_and_retry_count() -> None:
    call = convert({"X-Stainless-Retry-Count": "2"}, stream=True)
    assert (call.client_model, call.stream, call.retry_count, call.session_hint) == ("m", True, 2, "")
    assert (call.api.name, call.api.endpoint) == ("messages", "chat")


@pytest.mark.parametrize(
    ("user_id", "hint"),
    [
        ('{"device_id": "d", "account_uuid": "", "session_id": "33d72666-7f0f"}', "33d72666-7f0f"),
        ("user_0a1b_account__session_33d72666-7f0f-4701-94ba-a1c3caba5ad4", "33d72666-7f0f-4701-94ba-a1c3caba5ad4"),
        ("somebody", "somebody"),
        ('{"session_id": 5}', '{"session_id": 5}'),
    ],
)
def test_user_id_gives_session_hint(user_id: str, hint: str) -> None:
    assert convert(metadata={"user_id": user_id}).session_hint == hint
    assert convert({"X-Claude-Code-Session-Id": "other"}, metadata={"user_id": user_id}).session_hint == "other"


@pytest.mark.parametrize(
    "system",
    [
        "Be brief.",
        [make_text("Be brief.")],
        [make_text("Be brief.", **CACHED)],
        [make_text(""), make_text("Be brief.")],
    ],
)
def test_system_text_becomes_first_message(system: Any) -> None:
    assert convert_to_chat(system=system)["messages"][0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("system", ["", [], None])
def test_empty_system_text_gives_no_message(system: Any) -> None:
    assert [message["role"] for message in convert_to_chat(system=system)["messages"]] == ["user"]


def test_system_blocks_stay_parts_on_separate_lines() -> None:
    system = [make_text("x-header: 1;"), make_text("You are brief."), make_text("\nAnd kind.\n"), make_text("Always.")]
    message = convert_to_chat(system=system)["messages"][0]
    assert [part["text"] for part in message["content"]] == [
        "x-header: 1;\n",
        "You are brief.",
        "\nAnd kind.\n",
        "Always.",
    ]


def test_system_messages_stay_in_place() -> None:
    sent = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": [make_text("b")]},
        {"role": "user", "content": "c"},
    ]
    assert convert_messages(*sent) == [dict(message, content=words) for message, words in zip(sent, "abc", strict=True)]


def test_turn_with_thinking_tools_and_results() -> None:
    converted = convert_messages(
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should ", "signature": "x"},
                {"type": "redacted_thinking", "data": "opaque"},
                {"type": "thinking", "thinking": "look.", "signature": "y"},
                make_text("Let me "),
                make_text("look."),
                {"type": "tool_use", "id": TOOLU, "name": "look", "input": {"at": "ü", "n": 1.5}, **CACHED},
                {"type": "tool_use", "id": "toolu_17", "name": "wait", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": TOOLU, "content": "a ship"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_17",
                    "content": [make_text("one"), make_text("two")],
                    **CACHED,
                },
                make_text("And now?"),
            ],
        },
    )
    look, wait = converted[1].pop("tool_calls")
    assert converted[1]["reasoning_content"] == "I should look." and join_text(converted[1]) == "Let me look."
    assert look["id"] == CALL and look["type"] == "function" and look["function"]["name"] == "look"
    assert json.loads(look["function"]["arguments"]) == {"at": "ü", "n": 1.5}
    assert (wait["id"], wait["function"]) == ("toolu_17", {"name": "wait", "arguments": "{}"})
    assert [message["role"] for message in converted] == ["user", "assistant", "tool", "tool", "user"]
    assert converted[2] == {"role": "tool", "tool_call_id": CALL, "content": "a ship"}
    assert converted[3]["tool_call_id"] == "toolu_17" and join_text(converted[3]) == "one\ntwo"
    assert converted[4] == {"role": "user", "content": "And now?"}


def test_user_blocks_keep_their_order() -> None:
    result = {"type": "tool_result", "tool_use_id": "t"}
    converted = convert_messages({"role": "user", "content": [make_text("a"), result, make_text("b"), make_text(" c")]})
    assert [(message["role"], join_text(message)) for message in converted] == [
        ("user", "a"),
        ("tool", ""),
        ("user", "b c"),
    ]


def test_empty_text_beside_tool_result_is_dropped() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "a"}
    converted = convert_messages({"role": "user", "content": [make_text(""), result, make_text("")]})
    assert [message["role"] for message in converted] == ["tool"]
    for empty in ([], [make_text("")], ""):
        assert convert_messages({"role": "user", "content": empty}) == [{"role": "user", "content": ""}]


@pytest.mark.parametrize(
    ("content", "read_as"),
    [
        ("no such file", "Error: no such file"),
        ("<tool_use_error>x", "<tool_use_error>x"),
        ([make_text("a"), make_text("b")], "Error: a\nb"),
    ],
)
def test_failed_tool_result_gets_error_prefix(content: Any, read_as: str) -> None:
    block = {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": True}
    assert join_text(convert_messages({"role": "user", "content": [block]})[0]) == read_as


def test_unreadable_tool_results_become_placeholders() -> None:
    """An agent's conversation goes on after a picture."""
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
    brought = {"type": "tool_result", "tool_use_id": "t", "content": [make_text("a.png"), IMAGE, pdf]}
    converted = join_text(convert_messages({"role": "user", "content": [brought]})[0])
    assert converted == "a.png\n[an image, which this model can't see]\n[a document, which this model can't read]"


def test_documents_search_results_and_references_are_text() -> None:
    blocks = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a log"}, "title": "t"},
        {"type": "search_result", "source": "s", "title": "t", "content": [make_text("a hit")]},
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "look"}]},
    ]
    converted = convert_messages({"role": "user", "content": blocks})
    assert [join_text(message) for message in converted] == ["a log\na hit", "look"]


def test_strings_among_blocks_are_texts() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": ["x", make_text("y")]}
    sent = [{"role": "user", "content": ["a", make_text("b"), result]}, {"role": "assistant", "content": ["c"]}]
    converted = convert_messages(*sent, system=["s"])
    assert [join_text(message) for message in converted] == ["s", "a\nb", "x\ny", "c"]


def test_whole_floats_and_empty_formats_are_read() -> None:
    fields = convert_to_chat(max_tokens=20.0, thinking={"type": "enabled", "budget_tokens": 1024.0}, output_format={})
    assert fields["max_tokens"] == 20 and isinstance(fields["max_tokens"], int) and "response_format" not in fields
    assert convert(max_tokens=0.0).api_options.max_tokens == 0
    assert convert_to_chat(max_tokens=-1)["max_tokens"] == -1, "no limit"
    assert catch_refusal(max_tokens=20.5) == "'max_tokens' must be an integer, not 20.5"


def test_cache_control_and_block_form_change_nothing() -> None:
    """Clients move cache_control to the last block, and turn block arrays into strings."""
    first = convert_messages(
        {"role": "user", "content": [make_text("hi", **CACHED)]}, system=[make_text("s", **CACHED)]
    )
    later = convert_messages({"role": "user", "content": "hi"}, system="s", cache_control={"type": "ephemeral"})
    assert first == later


def test_partial_answer_is_continued() -> None:
    partial = {"role": "assistant", "content": "The answer is ("}
    fields = convert_to_chat(messages=[{"role": "user", "content": "a or b?"}, partial])
    assert fields["messages"][-1] == partial
    assert (fields["continue_final_message"], fields["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "thinking", "thinking": "x", "signature": ""}],
        [make_text("a"), {"type": "tool_use", "id": "t", "name": "n"}],
    ],
)
def test_answer_without_text_or_with_calls_is_not_continued(content: Any) -> None:
    fields = convert_to_chat(messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": content}])
    assert "continue_final_message" not in fields


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({"path": "/"}, '{"path":"/"}'),
        ('{"path": "/', '{"path": "/'),
        ('{"path": "/"}', '{"path": "/"}'),
        ("", ""),
        (["ls"], '["ls"]'),
        (5, "5"),
        (None, "{}"),
    ],
)
def test_malformed_input_of_call_is_passed_on(given: Any, arguments: str) -> None:
    calling = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": given}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "not run"}]}
    call = convert_messages({"role": "user", "content": "look"}, calling, result)[1]["tool_calls"][0]
    assert call["function"] == {"name": "look", "arguments": arguments}


def test_parameters_are_converted() -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "chat_template_kwargs": {"a": None}}
    fields = convert_to_chat(
        **given, stop_sequences=["\n\n", "", "END"], stream=True, service_tier="auto", betas=["x"], top_n=None
    )
    fields.pop("messages")
    assert fields == {**given, "max_tokens": 5, "stop": ["\n\n", "END"]}


def test_null_is_absent() -> None:
    names = ("system", "tools", "tool_choice", "thinking", "stop_sequences", "metadata", "temperature", "output_config")
    assert convert_to_chat(**dict.fromkeys(names)) == convert_to_chat()


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
        ),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, {"thinking": {"type": "disabled"}}),
        (
            {"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "max"}},
            {"thinking": {"type": "adaptive"}, "reasoning_effort": "max"},
        ),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
def test_thinking_and_effort_are_converted(given: dict[str, Any], becomes: dict[str, Any]) -> None:
    assert convert_to_chat(**given) == {**convert_to_chat(), **becomes}


@pytest.mark.parametrize("where", ["output_config", "output_format"])
def test_output_format_becomes_response_format(where: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "null"}}}}
    fields = convert_to_chat(**{where: {"format": form} if where == "output_config" else form})
    assert fields["response_format"]["type"] == "json_schema"
    assert fields["response_format"]["json_schema"]["schema"] == form["schema"]


@pytest.mark.parametrize(
    ("choice", "becomes"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "look"}, {"tool_choice": {"type": "function", "function": {"name": "look"}}}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
    ],
)
def test_tools_and_tool_choice_are_converted(choice: dict[str, Any], becomes: dict[str, Any]) -> None:
    tools = [
        {**LOOK, **CACHED, "eager_input_streaming": True},
        {**LOOK, "name": "see", "type": "custom", "strict": True},
    ]
    functions = [LOOK_CHAT, {**LOOK_CHAT, "name": "see", "strict": True}]
    expected = {"tools": [{"type": "function", "function": function} for function in functions], **becomes}
    assert convert_to_chat(tools=tools, tool_choice=choice) == {**convert_to_chat(), **expected}


def test_server_tools_are_left_out() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    assert convert_to_chat(tools=[search, LOOK]) == convert_to_chat(tools=[LOOK])
    assert convert_to_chat(tools=[search], tool_choice={"type": "auto"}) == convert_to_chat()
    assert "'web_search' is none of the tools" in catch_refusal(
        tools=[search], tool_choice={"type": "tool", "name": "web_search"}
    )
    assert "no tool that can be called here" in catch_refusal(tools=[search], tool_choice={"type": "any"})


AUDIO = {"type": "audio", "source": {"type": "base64", "data": "UklG"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"max_tokens": "5"}, "max_tokens: Expected `int | null`, got `str`"),
        ({"messages": None}, "messages: at least one message is required"),
        ({"messages": []}, "messages: at least one message is required"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role: must be user, assistant or system"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Expected `str | array`, got `int`"),
        (
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
            "messages.0.content.0: Object missing required field",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text: Field required"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 'messages.0.content.0: of type "image": image is not'),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [AUDIO]}]}
                ]
            },
            'messages.0.content.0.content.0: of type "audio"',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages.0.content.0.tool_use_id: Field",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "a tool_use needs an id and a name"),
        ({"system": [IMAGE]}, 'system.0: of type "image"'),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name: Field required"),
        ({"tools": [LOOK, {"name": "see", "parameters": {}}]}, "tools.1.input_schema: Field required: a JSON schema"),
        (
            {"tools": [{"type": "custom", "name": "see", "input_schema": None}]},
            'input_schema: Field required: a JSON schema of the tool\'s arguments, such as {"type": "object", "prop',
        ),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tools.0: bash_20250124 is known to Anthropic's models",
        ),
        ({"tools": [{"type": "function", "function": {"name": "look"}}]}, "name, description and input_schema"),
        ({"tools": [LOOK], "tool_choice": {"type": "maybe"}}, "tool_choice.type: must be auto, any, tool or none"),
        ({"output_format": {"type": "xml"}}, "output_config.format: must be of type json_schema"),
        ({"stream": "yes"}, "stream: Expected `bool | null`, got `str`"),
    ],
)
def test_invalid_bodies_return_400(fields: dict[str, Any], says: str) -> None:
    assert says in catch_refusal(**fields)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b"\xff", b"[" * 100_000])
def test_malformed_json_returns_400(body: bytes) -> None:
    with pytest.raises(ClientError) as caught:
        read_call(MessagesApi(), body, {})
    assert caught.value.status == 400


def test_count_body_needs_no_max_tokens() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    call = asyncio.run(MessagesApi().read_count_call(body, {}))
    assert call.fields == {"messages": [{"role": "user", "content": "hi"}]}
