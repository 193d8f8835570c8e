"""Conversations without a user, results without calls, developers' messages, and pictures of tools, by any template."""

from itertools import pairwise
from typing import Any

import pytest

from support.backend.small_tokenizers import CHATML
from support.backend.template_rendering import MakeRenderer, cache_renderers, render_text
from warmline_backend.prompt.renderer import TemplateRenderer
from warmline_common.protocol.media_parts import find_placeholder

SYSTEM = {"role": "system", "content": "be brief"}
DEVELOPER = {"role": "developer", "content": "be kind"}
USER = {"role": "user", "content": "hello"}
MORE = {"role": "user", "content": "more"}
ANSWER = {"role": "assistant", "content": "hi"}
ID, OTHER_ID = "call_0123456789abcdef01234567", "call_76543210fedcba9876543210"
CALL = {"id": ID, "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": "So far.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": ID, "content": "bin"}
START = {"role": "user", "content": "Continue."}
RESULT_AS_USER = {"role": "user", "content": "<tool_response>\nbin\n</tool_response>"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

TURN = "{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function }}]{% endfor %};"
PLAIN = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}" + TURN + "{% endfor %}"
ASKED = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no user') }}{% endif %}"
)
ASKED += PLAIN
ALTERNATING = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in rest if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% endfor %}" + PLAIN
)
# The first message is taken for the user's where there are tools.
TOOLS_FIRST = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }};{% set messages = messages[1:] %}{% endif %}"
    "{% if tools %}{% if not messages %}{{ raise_exception('no place for tools') }}{% endif %}"
    "{{ tools | tojson }}{{ messages[0].content }};{% set messages = messages[1:] %}{% endif %}" + PLAIN
).replace("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}", "")
SKIPPING = PLAIN.replace(TURN, "{% if not loop.first or m.role != 'assistant' %}" + TURN + "{% endif %}")
PAIRED = PLAIN.replace(
    "{{ m.role }}",
    "{% if m.role == 'tool' and not (loop.previtem and (loop.previtem.tool_calls or loop.previtem.role == 'tool')) %}"
    "{{ raise_exception('no call') }}{% endif %}{{ m.role }}",
)
ANSWERED = PLAIN.replace(
    "{{ m.role }}",
    "{% if m.tool_calls and not loop.last and loop.nextitem.role != 'tool' %}{{ raise_exception('no result') }}"
    "{% endif %}{{ m.role }}",
)
NAMED = PLAIN.replace("{{ m.role }}", "{{ m.role + (' of ' + m.name if m.role == 'tool' else '') }}")
# The system's text is put into the last message, and only if that is a user's.
LAST_USER = (
    "{% set first = messages[0] %}{% for m in messages if m.role != 'system' %}"
    "{% if loop.last and m.role == 'user' and first.role == 'system' %}{{ first.content }};{% endif %}"
    + TURN
    + "{% endfor %}"
)
COMPARING = (
    "{% for m in messages %}{% if m.role == 'developer' %}{% endif %}"
    "{% if m.role in ('system', 'user', 'assistant') %}" + TURN + "{% endif %}{% endfor %}"
)
AT_START = PLAIN.replace(
    "{{ m.role }}", "{% if m.role == 'developer' and not loop.first %}{% continue %}{% endif %}{{ m.role }}"
)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> MakeRenderer:
    return cache_renderers(tmp_path_factory.mktemp("models"))


USERLESS = {
    "system alone": [SYSTEM],
    "system and summary": [SYSTEM, ANSWER],
    "summary alone": [ANSWER],
    "after compaction": [SYSTEM, CALLING, RESULT],
    "call first": [CALLING, RESULT],
    "greeting": [ANSWER, USER],
    "greeting after system": [SYSTEM, ANSWER, USER, ANSWER],
}


@pytest.mark.parametrize("template", [ASKED, ALTERNATING], ids=["asked", "alternating"])
@pytest.mark.parametrize("messages", USERLESS.values(), ids=USERLESS)
def test_user_message_is_added_before_conversation(make: MakeRenderer, template: str, messages: list[Any]) -> None:
    renderer, system = make(template), messages[:1] if messages[0] is SYSTEM else []
    expected = render_text(renderer, *system, START, *messages[len(system) :])
    assert "user:Continue.;" in expected
    assert render_text(renderer, *messages) == expected
    assert render_text(make(PLAIN), *messages) == expected.replace("user:Continue.;", ""), "and nowhere else"


@pytest.mark.parametrize("template", [ASKED, ALTERNATING, TOOLS_FIRST], ids=["asked", "alternating", "tools first"])
def test_next_turn_begins_with_the_last_one(make: MakeRenderer, template: str) -> None:
    turns = [SYSTEM, CALLING, RESULT, ANSWER, USER, ANSWER]
    texts = [render_text(make(template), *turns[:count], tools=[TOOL]) for count in range(1, len(turns) + 1)]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert texts[-1].count("Continue.") == 1


def test_beginning_that_is_left_out_is_shown(make: MakeRenderer) -> None:
    assert render_text(make(SKIPPING), ANSWER, USER) == "user:Continue.;assistant:hi;user:hello;"
    text = render_text(make(TOOLS_FIRST), SYSTEM, CALLING, RESULT, tools=[TOOL])
    assert text.startswith("be brief;") and "Continue.;assistant:So far.[" in text


