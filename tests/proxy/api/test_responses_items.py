"""Conversion of OpenAI's Responses bodies into chat bodies: items, tools, options, refusals."""

import json
from typing import Any

import pytest

from support.proxy.calls import read_call
from support.proxy.responses import AGENTS, LOOK, PATCH, make_call, make_message, make_result, make_thinking
from warmline_common.protocol.media_parts import find_placeholder
from warmline_common.protocol.messages import ErrorReply, decode
from warmline_proxy.api.base import ApiCall
from warmline_proxy.api.responses.adapter import ResponsesApi
from warmline_proxy.api.responses.items import decode_reasoning, encode_reasoning
from warmline_proxy.errors import ClientError

SERVER_TOOL = {"type": "web_search", "external_web_access": False}


def convert(value: object = "Hi.", headers: dict[str, str] | None = None, **fields: Any) -> ApiCall:
    return read_call(ResponsesApi(), json.dumps({"model": "m", "input": value, **fields}).encode(), headers or {})


def convert_messages(value: object, **fields: Any) -> Any:
    return convert(value, **fields).fields["messages"]


def catch_refusal(value: object = "Hi.", **fields: Any) -> Any:
    with pytest.raises(ClientError) as failure:
        convert(value, **fields)
    assert failure.value.status == 400
    return decode(failure.value.body, ErrorReply).error


def make_chat_call(name: str, arguments: str = "{}", call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# ---- items


def test_string_input_is_user_message_after_instructions() -> None:
    assert (
        convert_messages("Hi.", instructions="") == convert_messages("Hi.", instructions=[]) == convert_messages("Hi.")
    )
    assert convert_messages("Hi.", instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
    ]


def test_message_forms_give_same_messages() -> None:
    plain = [{"role": role, "content": f"I am {role}."} for role in ("system", "developer", "user", "assistant")]
    parts = [make_message(each["role"], each["content"], "output_text") for each in plain]
    halves = [
        {**each, "content": [{"type": "text", "text": half} for half in (each["content"][:3], each["content"][3:])]}
        for each in plain
    ]
    assert convert_messages(plain) == convert_messages(parts) == convert_messages(halves) == plain


def test_items_of_one_answer_join_into_one_message() -> None:
    turn = [
        make_thinking("Hm."),
        make_message("assistant", "Looking.", "output_text"),
        make_call("a"),
        make_call("b", '{"x": 1}', "call_2"),
    ]
    assert convert_messages(
        [make_message("user", "Go."), *turn, make_result("1"), make_result("2", "call_2"), make_message("user", "And?")]
    ) == [
        {"role": "user", "content": "Go."},
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning_content": "Hm.",
            "tool_calls": [make_chat_call("a"), make_chat_call("b", '{"x": 1}', "call_2")],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "1"},
        {"role": "tool", "tool_call_id": "call_2", "content": "2"},
        {"role": "user", "content": "And?"},
    ]


def test_items_of_two_answers_stay_two_messages() -> None:
    first, second = [make_thinking("A."), make_call("a")], [make_thinking("B."), make_call("b", call_id="call_2")]
    chat = convert_messages([*first, make_result("1"), *second, make_result("2", "call_2")])
    assert [message["role"] for message in chat] == ["assistant", "tool", "assistant", "tool"]
    assert [message.get("reasoning_content") for message in chat] == ["A.", None, "B.", None]
    chat = convert_messages([make_call("a"), make_result("1"), make_call("b", call_id="call_2")])
    assert [message["role"] for message in chat] == ["assistant", "tool", "assistant"]
    assert convert_messages([make_message("assistant", "One."), make_message("assistant", "Two.")]) == [
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": "Two."},
    ]


