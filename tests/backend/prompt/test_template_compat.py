"""Conversations of every shape, rendered whole by templates of every kind; reasoning options of every client."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.backend.small_tokenizers import CHATML, make_byte_level_tokenizer
from support.backend.template_rendering import MakeRenderer, cache_renderers, render_text
from warmline_backend.prompt.renderer import TemplateRenderer
from warmline_backend.request.params import BadRequestError

SYSTEM = {"role": "system", "content": "be brief"}
LATE = {"role": "system", "content": "be kind"}
USER = {"role": "user", "content": "hello"}
MORE = {"role": "user", "content": "and more"}
ANSWER = {"role": "assistant", "content": "hi"}
ID, OTHER_ID = "call_0123456789abcdef01234567", "call_76543210fedcba9876543210"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
RESULT = {"role": "tool", "tool_call_id": ID, "content": "bin"}


def make_call(call_id: str = ID, arguments: Any = '{"path": "/"}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}


CALLING = {"role": "assistant", "content": None, "tool_calls": [make_call()]}

CALL = "[{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]"
CALLS = "{% for c in m.tool_calls or [] %}" + CALL + "{% endfor %}"
LOOP = (
    "{% if tools %}<{{ tools | tojson }}>{% endif %}"
    "{% for m in messages %}BEFORE{{ m.role }}:{{ m.content }}" + CALLS + ";{% endfor %}"
)
PLAIN = LOOP.replace("BEFORE", "")


def make_raising_template(condition: str, what: str) -> str:
    return LOOP.replace("BEFORE", "{% if " + condition + " %}{{ raise_exception('" + what + "') }}{% endif %}")


FIRST_ONLY = make_raising_template("m.role == 'system' and not loop.first", "the system message must be first")
NO_SYSTEM = make_raising_template("m.role == 'system'", "no system")
HOISTING = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }};{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }};{% endfor %}"
)
ALTERNATING = make_raising_template(
    "not loop.first and m.role == loop.previtem.role and m.role != 'tool'", "roles must alternate"
)
STRICT = make_raising_template(
    "(m.role == 'user' and not loop.first and loop.previtem.role != 'assistant')"
    " or (m.tool_calls and m.tool_calls[0].id | length != 9)",
    "no",
)
TOOLLESS = (
    "{% for m in messages if m.role in ('system', 'user', 'assistant') %}{{ m.role }}:{{ m.content }};{% endfor %}"
)
JSON_ARGUMENTS = PLAIN.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments + '' }}")
BY_ID = PLAIN.replace("{{ c.id }} {{ c.function.name }}", "{{ c.id }}").replace(
    "{{ m.content }}", "{{ m.content }}{{ m.tool_call_id }}"
)
NAMING = PLAIN.replace("{{ m.content }}", "{{ m.content }}{% if m.role == 'tool' %} by {{ m.name }}{% endif %}")
THINKING = PLAIN.replace("{{ m.content }}", "({{ m.thinking }}|{{ m.reasoning_content }}){{ m.content }}")
ONE_THOUGHT = make_raising_template("m.tool_calls and m.content and m.thinking", "either content or thinking").replace(
    "{{ m.content }}", "({{ m.thinking }}){{ m.content }}"
)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> MakeRenderer:
    return cache_renderers(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (PLAIN, [USER, ANSWER, LATE, MORE], "user:hello;assistant:hi;system:be kind;user:and more;"),
        (
            FIRST_ONLY,
            [SYSTEM, USER, ANSWER, LATE, MORE],
            "system:be brief;user:hello;assistant:hi;"
            "user:<system-reminder>\nbe kind\n</system-reminder>;user:and more;",
        ),
        (FIRST_ONLY, [SYSTEM, LATE, USER], "system:be brief\n\nbe kind;user:hello;"),
        (PLAIN, [SYSTEM, LATE, USER], "system:be brief;system:be kind;user:hello;"),
        (HOISTING, [USER, LATE], "user:hello;user:<system-reminder>\nbe kind\n</system-reminder>;"),
        (NO_SYSTEM, [SYSTEM, USER, ANSWER], "user:be brief\n\nhello;assistant:hi;"),
        (NO_SYSTEM, [SYSTEM, ANSWER], "user:be brief;assistant:hi;"),
        (PLAIN, [USER, MORE], "user:hello;user:and more;"),
        (ALTERNATING, [USER, MORE, ANSWER, ANSWER, USER], "user:hello\n\nand more;assistant:hi\n\nhi;user:hello;"),
        (STRICT, [USER, ANSWER, USER], "user:hello;assistant:hi;user:hello;"),
        (NAMING, [USER, CALLING, RESULT], f'user:hello;assistant:[{ID} look {{"path": "/"}}];tool:bin by look;'),
        (
            JSON_ARGUMENTS,
            [USER, {**CALLING, "tool_calls": [make_call(arguments={"a": "é"})]}, RESULT],
            f'user:hello;assistant:[{ID} look {{"a": "é"}}];tool:bin;',
        ),
        (
            BY_ID,
            [
                USER,
                CALLING,
                RESULT,
                {**CALLING, "tool_calls": [make_call(OTHER_ID)]},
                {**RESULT, "tool_call_id": OTHER_ID},
            ],
            'user:hello;assistant:[functions.look:0 {"path": "/"}];tool:binfunctions.look:0;'
            'assistant:[functions.look:1 {"path": "/"}];tool:binfunctions.look:1;',
        ),
        (
            TOOLLESS,
            [USER, {**CALLING, "content": "Hm."}, RESULT],
            'user:hello;assistant:Hm.\n<tool_call>\n{"name": "look", "arguments": {"path": "/"}}\n</tool_call>;'
            "user:<tool_response>\nbin\n</tool_response>;",
        ),
    ],
)
def test_every_message_is_rendered_in_order(
    make: MakeRenderer, template: str, messages: list[Any], expected: str
) -> None:
    assert render_text(make(template), *messages) == expected


def test_call_ids_are_shortened_consistently(make: MakeRenderer) -> None:
    template = STRICT.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_call_id }}")
    renderer = make(template)
    text = render_text(renderer, USER, CALLING, RESULT)
    (short,) = {word for word in text.replace("[", " ").replace("bin", " ").replace(";", " ").split() if len(word) == 9}
    assert short.isalnum() and text.count(short) == 2 and ID not in text
    assert render_text(renderer, USER, CALLING, RESULT) == text, "the same each time"
    given = {**CALLING, "tool_calls": [make_call("abc123XYZ")]}
    assert render_text(renderer, USER, given, {**RESULT, "tool_call_id": "abc123XYZ"}).count("abc123XYZ") == 2


def test_user_after_tool_result_is_rendered(make: MakeRenderer) -> None:
    assert render_text(make(STRICT), USER, CALLING, RESULT, MORE).endswith("tool:bin\n\nand more;")


def test_omitted_tools_are_described_in_system_message(make: MakeRenderer) -> None:
    text = render_text(make(TOOLLESS), SYSTEM, USER, tools=[TOOL])
    assert text.startswith("system:be brief;system:# Tools\n") and json.dumps(TOOL["function"]) in text
    assert render_text(make(PLAIN), USER, tools=[TOOL]).count("look") == 1


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_uses_field_of_template(make: MakeRenderer, field: str) -> None:
    assert render_text(make(THINKING), USER, {**ANSWER, field: "hm"}).endswith("assistant:(hm|hm)hi;")


def test_content_joins_reasoning_where_they_are_exclusive(make: MakeRenderer) -> None:
    text = render_text(make(ONE_THOUGHT), USER, {**CALLING, "content": "So.", "reasoning": "hm"}, RESULT)
    assert "assistant:(hm\n\nSo.)[" in text


def test_sdk_fields_of_answers_are_ignored(make: MakeRenderer) -> None:
    extras = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    assert render_text(make(PLAIN), USER, {**ANSWER, **extras}) == render_text(make(PLAIN), USER, ANSWER)
    assert render_text(make(PLAIN), {"role": "assistant", "content": None, "refusal": "no"}) == "assistant:no;"
    part = [{"type": "refusal", "refusal": "no"}]
    assert render_text(make(PLAIN), {"role": "assistant", "content": part}) == "assistant:no;"


POETIC = LOOP.replace("BEFORE", "{% if m.role == 'poet' %}~{% endif %}")
HIDING = TOOLLESS + "{# 'poet' #}"


@pytest.mark.parametrize("template", [PLAIN, TOOLLESS, HIDING])
def test_unknown_or_hidden_role_is_refused(make: MakeRenderer, template: str) -> None:
    with pytest.raises(
        BadRequestError, match=r"'messages\[1\]\.role' is \"poet\".*system, developer, .* or tool"
    ) as refused:
        render_text(make(template), USER, {"role": "poet", "content": "a rose"})
    assert refused.value.param == "messages[1].role"


def test_known_role_is_accepted(make: MakeRenderer) -> None:
    assert render_text(make(POETIC), USER, {"role": "poet", "content": "a rose"}) == "user:hello;~poet:a rose;"
    assert render_text(make(POETIC), USER, {"role": "poet"}) == "user:hello;~poet:;"


def test_empty_assistant_message_is_accepted(make: MakeRenderer) -> None:
    assert render_text(make(PLAIN), USER, {"role": "assistant"}) == "user:hello;assistant:;"


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "contnt": "hi"}, "'messages[0].content' is missing; this message has 'contnt'"),
        ({"role": "user", "content": None}, "'messages[0].content' must be a string or a list of text parts"),
        ({"role": "user", "text": "hi"}, "'messages[0].content' must be a string or a list of text parts"),
        ({"rol": "user", "content": "hi"}, "'messages[0].role' is missing; this message has 'rol': write it 'role'"),
        ({"role": 5, "rol": "user", "content": "hi"}, "'messages[0].role' must be a string such as"),
        (
            {"role": "user", "content": [{"type": "text", "txt": "hi"}]},
            "'messages[0].content[0].text' is missing; this part has 'txt': write it 'text'",
        ),
        (
            {"role": "user", "content": [{"typ": "text", "text": "hi"}]},
            "'messages[0].content[0].type' is missing; this part has 'typ': write it 'type'",
        ),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "'messages[0].content[0].text' must be a string"),
    ],
)  # fmt: skip
def test_misspelt_field_of_message_is_named(make: MakeRenderer, message: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        render_text(make(PLAIN), message)
    assert problem in str(refused.value)


@pytest.mark.parametrize("function", [None, "look", {}, {"name": 5}])
def test_call_without_function_is_refused(make: MakeRenderer, function: Any) -> None:
    with pytest.raises(BadRequestError, match=r"messages\[0\]\.tool_calls\[0\]\.function"):
        render_text(make(PLAIN), {"role": "assistant", "tool_calls": [{"id": ID, "function": function}]})


# ---- how much to reason

SWITCH = (
    CHATML + "{{ '(on)' if enable_thinking else '(off)' if enable_thinking is defined and enable_thinking is false }}"
)
OTHER_SWITCH = CHATML + "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}"
EFFORT = (
    CHATML
    + "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}({{ reasoning_effort }})"
)
EFFORTS = EFFORT + "{# 'max' #}{{ 'max' if false }}"


@pytest.mark.parametrize(
    ("body", "switch", "other", "effort", "efforts"),
    [
        ({}, "(on)", "False", "(medium)", "(medium)"),
        ({"reasoning_effort": "none"}, "(off)", "False", "(low)", "(low)"),
        ({"reasoning_effort": "minimal"}, "(on)", "True", "(low)", "(low)"),
        ({"reasoning_effort": "high"}, "(on)", "True", "(high)", "(high)"),
        ({"reasoning_effort": "xhigh"}, "(on)", "True", "(high)", "(high)"),
        ({"reasoning_effort": "max"}, "(on)", "True", "(high)", "(max)"),
        ({"reasoning_effort": None, "thinking": None}, "(on)", "False", "(medium)", "(medium)"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "(on)", "True", "(medium)", "(medium)"),
        ({"thinking": {"type": "disabled"}}, "(off)", "False", "(low)", "(low)"),
        ({"thinking": {"type": "adaptive"}}, "(on)", "False", "(medium)", "(medium)"),
        ({"thinking": {"type": "adaptive"}, "reasoning_effort": "low"}, "(on)", "True", "(low)", "(low)"),
        ({"thinking": True}, "(on)", "True", "(medium)", "(medium)"),
        ({"think": True}, "(on)", "True", "(medium)", "(medium)"),
        ({"think": False}, "(off)", "False", "(low)", "(low)"),
        ({"think": "high"}, "(on)", "True", "(high)", "(high)"),
        ({"think": False, "thinking": True}, "(on)", "True", "(medium)", "(medium)"),
        ({"think": None}, "(on)", "False", "(medium)", "(medium)"),
        ({"thinking": False, "reasoning_effort": "high"}, "(off)", "False", "(low)", "(low)"),
        ({"enable_thinking": True}, "(on)", "True", "(medium)", "(medium)"),
        ({"reasoning": {"effort": "high"}}, "(on)", "True", "(high)", "(high)"),
        ({"reasoning": {"enabled": False}}, "(off)", "False", "(low)", "(low)"),
        (
            {
                "reasoning_effort": "high",
                "chat_template_kwargs": {"enable_thinking": False, "thinking": 7, "reasoning_effort": "own"},
            },
            "(off)",
            "7",
            "(own)",
            "(own)",
        ),
    ],
)
def test_reasoning_options_of_all_clients(
    make: MakeRenderer, body: dict[str, Any], switch: str, other: str, effort: str, efforts: str
) -> None:
    for template, expected in ((SWITCH, switch), (OTHER_SWITCH, other), (EFFORT, effort), (EFFORTS, efforts)):
        assert render_text(make(template), USER, **body).endswith(expected)


@pytest.mark.parametrize(
    ("body", "param", "expected"),
    [
        ({"reasoning_effort": "very"}, "reasoning_effort", "none, minimal, low, medium, high, xhigh, max"),
        ({"reasoning_effort": 3}, "reasoning_effort", "one of"),
        ({"thinking": "yes"}, "thinking", "enabled"),
        ({"think": 1}, "think", "one of"),
        ({"thinking": {"type": "sometimes"}}, "thinking", "adaptive"),
        ({"thinking": {}}, "thinking", "type"),
        ({"enable_thinking": "no"}, "enable_thinking", "true or false"),
        ({"reasoning": "high"}, "reasoning", "a JSON object"),
        ({"reasoning": {"effort": "very"}}, "reasoning.effort", "one of"),
    ],
)
def test_unknown_reasoning_options_are_refused(
    make: MakeRenderer, body: dict[str, Any], param: str, expected: str
) -> None:
    with pytest.raises(BadRequestError, match=expected) as refused:
        render_text(make(SWITCH), USER, **body)
    assert refused.value.param == param


def test_request_kwargs_override_server_settings(tmp_path: Path) -> None:
    renderer = TemplateRenderer(make_byte_level_tokenizer(tmp_path, SWITCH), template_args={"enable_thinking": False})
    assert render_text(renderer, USER).endswith("(off)")
    assert render_text(renderer, USER, reasoning_effort="low").endswith("(on)")
    assert render_text(renderer, USER, thinking={"type": "adaptive"}).endswith("(off)")
