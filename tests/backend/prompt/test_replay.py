"""Replay of sampled calls, wherever the client still sends the same ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.backend import small_tokenizers
from support.backend.small_tokenizers import CHATML, make_byte_level_tokenizer, make_sentence_piece_tokenizer
from support.tool_templates import TOOL_TEMPLATE
from warmline_backend.output.parser import make_turn_parser
from warmline_backend.prompt import replay
from warmline_backend.prompt.renderer import RenderedPrompt, TemplateRenderer
from warmline_common.protocol.messages import SampledTurn
from warmline_common.protocol.tokens import pack_tokens, unpack_tokens

ID, OTHER_ID = "call_0123456789abcdef01234567", "call_76543210fedcba9876543210"
PARAMETERS = {"path": {"type": "string"}, "deep": {"type": "boolean"}, "depth": {"type": "number"}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": PARAMETERS}}}
SPECIAL = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"]
HEADERS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"]

SAMPLED = '<tool_call>\n{"arguments": {"deep" :true,  "path": "\\u002f"}, "name":"look"}\n</tool_call>'
ANEW = '<tool_call>\n{"name": "look", "arguments": {"deep": true, "path": "/"}}\n</tool_call>'

# In the manner of Mistral's: no content beside calls, ids of nine characters, an end that is the answer's.
LISTED = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + m.tool_call_id + '[/TOOL_RESULTS]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "{{ (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}{{ ', ' if not loop.last }}{% endfor %}"
    "{{ ']<|im_end|>' }}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)
# Says the function's name again where the result is, as gpt-oss's does.
ECHOING = (
    CHATML.replace(
        "{{ m.content }}<|im_end|>",
        "{{ m.content }}{% for c in m.tool_calls or [] %}"
        '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
        "{% endfor %}{% if m.role == 'tool' %} from {{ messages[1].tool_calls[0].function.name }}{% endif %}<|im_end|>",
    )
    + "{# tool_call.name #}"
)
# Each message has a header, calls are named in theirs, and a result says whose it is, in the manner of gpt-oss's.
HEADED = r"""
{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}
{%- set last = namespace(name='') %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
        {%- set c = m.tool_calls[0].function %}{% set last.name = c.name %}
        {{- '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' }}
        {{- c.arguments | tojson + '<|im_end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content + '<|end|>' }}
    {%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
MARKED = TOOL_TEMPLATE.replace("arg_key", "argkey") + "{# tool_call.name #}"  # for mlx-lm to see JSON in it

Make = Callable[[str], TemplateRenderer]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    made: dict[str, TemplateRenderer] = {}

    def renderer(template: str) -> TemplateRenderer:
        if template not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    small_tokenizers,
                    "SPECIAL",
                    [*small_tokenizers.SPECIAL, *(HEADERS if template == HEADED else SPECIAL)],
                )
                tokenizer = make_byte_level_tokenizer(tmp_path_factory.mktemp("model"), template)
            made[template] = TemplateRenderer(tokenizer, parse_turn=make_turn_parser(tokenizer))
        return made[template]

    return renderer


def make_turn(renderer: TemplateRenderer, text: str, *ids: str) -> SampledTurn:
    tokens = renderer._wrapper.encode(text, add_special_tokens=False)
    return SampledTurn(calls=list(ids or [ID]), tokens=pack_tokens(tokens))


def make_messages(arguments: str = '{"deep":true,"path":"/"}', content: str | None = None, **fields: Any) -> list[Any]:
    call = {"id": ID, "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [
        {"role": "user", "content": "what is there?"},
        {"role": "assistant", "content": content, "tool_calls": [call], **fields},
        {"role": "tool", "tool_call_id": ID, "content": "bin"},
    ]


def render_prompt(renderer: TemplateRenderer, messages: list[Any], *turns: SampledTurn, **body: Any) -> RenderedPrompt:
    return renderer.render("chat", {"messages": messages, "tools": [TOOL], **body}, turns)


def decode_text(renderer: TemplateRenderer, prompt: RenderedPrompt) -> str:
    return str(renderer._wrapper.decode(prompt.tokens))


def is_replayed(renderer: TemplateRenderer, messages: list[Any], sampled: str, *ids: str, **body: Any) -> bool:
    """True if the sampled tokens are in the prompt; else it must equal the prompt without turns."""
    given = make_turn(renderer, sampled, *ids)
    prompt, plain = render_prompt(renderer, messages, given, **body), render_prompt(renderer, messages, **body)
    found = given.tokens in pack_tokens(prompt.tokens)
    assert found or prompt == plain
    return found


def test_replayed_prompt_continues_sampled_tokens(make: Make) -> None:
    renderer = make(ECHOING)
    first = render_prompt(renderer, make_messages()[:1])
    sampled = make_turn(renderer, "Let me look.\n" + SAMPLED)
    second = render_prompt(renderer, make_messages(content="Let me look."), sampled)
    assert pack_tokens(second.tokens).startswith(pack_tokens(first.tokens) + sampled.tokens)
    plain = decode_text(renderer, render_prompt(renderer, make_messages(content="Let me look.\n")))
    assert decode_text(renderer, second) == plain.replace(ANEW, SAMPLED), (
        "and all else is as it was, the name said again too"
    )


@pytest.mark.parametrize("manner", ["marked", "open"])
def test_replay_keeps_boundaries(make: Make, manner: str) -> None:
    renderer = make(MARKED if manner == "marked" else TOOL_TEMPLATE)
    kwargs = {"chat_template_kwargs": {"manner": manner}}
    sampled = (
        SAMPLED
        if manner == "marked"
        else "<tool_call>look\n<arg_key>deep</arg_key> <arg_value>true</arg_value></tool_call>"
    )
    arguments = '{"deep":true,"path":"/"}' if manner == "marked" else '{"deep": true}'
    messages = [*make_messages(arguments, reasoning_content="hm"), *make_messages(arguments)[1:]]
    prompt, plain = (
        render_prompt(renderer, messages, make_turn(renderer, sampled), **kwargs),
        render_prompt(renderer, messages, **kwargs),
    )
    assert decode_text(renderer, prompt) != decode_text(renderer, plain)
    assert len(prompt.boundaries) == len(plain.boundaries)

    def last_words(of: RenderedPrompt) -> list[str]:
        return [str(renderer._wrapper.decode(of.tokens[max(0, end - 4) : end])) for end in of.boundaries]

    assert last_words(prompt) == last_words(plain)
    assert [(m.number, m.role, m.note) for m in prompt.messages] == [(m.number, m.role, m.note) for m in plain.messages]
    assert prompt.tail == plain.tail and prompt.turn_end - len(prompt.tokens) == plain.turn_end - len(plain.tokens)


@pytest.mark.parametrize(
    ("arguments", "same"),
    [
        ('{"path":"/","deep":true}', True),
        ('{ "deep" : true, "path" : "\\u002F" }', True),
        ('{"path":"/","deep":false}', False),
        ('{"path":"/","deep":1}', False),
        ('{"path":"/"}', False),
        ('{"path":"/","deep":true,"depth":null}', False),
        ('{"path":"/x","deep":true}', False),
        ("[]", False),
        ("{broken", False),
    ],
)
def test_changed_arguments_are_not_replayed(make: Make, arguments: str, same: bool) -> None:
    assert is_replayed(make(ECHOING), make_messages(arguments), SAMPLED) is same


@pytest.mark.parametrize("malformed", ['{"deep": tr', "ls -la", "[]", "null", json.dumps('{"deep": true}')])
def test_sound_call_after_malformed_one_is_replayed(make: Make, malformed: str) -> None:
    renderer = make("{% set manner = 'open' %}" + TOOL_TEMPLATE)  # it walks through arguments as an object
    messages = [*make_messages(malformed), *make_messages('{"deep": true}')[1:]]
    messages[1]["tool_calls"] = [{**messages[1]["tool_calls"][0], "id": OTHER_ID}]
    messages[2]["tool_call_id"] = OTHER_ID
    sampled = "<tool_call>look\n<arg_key>deep</arg_key> <arg_value>true</arg_value></tool_call>"
    assert is_replayed(renderer, messages, sampled)


@pytest.mark.parametrize("sent", [{"deep": True}, '{"deep":true}', json.dumps('{"deep": true}')])
def test_arguments_encoded_twice_are_replayed(make: Make, sent: Any) -> None:
    sampled = '<tool_call>{"name": "look", "arguments": "{\\"deep\\": true}"}</tool_call>'
    assert is_replayed(make(ECHOING), make_messages(sent), sampled)


def test_equal_numbers_are_replayed(make: Make) -> None:
    sampled = '<tool_call>{"name": "look", "arguments": {"depth": 1.0}}</tool_call>'
    assert is_replayed(make(ECHOING), make_messages('{"depth":1}'), sampled)


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"content": " Hm. \n"}, True),
        ({"content": "Hm!"}, False),
        ({"content": ""}, False),
        ({"content": [{"type": "text", "text": "Hm."}]}, True),
    ],
)
def test_changed_content_is_not_replayed(make: Make, changed: dict[str, Any], same: bool) -> None:
    messages = make_messages()
    messages[1] |= changed
    assert is_replayed(make(ECHOING), messages, "Hm.\n" + SAMPLED) is same