def test_item_ids_decide_which_items_join() -> None:
    interleaved = [
        make_call("a", id="fc_abc_0"),
        make_result("1"),
        {**make_message("assistant", "More.", "output_text"), "id": "msg_abc_1"},
        make_call("b", call_id="call_2", id="fc_abc_2"),
        make_result("2", "call_2"),
        make_call("c", call_id="call_3", id="fc_def_0"),
    ]
    chat = convert_messages(interleaved)
    assert [message["role"] for message in chat] == ["assistant", "tool", "tool", "assistant"]
    assert [each["function"]["name"] for each in chat[0]["tool_calls"]] == ["a", "b"]
    assert chat[0]["content"] == "More." and chat[3]["tool_calls"] == [make_chat_call("c", call_id="call_3")]
    twice = [
        {**make_message("assistant", text), "id": f"msg_{name}_0"} for text, name in (("One.", "abc"), ("Two.", "abc"))
    ]
    assert convert_messages(twice) == [{"role": "assistant", "content": "One.Two."}]


def test_reasoning_is_read_in_every_form() -> None:
    forms: list[dict[str, Any]] = [
        make_thinking("Hm, ü \u2028."),
        make_thinking("Hm, ü \u2028.", encrypted_content="of others"),
        {"type": "reasoning", "summary": [], "encrypted_content": encode_reasoning("Hm, ü \u2028.")},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "content": None}
        | {"encrypted_content": encode_reasoning("Hm, ü \u2028.")},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm, ü \u2028."}], "encrypted_content": "?"},
    ]
    for form in forms:
        assert convert_messages([form, make_call("a")])[0]["reasoning_content"] == "Hm, ü \u2028."
    assert "reasoning_content" not in convert_messages([{"type": "reasoning", "summary": []}, make_call("a")])[0]


@pytest.mark.parametrize("text", [None, 5, "", "gAAAA", "warmline.1.", "warmline.1.?", "warmline.1.gIA="])
def test_foreign_encrypted_content_is_ignored(text: object) -> None:
    assert decode_reasoning(text) == ""


def test_tool_output_images_become_placeholders() -> None:
    parts = [{"type": "input_text", "text": "See:"}, {"type": "input_image", "image_url": "data:..."}]
    parts += [{"type": "input_file", "file_id": "f"}, {"type": "output_text", "text": "That is all."}]
    lines = ["See:", find_placeholder("input_image"), find_placeholder("input_file"), "That is all."]
    assert convert_messages([make_call("a"), make_result(parts)])[1]["content"] == "\n".join(lines)
    error = catch_refusal([{"role": "user", "content": parts}])
    assert error.param == "input[0].content[1]" and "does not support image input" in error.message


@pytest.mark.parametrize("arguments", ["", '{"a": 1', "null", '["ls"]', "ls -la"])
def test_malformed_arguments_are_passed_on(arguments: str) -> None:
    call = {**make_call("a"), "arguments": arguments}
    assert convert_messages([call])[0]["tool_calls"][0]["function"]["arguments"] == arguments


def test_agent_messages_are_read() -> None:
    content = [{"type": "input_text", "text": "Sender: /root\n"}, {"type": "encrypted_content"}]
    content[1]["encrypted_content"] = "say hello"
    item = {"type": "agent_message", "author": "/root", "recipient": "/root/child", "content": content}
    assert convert_messages([item]) == [{"role": "user", "content": "Sender: /root\nsay hello"}]


def test_server_tool_items_are_skipped() -> None:
    items = [
        make_message("user", "Go."),
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        make_message("user", "On."),
    ]
    assert [message["content"] for message in convert_messages(items)] == ["Go.", "On."]


