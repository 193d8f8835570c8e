"""Rendered prompts: ids by the template, and boundaries that another prompt can share."""

import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from support.backend.small_tokenizers import CHATML, make_byte_level_tokenizer, make_sentence_piece_tokenizer
from support.tool_templates import TOOL_TEMPLATE
from warmline_backend.prompt.renderer import RenderedPrompt, TemplateRenderer
from warmline_backend.request.params import BadRequestError

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "hello 😀"}
ANSWER = {"role": "assistant", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}

STRICT = (
    "{% if not messages or messages[-1].role == 'system' %}{{ raise_exception('No user query') }}{% endif %}" + CHATML
)
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# Earlier answers are rewritten once the user has spoken again, as reasoning models' templates do.
FORGETFUL = CHATML.replace(
    "{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else m.content[1:] }}"
)
# The system text goes into the first user message.
MERGED = (
    "<|im_start|>{% for m in messages %}{% if m.role == 'user' %}user\n"
    "{% if loop.index0 == 1 %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
# Without a generation prompt the text is closed off.
CLOSED = CHATML + "{% if not add_generation_prompt %}<|im_end|>{% endif %}"


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def renderer(template: str | None = CHATML) -> TemplateRenderer:
        return TemplateRenderer(make_byte_level_tokenizer(tmp_path_factory.mktemp("model"), template))

    return renderer


def decode_text(renderer: TemplateRenderer, tokens: list[int]) -> str:
    return str(renderer._wrapper.decode(tokens))


def split_at_boundaries(renderer: TemplateRenderer, rendered: RenderedPrompt) -> list[str]:
    """Split the prompt's text at its boundaries."""
    edges = [0, *rendered.boundaries, len(rendered.tokens)]
    return [decode_text(renderer, rendered.tokens[a:b]) for a, b in pairwise(edges)]


def render_chat(renderer: TemplateRenderer, *messages: Any, **body: Any) -> RenderedPrompt:
    return renderer.render("chat", {"messages": list(messages), **body})


def catch_refusal(renderer: TemplateRenderer, endpoint: str = "chat", **body: Any) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        renderer.render(endpoint, body)
    assert caught.value.status == 400
    return caught.value


def test_chat_tokens_equal_tokenized_template(make: Any) -> None:
    renderer = make()
    expected = renderer._wrapper.apply_chat_template([SYSTEM, USER], add_generation_prompt=True)
    assert render_chat(renderer, SYSTEM, USER).tokens == expected


def test_boundaries_are_ends_of_system_and_messages(make: Any) -> None:
    renderer = make()
    rendered = render_chat(renderer, SYSTEM, USER, ANSWER, USER)
    assert split_at_boundaries(renderer, rendered) == [
        "<|im_start|>system\nbe brief<|im_end|>\n",
        "<|im_start|>user\nhello 😀<|im_end|>\n",
        "<|im_start|>assistant\nhi<|im_end|>\n",
        "<|im_start|>user\nhello 😀<|im_end|>\n",
        "<|im_start|>assistant\n",
    ]
    assert rendered.turn_end == rendered.boundaries[-1]


def test_first_boundary_without_system_is_a_message_end(make: Any) -> None:
    renderer = make()
    assert split_at_boundaries(renderer, render_chat(renderer, USER)) == [
        "<|im_start|>user\nhello 😀<|im_end|>\n",
        "<|im_start|>assistant\n",
    ]


def test_end_of_tools_is_found_without_system_message(make: Any) -> None:
    renderer = make()
    first, second, *_ = split_at_boundaries(renderer, render_chat(renderer, USER, tools=[TOOL]))
    assert first.endswith("<|im_end|>\n<|im_start|>user\n") and '"look"' in first
    assert second == "hello 😀<|im_end|>\n"


def test_system_end_is_found_where_template_requires_user(make: Any) -> None:
    renderer = make(STRICT)
    assert split_at_boundaries(renderer, render_chat(renderer, SYSTEM, USER, tools=[TOOL]))[0].endswith(
        "be brief<|im_end|>\n<|im_start|>user\n"
    )


def test_system_end_is_found_where_template_moves_system_text(make: Any) -> None:
    renderer = make(MERGED)
    assert (
        split_at_boundaries(renderer, render_chat(renderer, SYSTEM, USER, ANSWER, USER))[0]
        == "<|im_start|>user\nbe brief\n\n"
    )


def test_turn_end_precedes_think_tail(make: Any) -> None:
    renderer = make(THINKING)
    rendered = render_chat(renderer, USER)
    assert decode_text(renderer, rendered.tokens[rendered.turn_end :]) == "<|im_start|>assistant\n<think>\n"


def test_turn_end_is_found_where_template_closes_last_message(make: Any) -> None:
    renderer = make(CLOSED)
    rendered = render_chat(renderer, USER)
    assert decode_text(renderer, rendered.tokens[rendered.turn_end :]) == "<|im_start|>assistant\n"


def test_rewritten_turns_give_fewer_but_correct_boundaries(make: Any) -> None:
    renderer = make(FORGETFUL)
    rendered = render_chat(renderer, SYSTEM, USER, ANSWER, USER)
    assert (
        split_at_boundaries(renderer, rendered)[2]
        == "<|im_start|>assistant\ni<|im_end|>\n<|im_start|>user\nhello 😀<|im_end|>\n"
    )


def test_next_turn_shares_boundaries(make: Any) -> None:
    renderer = make(THINKING)
    before, after = render_chat(renderer, SYSTEM, USER), render_chat(renderer, SYSTEM, USER, ANSWER, USER)
    assert before.turn_end in after.boundaries
    assert before.tokens[: before.turn_end] == after.tokens[: before.turn_end]


# ---- reasoning and tools


def make_call(**arguments: object) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "look", "arguments": json.dumps(arguments)}}