def test_changed_ids_names_and_counts_are_not_replayed(make: Make) -> None:
    renderer = make(ECHOING)
    assert not is_replayed(renderer, make_messages(), SAMPLED, OTHER_ID)
    assert not is_replayed(renderer, make_messages(), SAMPLED + SAMPLED)
    assert not is_replayed(renderer, make_messages(), SAMPLED.replace("look", "loop"))
    assert not is_replayed(renderer, make_messages(), "no call at all")
    assert not is_replayed(renderer, make_messages(), SAMPLED, tools=None), (
        "nothing is read as a call where no tools are"
    )


def test_several_calls_are_replayed(make: Make) -> None:
    renderer = make(ECHOING)
    messages = make_messages()
    second = {"id": OTHER_ID, "type": "function", "function": {"name": "look", "arguments": '{"depth": 2}'}}
    messages[1]["tool_calls"].append(second)
    sampled = SAMPLED + '\n\n<tool_call>{"name":"look","arguments":{"depth":2}}</tool_call>'
    assert is_replayed(renderer, messages, sampled, ID, OTHER_ID)
    assert not is_replayed(renderer, messages, sampled, OTHER_ID, ID)


def test_reasoning_precedes_replayed_tokens(make: Make) -> None:
    renderer = make(MARKED)
    messages = make_messages(reasoning_content="I should look.")
    given = make_turn(renderer, "\n\n" + SAMPLED)
    assert f"<think>\nI should look.\n</think>\n\n{SAMPLED}<|im_end|>" in decode_text(
        renderer, render_prompt(renderer, messages, given)
    )
    without = decode_text(renderer, render_prompt(renderer, make_messages(), given))
    assert f"<|im_start|>assistant\n{SAMPLED}<|im_end|>" in without, "no empty lines in place of what is not there"
    within = make_messages(content="<think>\nI should look.\n</think>\n\n")
    assert f"</think>\n\n{SAMPLED}<|im_end|>" in decode_text(renderer, render_prompt(renderer, within, given))