def test_result_without_its_call_is_a_users_text(make: MakeRenderer) -> None:
    renderer = make(PAIRED)
    for messages in ([USER, RESULT, ANSWER], [SYSTEM, RESULT], [USER, ANSWER, RESULT, RESULT]):
        fitted = [RESULT_AS_USER if message is RESULT else message for message in messages]
        assert render_text(renderer, *messages) == render_text(renderer, *fitted)
    second = {**RESULT, "tool_call_id": OTHER_ID, "content": "etc"}
    assert render_text(renderer, USER, CALLING, RESULT, second).endswith("tool:bin;tool:etc;")
    assert render_text(make(PLAIN), USER, RESULT) == "user:hello;tool:bin;"


def test_call_without_its_result_is_answered(make: MakeRenderer) -> None:
    renderer = make(ANSWERED)
    missing = {"role": "tool", "tool_call_id": ID, "content": "[no result]"}
    for messages in ([USER, CALLING, MORE], [USER, CALLING, ANSWER, MORE, CALLING, RESULT, MORE]):
        position = messages.index(CALLING) + 1
        expected = render_text(renderer, *messages[:position], missing, *messages[position:])
        assert render_text(renderer, *messages) == expected and expected.count("[no result]") == 1
    assert render_text(renderer, USER, CALLING).endswith("assistant:So far.[{'name': 'look', 'arguments': {}}];")
    assert "[no result]" not in render_text(make(PLAIN), USER, CALLING, MORE)


def test_result_of_unknown_id_has_name_of_call_before(make: MakeRenderer) -> None:
    calls = [CALL, {"id": OTHER_ID, "type": "function", "function": {"name": "read", "arguments": "{}"}}]
    results = [{**RESULT, "tool_call_id": "other"}, {"role": "tool", "content": "etc"}]
    text = render_text(make(NAMED), USER, {**CALLING, "tool_calls": calls}, *results)
    assert text.endswith("tool of look:bin;tool of read:etc;")
    swapped = [{**RESULT, "tool_call_id": OTHER_ID}, RESULT]
    assert render_text(make(NAMED), USER, {**CALLING, "tool_calls": calls}, *swapped).endswith(
        "tool of read:bin;tool of look:bin;"
    )


def test_system_message_is_shown_before_results_too(make: MakeRenderer) -> None:
    text = render_text(make(LAST_USER), SYSTEM, USER, CALLING, RESULT)
    assert text.startswith("user:be brief\n\nhello;assistant:So far.")


@pytest.mark.parametrize(
    "messages",
    [[DEVELOPER, USER], [SYSTEM, DEVELOPER, USER], [USER, ANSWER, DEVELOPER, MORE]],
    ids=["first", "second", "late"],
)
def test_developer_message_is_shown(make: MakeRenderer, messages: list[Any]) -> None:
    as_system = [{**message, "role": "system"} if message is DEVELOPER else message for message in messages]
    for template in (COMPARING, AT_START):
        assert render_text(make(template), *messages) == render_text(make(template), *as_system)
    assert "developer:be kind;" in render_text(make(PLAIN + "{# developer #}"), *messages), "as it is where it is shown"


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
TEXT = {"type": "text", "text": "taken"}
LINE = "[an image, which this model can't see]"


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([PICTURE], LINE),
        ([TEXT, PICTURE], f"taken\n{LINE}"),
        ([PICTURE, TEXT], f"{LINE}\ntaken"),
        ([TEXT, TEXT, PICTURE, PICTURE], f"takentaken\n{LINE}\n{LINE}"),
        ([{"type": "text", "text": "taken:\n"}, PICTURE], f"taken:\n{LINE}"),
        ([{"type": "input_image", "image_url": "data:"}], LINE),
        ([{"type": "image", "source": {}}], LINE),
        ([{"type": "file", "file": {"file_id": "f"}}], "[a document, which this model can't read]"),
        ([{"type": "input_audio", "input_audio": {}}], find_placeholder("input_audio")),
    ],
)
def test_picture_in_tool_result_is_a_line(make: MakeRenderer, parts: list[Any], expected: str) -> None:
    text = render_text(make(PLAIN), USER, CALLING, {**RESULT, "content": parts}, MORE)
    assert text.endswith(f";tool:{expected};user:more;")


def test_boundaries_are_found_after_an_added_message(make: MakeRenderer) -> None:
    template = CHATML + "{% if 'user' not in messages | map(attribute='role') %}{{ raise_exception('no') }}{% endif %}"
    renderer: TemplateRenderer = make(template)
    prompt = renderer.render("chat", {"messages": [SYSTEM, ANSWER, USER]})
    texts = [renderer._wrapper.decode(prompt.tokens[:end]) for end in prompt.boundaries]
    assert texts[0] == "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n"
    assert texts[-2].endswith("Continue.<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n")
    assert texts[-1].endswith("hello<|im_end|>\n")
    assert [end.number for end in prompt.messages if end.role != "tools"][-2:] == [2, 3]