LOOKS = {"role": "assistant", "content": "", "reasoning_content": "let me look", "tool_calls": [make_call(path="/")]}
SEEN = {"role": "tool", "content": "bin etc", "tool_call_id": "1"}
SAYS = {"role": "assistant", "content": "<think>\nnow I know\n</think>\n\nTwo folders."}
MORE = {"role": "user", "content": "and more?"}
MANNERS = pytest.mark.parametrize("manner", [{}, {"chat_template_kwargs": {"manner": "open"}}], ids=["marked", "open"])
LEFT_OUT, WITHOUT = "the template leaves out its reasoning", "it came without reasoning"


def list_messages(renderer: TemplateRenderer, rendered: RenderedPrompt) -> list[tuple[int, str, str, str]]:
    """Number, role, note and text of each message with a known end."""
    starts = [0, *(message.end for message in rendered.messages)]
    return [
        (message.number, message.role, message.note, decode_text(renderer, rendered.tokens[start : message.end]))
        for start, message in zip(starts, rendered.messages, strict=False)
    ]


@MANNERS
def test_tool_loop_prompts_share_prefix_up_to_turn_end(make: Any, manner: dict[str, Any]) -> None:
    renderer, messages, before = make(TOOL_TEMPLATE), [USER], None
    for step in ([LOOKS, SEEN], [{**LOOKS, "reasoning_content": None}, SEEN], [SAYS, MORE], [LOOKS, SEEN, SEEN], []):
        rendered = render_chat(renderer, *messages, tools=[TOOL], **manner)
        assert "think" in decode_text(renderer, rendered.tokens[rendered.turn_end :]), "the tail comes after the turn"
        if before and messages[-1] is not MORE:
            assert rendered.tokens[: before.turn_end] == before.tokens[: before.turn_end]
            assert before.turn_end in [message.end for message in rendered.messages]
        messages, before = [*messages, *step], rendered