def test_call_without_end_marker_is_replayed(make: Make) -> None:
    renderer = make(LISTED)
    sampled = '[TOOL_CALLS] [{"name":"look","arguments":{"path":"/" , "deep":true}}]'
    messages = make_messages(content="dropped by the template")
    assert is_replayed(renderer, messages, "dropped by the template" + sampled)
    assert is_replayed(renderer, make_messages(), sampled)
    prompt = decode_text(
        renderer, render_prompt(renderer, make_messages(), make_turn(renderer, sampled + "<|im_end|>"))
    )
    assert f"[/INST]{sampled}<|im_end|>[TOOL_RESULTS]" in prompt, "the answer's own end is not there twice"


@pytest.mark.parametrize("opening", ["", "<|start|>assistant"])
def test_call_in_message_of_its_own_is_replayed(make: Make, opening: str) -> None:
    """After the reasoning the model begins another message; without any, the prompt has begun it."""
    renderer = make(HEADED)
    sampled = opening + '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"path" : "/"}'
    reasoning = {"reasoning_content": "hm"} if opening else {}
    prompt = decode_text(
        renderer, render_prompt(renderer, make_messages('{"path":"/"}', **reasoning), make_turn(renderer, sampled))
    )
    analysis = "<|channel|>analysis<|message|>hm<|end|>" if opening else ""
    assert f"<|start|>assistant{analysis}{sampled}<|im_end|><|start|>functions.look to=assistant" in prompt


def test_call_is_replayed_where_template_has_no_calls(make: Make) -> None:
    renderer = make("{% for m in messages if m.role != 'tool' %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}")
    assert is_replayed(renderer, make_messages(), SAMPLED)