@pytest.mark.parametrize(
    ("value", "param", "word"),
    [
        (None, "input", "a string or a list"),
        (5, "input", "a string or a list"),
        (["Hi."], "input[0]", "an object"),
        ([{"type": "compaction", "encrypted_content": "x"}], "input[0]", '"compaction"'),
        ([{"type": ["message"]}], "input[0]", "can't be read"),
        ([{"role": "robot", "content": "Hi."}], "input[0].role", "developer"),
        ([{"role": "user", "content": 5}], "input[0].content", "a list of parts"),
        ([{"role": "user", "content": [5]}], "input[0].content[0]", "only text"),
        ([{"role": "user", "content": [{"type": ["input_text"], "text": "Hi."}]}], "input[0].content[0]", "only text"),
        ([{"type": "reasoning", "summary": [{"type": {}, "text": "Hm."}]}], "input[0].summary[0]", "only text"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text", "a string"),
        ([{"role": "user", "contnt": "Hi."}], "input[0].content", "this item has 'contnt': write it 'content'"),
        ([{"rol": "user", "content": "Hi."}], "input[0].role", "this item has 'rol': write it 'role'"),
        ([{"type": "function_call", "name": "a", "arguments": "{}"}], "input[0].call_id", "a string"),
        ([{"type": "function_call", "name": "a", "arguments": {}, "call_id": "c"}], "input[0].arguments", "a string"),
        ([{"type": "function_call_output", "output": "x"}], "input[0].call_id", "a string"),
        ([{"type": "reasoning", "summary": "x", "content": 5}], "input[0].content", "a list of parts"),
    ],
)
def test_invalid_items_return_400_with_param(value: object, param: str, word: str) -> None:
    error = catch_refusal(value)
    assert error.param == param and word in error.message


# ---- tools


def test_functions_are_nested_as_in_chat() -> None:
    fields = convert(
        tools=[LOOK, {"type": "function", "name": "bare", "parameters": None, "strict": True}, SERVER_TOOL]
    ).fields
    look = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    bare = {"name": "bare", "parameters": {"type": "object", "properties": {}}, "strict": True}
    assert fields["tools"] == [{"type": "function", "function": each} for each in (look, bare)]
    assert list(fields["tools"][0]["function"]) == ["name", "description", "parameters"]


def test_custom_tool_becomes_function_of_one_string() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    api_call = convert(tools=[PATCH, {**PATCH, "name": "strict_patch", "format": grammar}])
    plain, strict = (tool["function"] for tool in api_call.fields["tools"])
    assert plain["name"] == "patch" and plain["description"] == "Patches."
    assert plain["parameters"]["required"] == ["input"]
    assert strict["description"].startswith("Patches.\n\n") and 'lark grammar:\nstart: "x"' in strict["description"]
    items = [
        {"type": "custom_tool_call", "name": "patch", "input": 'a "b"\nü', "call_id": "call_1"},
        {"type": "custom_tool_call_output", "call_id": "call_1", "output": "ok"},
    ]
    assert convert_messages(items) == [
        {"role": "assistant", "content": None, "tool_calls": [make_chat_call("patch", '{"input": "a \\"b\\"\\nü"}')]},
        {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
    ]


def test_namespace_prefixes_function_names() -> None:
    fields = convert([make_call("spawn", namespace="agents")], tools=[AGENTS]).fields
    assert fields["tools"][0]["function"]["name"] == "agents__spawn"
    assert fields["messages"][0]["tool_calls"] == [make_chat_call("agents__spawn")]


def test_additional_tools_items_add_tools() -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [PATCH]}
    fields = convert([make_message("user", "Go."), added, make_message("user", "On.")], tools=[LOOK]).fields
    assert [tool["function"]["name"] for tool in fields["tools"]] == ["look", "patch"]
    assert len(fields["messages"]) == 2


@pytest.mark.parametrize(
    ("choice", "chosen", "names"),
    [
        (None, None, ["look", "patch", "agents__spawn"]),
        ("auto", "auto", ["look", "patch", "agents__spawn"]),
        ("required", "required", ["look", "patch", "agents__spawn"]),
        ({"type": "function", "name": "look"}, "look", ["look", "patch", "agents__spawn"]),
        ({"type": "custom", "name": "patch"}, "patch", ["look", "patch", "agents__spawn"]),
        ({"type": "function", "name": "spawn"}, "agents__spawn", ["look", "patch", "agents__spawn"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}, SERVER_TOOL]},
            "required",
            ["patch"],
        ),
    ],
)
def test_tool_choice_is_converted(choice: object, chosen: object, names: list[str]) -> None:
    fields = convert(tools=[LOOK, PATCH, AGENTS, SERVER_TOOL], tool_choice=choice).fields
    expected = {"type": "function", "function": {"name": chosen}} if isinstance(choice, dict) else chosen
    assert fields.get("tool_choice") == (chosen if chosen == "required" else expected)
    assert [tool["function"]["name"] for tool in fields["tools"]] == names