@MANNERS
def test_messages_without_their_reasoning_are_noted(make: Any, manner: dict[str, Any]) -> None:
    renderer = make(TOOL_TEMPLATE)
    within = list_messages(renderer, render_chat(renderer, USER, LOOKS, SEEN, SAYS, SEEN, **manner))
    assert [(number, role, note) for number, role, note, _ in within] == [
        (1, "user", ""), (2, "assistant", ""), (3, "tool", ""), (4, "assistant", ""), (5, "tool", "")
    ]  # fmt: skip
    rendered = render_chat(renderer, USER, LOOKS, SEEN, {**SAYS, "content": "Two folders."}, MORE, **manner)
    after = list_messages(renderer, rendered)
    assert [(number, role, note) for number, role, note, _ in after] == [
        (1, "user", ""), (2, "assistant", LEFT_OUT), (3, "tool", ""), (4, "assistant", WITHOUT), (5, "user", "")
    ]  # fmt: skip
    parts = [text for *_, text in after]
    assert "hello 😀" in parts[0] and "/" in parts[1] and "bin etc" in parts[2] and "Two folders." in parts[3]
    assert "and more?" in parts[4]
    later = {message.end for message in rendered.messages[1:-1]}
    assert not later.intersection(rendered.boundaries), "of use for people only"


def test_disabled_reasoning_is_not_noted(make: Any) -> None:
    renderer = make(TOOL_TEMPLATE)
    rendered = render_chat(renderer, USER, ANSWER, USER, chat_template_kwargs={"enable_thinking": False})
    assert [message.note for message in rendered.messages] == ["", "", ""]


def test_start_of_long_tool_loop_is_listed(make: Any) -> None:
    """There the prompt diverges once its reasoning is left out."""
    renderer = make(TOOL_TEMPLATE)
    rendered = render_chat(renderer, USER, *[LOOKS, SEEN] * 20, SAYS, MORE)
    numbers = [message.number for message in rendered.messages]
    assert numbers == [1, 2, 43]
    assert rendered.messages[1].note == LEFT_OUT and rendered.messages[2].note == ""


def test_token_across_boundary_is_excluded(make: Any) -> None:
    """Here "the" ends one message and " quick" begins the next, without a special token between them."""
    renderer = make("{% for m in messages %}{{ m.content }}{% endfor %}")
    rendered = render_chat(renderer, {"role": "user", "content": "the qu"}, {"role": "user", "content": "ick"})
    (first, *_) = rendered.boundaries
    whole = renderer._wrapper.encode("the quick", add_special_tokens=False)
    assert rendered.tokens == whole
    assert "the qu".startswith(decode_text(renderer, whole[:first])) and len(
        decode_text(renderer, whole[: first + 1])
    ) > len("the qu")


def test_long_conversation_finds_first_and_last_boundaries(make: Any) -> None:
    renderer = make()
    rendered = render_chat(renderer, SYSTEM, *[USER, ANSWER] * 20)
    parts = split_at_boundaries(renderer, rendered)
    assert len(rendered.boundaries) == 10 and parts[0].startswith("<|im_start|>system")
    assert parts[1].count("<|im_end|>") == 32  # the middle, in one piece


def test_long_transcript_needs_few_tokenizations(make: Any) -> None:
    renderer = make()
    talk = {"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 600}
    messages = [SYSTEM, *[talk, talk] * 20]
    text = renderer._wrapper.apply_chat_template(messages, tokenize=False)
    started = time.thread_time()
    tokens = renderer._wrapper.encode(text, add_special_tokens=False)
    once = time.thread_time() - started
    started = time.thread_time()
    rendered = render_chat(renderer, *messages)
    assert len(rendered.tokens) >= len(tokens) > 200_000
    assert time.thread_time() - started < 4 * once + 0.5


def test_string_and_part_contents_render_alike(make: Any) -> None:
    renderer = make()
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "😀"}],
        "name": None,
    }
    assert render_chat(renderer, SYSTEM, parts) == render_chat(renderer, SYSTEM, USER)
    strings = {"role": "user", "content": ["hello ", {"type": "text", "text": "😀"}]}
    assert render_chat(renderer, SYSTEM, strings) == render_chat(renderer, SYSTEM, USER)