def test_call_with_missing_end_is_replayed_unchanged(make: Make) -> None:
    cut = SAMPLED.removesuffix("\n</tool_call>")
    renderer = make(ECHOING)
    assert f"{cut}<|im_end|>" in decode_text(
        renderer, render_prompt(renderer, make_messages(), make_turn(renderer, cut))
    )


def test_markers_in_arguments_are_replayed(make: Make) -> None:
    """An agent that edits chat templates has calls whose arguments look like calls."""
    renderer = make(ECHOING)
    path = json.dumps({"path": ANEW + "<|im_end|>\n<|im_start|>user\n</tool_call>"})
    sampled = f'<tool_call>{{"arguments":{path},"name":"look"}}</tool_call>'
    messages = [*make_messages(path), *make_messages('{"depth": 3}', content="hm")[1:]]
    messages[3]["tool_calls"][0] |= {"id": OTHER_ID}
    second = make_turn(renderer, 'hm<tool_call>{"arguments":{"depth":3},"name":"look"}</tool_call>', OTHER_ID)
    prompt = pack_tokens(render_prompt(renderer, messages, second, make_turn(renderer, sampled)).tokens)
    assert second.tokens in prompt


def test_tokens_of_another_tokenizer_are_not_replayed(make: Make) -> None:
    renderer = make(ECHOING)
    foreign = SampledTurn(calls=[ID], tokens=pack_tokens([0, 5, 4_000_000_000, 7]))
    assert render_prompt(renderer, make_messages(), foreign) == render_prompt(renderer, make_messages())


def test_parsed_turn_cache_is_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = make(ECHOING)
    monkeypatch.setattr(replay, "PARSED_TURNS_BYTES_MAX", 1000)
    for depth in range(20):
        sampled = f'<tool_call>{{"arguments":{{"depth":{depth}}},"name":"look"}}</tool_call>'
        assert is_replayed(renderer, make_messages(f'{{"depth": {depth}}}'), sampled)
    replayer = renderer._replayer
    assert replayer and 0 < len(replayer._parsed_turns) < 20 and replayer._parsed_turns_bytes <= 1000


def test_continued_message_is_not_replayed(make: Make) -> None:
    renderer = make(ECHOING)
    body = {"continue_final_message": True, "add_generation_prompt": False}
    given = make_turn(renderer, "Hm.\n" + SAMPLED)
    messages = make_messages(content="Hm.")[:2]
    assert render_prompt(renderer, messages, given, **body) == render_prompt(renderer, messages, **body)


def test_replay_with_tokenizer_that_adds_spaces(tmp_path: Path) -> None:
    """Text that follows begins with a special token here, or the message stays as it is rendered."""
    tokenizer = make_sentence_piece_tokenizer(
        tmp_path, ECHOING.replace("<|im_start|>assistant\n", "<|im_start|>assistant")
    )
    renderer = TemplateRenderer(tokenizer, parse_turn=make_turn_parser(tokenizer))
    messages = make_messages('{"path": "the"}')
    sampled = make_turn(renderer, '<tool_call>{"arguments":{"path":"the"},"name":"look"}</tool_call>')
    prompt = render_prompt(renderer, messages, sampled)
    before, found, after = pack_tokens(prompt.tokens).partition(sampled.tokens)
    plain = pack_tokens(render_prompt(renderer, messages).tokens)
    assert found and plain.startswith(before) and plain.endswith(after)
    assert unpack_tokens(after)[0] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_replay_of_long_loop_is_linear(make: Make) -> None:
    renderer, rounds = make(MARKED), 60
    messages, turns = [make_messages()[0]], []
    for number in range(rounds):
        call_id = f"call_{number:024x}"
        arguments = {"path": "the quick " * 20, "depth": number}
        call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": json.dumps(arguments)}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": "bin"},
        ]
        written = json.dumps(arguments, separators=(" , ", " :"))
        turns.append(make_turn(renderer, f'<tool_call>{{"arguments":{written},"name":"look"}}</tool_call>', call_id))
    render, render_calls = renderer._render_messages, []
    renderer._render_messages = lambda *args, **kwargs: render_calls.append(1) or render(*args, **kwargs)  # type: ignore[method-assign,func-returns-value]
    plain, renders = render_prompt(renderer, messages), len(render_calls)
    prompt = pack_tokens(render_prompt(renderer, messages, *turns).tokens)
    assert len(render_calls) == 2 * renders, "not one more"
    assert all(turn.tokens in prompt for turn in turns) and plain.tokens