def test_tool_choice_without_callable_tools_is_dropped() -> None:
    assert convert(tools=[LOOK], parallel_tool_calls=False).fields["parallel_tool_calls"] is False
    fields = convert(tools=[SERVER_TOOL], tool_choice="auto", parallel_tool_calls=True).fields
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & fields.keys()
    assert "'tools' has none" in catch_refusal(tools=[SERVER_TOOL], tool_choice="required").message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["look"]}, "tools[0]"),
        ({"tools": [{"name": "look"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [LOOK], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": 5}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "tools": [PATCH]}}, "tool_choice.tools"),
    ],
)
def test_invalid_tools_return_400_with_param(fields: dict[str, Any], param: str) -> None:
    assert catch_refusal(**fields).param == param


# ---- the rest


def test_options_are_converted_to_chat() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True, "description": None}
    fields = convert(
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": schema, "verbosity": "low"},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        stream_options={"include_obfuscation": False},
        truncation="auto",
        store=True,
        service_tier="flex",
        metadata={"a": "b"},
        user="me",
        max_tool_calls=None,
        unknown={"x": 1},
    ).fields
    assert fields == {
        "messages": [{"role": "user", "content": "Hi."}],
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
        "logprobs": True,
        "top_logprobs": 2,
    }


def test_null_is_absent() -> None:
    names = ["instructions", "tools", "tool_choice", "text", "reasoning", "include", "previous_response_id", "stream"]
    names += ["conversation", "background", "max_output_tokens", "temperature", "prompt", "metadata"]
    nothing = dict.fromkeys(names)
    api_call = convert(**nothing)
    assert api_call.fields == {"messages": [{"role": "user", "content": "Hi."}]} and api_call.stream is False
    assert convert(text={"format": None}, reasoning={"effort": None}).fields == api_call.fields


def test_text_formats_are_converted() -> None:
    assert convert(text={"format": {"type": "json_object"}}).fields["response_format"] == {"type": "json_object"}
    assert "response_format" not in convert(text={"format": {"type": "text"}}).fields


def test_session_hint_and_retry_count_are_read() -> None:
    assert convert(prompt_cache_key="k").session_hint == "k"
    assert convert(headers={"Session-Id": "s"}, prompt_cache_key="k").session_hint == "s"
    assert convert(headers={"X-Stainless-Retry-Count": "2"}).retry_count == 2
    assert convert(stream=True).stream and convert(model=None).client_model is None


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "stored prompt"),
        ({"background": True}, "background", "client waits"),
        ({"store": "yes"}, "store", "true or false"),
        ({"previous_response_id": 5}, "previous_response_id", "a string"),
        ({"model": 5}, "model", "a string"),
        ({"model": "m" * 1025}, "model", "at most 1024"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"instructions": 5}, "instructions", "a string"),
        ({"text": "json"}, "text", "an object"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
        ({"reasoning": "high"}, "reasoning", "an object"),
        ({"include": "all"}, "include", "a list"),
    ],
)
def test_unsupported_fields_return_400_with_param(fields: dict[str, Any], param: str, word: str) -> None:
    error = catch_refusal(**fields)
    assert error.param == param and word in error.message


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"input": ' + b"[" * 100_000])
def test_malformed_json_returns_400(body: bytes) -> None:
    with pytest.raises(ClientError) as failure:
        read_call(ResponsesApi(), body, {})
    assert failure.value.status == 400