def test_tool_message_without_content_is_empty(make: Any) -> None:
    renderer, call = make(), {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = {"role": "assistant", "tool_calls": [call]}
    empty = {"role": "tool", "tool_call_id": "a", "content": ""}
    for nothing in ({**empty, "content": None}, {"role": "tool", "tool_call_id": "a"}, {**empty, "content": []}):
        assert render_chat(renderer, USER, calling, nothing) == render_chat(renderer, USER, calling, empty)


def test_tool_call_arguments_are_objects_in_template(make: Any) -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}"
    renderer = make(template + "{{ k }}={{ v }};{% endfor %}{% endfor %}|{{ m.content }}{% endfor %}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": "x"}'}}
    none = {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}}
    message = {"role": "assistant", "content": None, "tool_calls": [call, none]}
    assert decode_text(renderer, render_chat(renderer, message).tokens) == "a=1;b=x;|"
    assert call["function"]["arguments"] == '{"a": 1, "b": "x"}', "the client's body is left as it was"  # type: ignore[index]


@pytest.mark.parametrize("arguments", ["{broken", '{"a":' * 20_000], ids=["broken", "without end"])
def test_invalid_arguments_stay_a_string(make: Any, arguments: str) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"
    renderer = make("{% for m in messages %}" + calls + "{% endfor %}")
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    assert decode_text(renderer, render_chat(renderer, message).tokens) == arguments


def test_developer_role_becomes_system(make: Any) -> None:
    developer = {"role": "developer", "content": "be brief"}
    renderer = make()
    assert render_chat(renderer, developer, USER) == render_chat(renderer, SYSTEM, USER)
    knowing = make(CHATML + "{# developer #}")
    rendered = render_chat(knowing, developer, USER)
    assert split_at_boundaries(knowing, rendered)[0] == "<|im_start|>developer\nbe brief<|im_end|>\n"


def test_template_kwargs_are_passed_except_reserved(make: Any) -> None:
    renderer = make("{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert (
        decode_text(renderer, render_chat(renderer, USER, chat_template_kwargs={"mood": "gay"}).tokens) == "gayhello 😀"
    )
    for name in ("chat_template", "tokenize", "messages", "add_generation_prompt"):
        assert name in catch_refusal(renderer, messages=[USER], chat_template_kwargs={name: "x"}).message


def test_last_message_can_be_continued(make: Any) -> None:
    renderer = make()
    rendered = render_chat(renderer, USER, ANSWER, continue_final_message=True, add_generation_prompt=False)
    assert split_at_boundaries(renderer, rendered) == [
        "<|im_start|>user\nhello 😀<|im_end|>\n",
        "<|im_start|>assistant\nhi",
    ]
    assert rendered.turn_end == rendered.boundaries[-1]
    error = catch_refusal(renderer, messages=[USER, ANSWER], continue_final_message=True)
    assert error.param == "continue_final_message"


def test_last_boundary_without_generation_prompt_is_prompt_end(make: Any) -> None:
    rendered = render_chat(make(), USER, add_generation_prompt=False)
    assert rendered.boundaries == [len(rendered.tokens)] and rendered.turn_end == len(rendered.tokens)


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": 5, "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "messages[0].tool_calls"),
        ({"messages": [USER, {"role": "usr", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "system", "content": None}, USER]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
        ({"messages": [USER], "tools": [{"name": "f"}]}, "tools[0].function"),
        ({"messages": [USER], "tools": [TOOL, {"type": "function", "function": "f"}]}, "tools[1].function"),
        ({"messages": [USER], "tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
        ({"messages": [USER], "tools": [{"function": {"name": 5}}]}, "tools[0].function.name"),
        (
            {"messages": [USER], "tools": [{"function": {"name": "f", "parameters": "{}"}}]},
            "tools[0].function.parameters",
        ),
        ({"messages": [USER], "tools": [{"type": "web_search"}], "tool_choice": "none"}, "tools[0].type"),
        ({"messages": [USER], "tools": [{"type": 5, "function": {"name": "f"}}]}, "tools[0].type"),
        ({"messages": [USER], "tools": {"a": 1}}, "tools"),
        ({"messages": [USER], "tools": ["x"]}, "tools"),
        ({"messages": [USER], "chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": [USER], "add_generation_prompt": 1}, "add_generation_prompt"),
    ],
)
def test_malformed_chat_names_field(make: Any, body: dict[str, Any], where: str) -> None:
    error = catch_refusal(make(), **body)
    assert error.param == where and f"'{where}'" in error.message


def test_images_are_refused(make: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:..."}}
    error = catch_refusal(make(), messages=[{"role": "user", "content": [image]}])
    phrases = ("image_url is not supported", "does not support image input", "Only 'text' content type is supported.")
    assert all(phrase in error.message for phrase in phrases), "by which agents know to leave the image out"


def test_template_error_is_reported(make: Any) -> None:
    template = CHATML + "{% if messages | length > 5 %}{{ raise_exception('No more messages.') }}{% endif %}"
    error = catch_refusal(make(template), messages=[SYSTEM, *[USER] * 5])
    assert "No more messages." in error.message and error.param == "messages"
    assert "chat template" in catch_refusal(make("{{ messages[0].content + 1 }}"), messages=[USER]).message


def test_chat_without_template_is_refused(make: Any) -> None:
    assert "no chat template" in catch_refusal(make(None), messages=[USER]).message


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]], [1.0, 2, 3.0]])
def test_completion_accepts_token_ids(make: Any, prompt: object) -> None:
    assert make().render("completion", {"prompt": prompt}) == RenderedPrompt(
        tokens=[1, 2, 3], boundaries=[], turn_end=0
    )


@pytest.mark.parametrize("wrap", [False, True])
def test_completion_accepts_text(make: Any, wrap: bool) -> None:
    renderer = make()
    prompt = "the quick <|im_end|> fox"
    rendered = renderer.render("completion", {"prompt": [prompt] if wrap else prompt})
    assert rendered.tokens == renderer._wrapper.encode(prompt)


@pytest.mark.parametrize(
    "prompt", [None, "", [], [""], [[]], ["a", "b"], [[1], [2]], 5, {}, [1, "a"], [True], [-1], [10**9], [1.5]]
)
def test_invalid_prompts_are_refused(make: Any, prompt: object) -> None:
    assert catch_refusal(make(), "completion", prompt=prompt).param == "prompt"


@pytest.mark.parametrize("body", [None, [], "x"])
def test_body_must_be_object(make: Any, body: object) -> None:
    with pytest.raises(BadRequestError, match="JSON object"):
        make().render("chat", body)


def test_empty_prompt_is_refused(make: Any) -> None:
    assert "empty" in catch_refusal(make("{# nothing #}"), messages=[USER]).message


def test_concurrent_rendering(make: Any) -> None:
    renderer, wrong = make(), []
    bodies = [[SYSTEM, {"role": "user", "content": f"the quick {i} " * 50}] for i in range(4)]
    expected = [render_chat(renderer, *messages) for messages in bodies]

    def work(i: int) -> None:
        wrong.extend(i for _ in range(20) if render_chat(renderer, *bodies[i]) != expected[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_boundaries_with_sentencepiece_tokenizer(tmp_path: Path) -> None:
    tokenizer: TokenizerWrapper = make_sentence_piece_tokenizer(tmp_path)
    renderer = TemplateRenderer(tokenizer)
    rendered = renderer.render("chat", {"messages": [SYSTEM, USER]})
    expected = tokenizer.apply_chat_template([SYSTEM, USER], add_generation_prompt=True)
    assert rendered.tokens == expected and len(rendered.boundaries) == 2
    assert tokenizer.decode(rendered.tokens[: rendered.boundaries[0]]).endswith("be brief<|im_end|> \n")


def test_truncation_in_tokenizer_file_is_ignored(tmp_path: Path) -> None:
    tokenizer = make_byte_level_tokenizer(tmp_path)
    tokenizer.backend_tokenizer.enable_truncation(max_length=8)
    rendered = TemplateRenderer(tokenizer).render(
        "chat", {"messages": [{"role": "user", "content": "the quick " * 20}]}
    )
    assert len(rendered.tokens) > 8
