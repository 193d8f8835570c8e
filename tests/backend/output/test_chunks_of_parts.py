"""Parts of an answer as OpenAI's chunks, streamed and whole; the sampled turn of its calls."""

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from openai.lib.streaming._deltas import accumulate_delta
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from support.backend.tool_families import BY_NAME, TOOLS
from warmline_backend.generation.events import EndedEvent, GenerationEvent, HeldEvent, SampledLogprobs, TokenEvent
from warmline_backend.output.events import Text
from warmline_backend.output.expected import ExpectedOutput
from warmline_backend.output.parser import OutputParser, parse_turn
from warmline_backend.request.params import GenerationParams
from warmline_backend.server.chunk_encoder import TokenDecoder
from warmline_backend.server.prompt_store import StoredPrompt
from warmline_backend.server.response import SILENT_TOKENS_PER_COMMENT, GenerationResponse
from warmline_common.protocol.messages import GenerationResult, Timings, decode
from warmline_common.protocol.sse import ChunkAggregator, SseParser
from warmline_common.protocol.sse import SseEvent as Sent
from warmline_common.protocol.tokens import unpack_tokens

CALL = '<tool_call>\n{"name":"get_weather",  "arguments": {"days": "3", "city": "São Paulo"}}\n</tool_call>'
PROMPT = StoredPrompt(
    id="p",
    endpoint="chat",
    tokens=[1, 2, 3],
    params=GenerationParams(max_tokens=500),
    boundaries=[],
    turn_end=0,
    messages=[],
    expected_output=ExpectedOutput(has_parts=True, tail="<think>\n", tools=TOOLS),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerWrapper:
    return BY_NAME["json_tools"].tokenizer(tmp_path_factory.mktemp("answer"))


def make_events(
    tokenizer: TokenizerWrapper, text: str, finish: str = "stop", stop: tuple[str, ...] = ()
) -> list[GenerationEvent]:
    """Engine events of a model that generates this text."""
    stream, events = OutputParser(tokenizer, stop, PROMPT.expected_output), list[GenerationEvent]()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for token in tokens:
        parts = stream.add(token)
        events.append(TokenEvent(parts, token, SampledLogprobs(token, -0.5, []), stream.is_reasoning, stream.stop_word))
        if stream.is_stopped:
            break
    else:
        last = events.pop()
        assert isinstance(last, TokenEvent)
        events.append(replace(last, parts=[*last.parts, *stream.finish(finish == "stop")]))
    settled = GenerationResult(
        boot="b",
        generation=0,
        request_id="r",
        finish=finish,
        resident="",
        generated=b"",
        prefilled_until=0,
        checkpoints=[],
        positions=[],
        timings=Timings(decoded=len(tokens)),
    )
    return [*events, EndedEvent(settled, 0)]


def render_answers(tokenizer: TokenizerWrapper, events: list[GenerationEvent]) -> tuple[list[Sent], dict[str, Any]]:
    """Streamed chunks, and the JSON of the whole answer; call ids are random."""

    async def run() -> tuple[bytes, object]:
        streamed = b"".join(
            [data async for data in _make_encoder(tokenizer, events).stream(_make_queue(events), closing_event=True)]
        )
        return streamed, await _make_encoder(tokenizer, events).fold(_make_queue(events))

    streamed, whole = asyncio.run(run())
    assert isinstance(whole, dict)
    return list(SseParser().feed(streamed)), whole


def _make_encoder(tokenizer: TokenizerWrapper, events: list[GenerationEvent]) -> GenerationResponse:
    return GenerationResponse(PROMPT, "r", "m", TokenDecoder(tokenizer), with_usage=True)


def _make_queue(events: list[GenerationEvent]) -> "asyncio.Queue[GenerationEvent]":
    queue: asyncio.Queue[GenerationEvent] = asyncio.Queue()
    for event in events:
        queue.put_nowait(event)
    return queue


def parse_chunks(sent: list[Sent]) -> list[dict[str, Any]]:
    return [json.loads(event.data) for event in sent if event.data not in (b"", b"[DONE]") and not event.name]


def aggregate(sent: list[Sent]) -> dict[str, Any]:
    fold = ChunkAggregator()
    for chunk in parse_chunks(sent):
        fold.add(chunk)
    return fold.result()


def remove_ids(answer: dict[str, Any]) -> str:
    return re.sub(r"call_[0-9a-f]{24}", "call_", json.dumps(answer))


def find_result(sent: list[Sent]) -> GenerationResult:
    return decode(next(event.data for event in sent if event.name), GenerationResult)


def test_streamed_and_whole_answers_are_equal_to_sdk(tokenizer: TokenizerWrapper) -> None:
    sent, whole = render_answers(tokenizer, make_events(tokenizer, f"Hm.\n</think>\n\nI look.\n{CALL}\n{CALL}"))
    for chunk in parse_chunks(sent):
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert remove_ids(aggregate(sent)) == remove_ids(whole)
    (choice,) = ChatCompletion.model_validate(whole, strict=True).choices
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hm.", "Hm.", "I look.")
    calls = choice.message.tool_calls
    assert calls is not None and len({call.id for call in calls}) == 2
    assert all(re.fullmatch("call_[0-9a-f]{24}", call.id) and call.type == "function" for call in calls)
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"days": 3, "city": "São Paulo"}'}
    ] * 2
    assert choice.finish_reason == "tool_calls"
    assert parse_chunks(sent)[0]["choices"][0]["delta"] == {"role": "assistant", "refusal": None}


@pytest.mark.parametrize(
    "text", ["Hm.", f"Hm.\n</think>\n\n{CALL}", f"Hm.\n</think>\n\nI look.\n{CALL}", "</think>Yes."]
)
def test_content_deltas_add_up_by_sdk_rules(tokenizer: TokenizerWrapper, text: str) -> None:
    """Content is null beside calls and "" without any other part, in a stream as well."""
    sent, whole = render_answers(tokenizer, make_events(tokenizer, text))
    message: dict[object, object] = {}
    for chunk in parse_chunks(sent):
        for choice in chunk["choices"]:
            message = accumulate_delta(message, choice["delta"])
    assert message.get("content") == whole["choices"][0]["message"]["content"]


def test_calls_without_text_have_null_content(tokenizer: TokenizerWrapper) -> None:
    sent, whole = render_answers(tokenizer, make_events(tokenizer, f"Hm.\n</think>\n\n{CALL}"))
    assert whole["choices"][0]["message"]["content"] is None is aggregate(sent)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("text", "finish", "finish_reason"),
    [
        (f"</think>{CALL}", "stop", "tool_calls"),
        (f"</think>{CALL}", "length", "length"),
        (f"</think>{CALL}\n{CALL[:30]}", "length", "length"),
        (f"</think>{CALL[:30]}", "stop", "stop"),
        (f"</think>{CALL[:30]}", "length", "length"),
        ("</think><tool_call>\nnothing\n</tool_call>", "stop", "stop"),
    ],
)
def test_finish_reason_is_tool_calls_only_with_a_call(
    tokenizer: TokenizerWrapper, text: str, finish: str, finish_reason: str
) -> None:
    _, whole = render_answers(tokenizer, make_events(tokenizer, text, finish))
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == finish_reason
    assert bool(choice["message"].get("tool_calls")) or choice["message"]["content"], "never nothing at all"


def test_reason_of_a_cut_and_text_after_the_last_token_are_sent(tokenizer: TokenizerWrapper) -> None:
    *events, ended = make_events(tokenizer, '</think>{"a": 1', "length")
    assert isinstance(ended, EndedEvent)
    held: list[GenerationEvent] = [HeldEvent()] * 2 * SILENT_TOKENS_PER_COMMENT
    ended = replace(ended, parts=(Text(", "),), stop_reason="the answer can't be held to its schema: /a: is odd")
    sent, whole = render_answers(tokenizer, [*events, *held, ended])
    (choice,) = whole["choices"]
    assert choice == aggregate(sent)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", ended.stop_reason)
    assert choice["message"]["content"] == '{"a": 1, '
    assert [event.comment for event in sent if event.comment] == [b"held"] * 2


def test_sampled_turn_parses_to_emitted_parts(tokenizer: TokenizerWrapper) -> None:
    sent, _ = render_answers(tokenizer, make_events(tokenizer, f"Hm.\n</think>\n\nI look.\n{CALL}\n{CALL}\n"))
    turn, message = find_result(sent).turn, aggregate(sent)["choices"][0]["message"]
    assert turn is not None and turn.calls == [call["id"] for call in message["tool_calls"]]
    tokens = unpack_tokens(turn.tokens)
    assert tokenizer.decode(tokens) == f"\n\nI look.\n{CALL}\n{CALL}"
    content, calls = parse_turn(tokens, tokenizer, TOOLS)
    assert content.strip() == message["content"]
    assert calls == [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


def test_answer_without_calls_has_no_sampled_turn(tokenizer: TokenizerWrapper) -> None:
    sent, _ = render_answers(tokenizer, make_events(tokenizer, "Hm.\n</think>\n\nNo."))
    assert find_result(sent).turn is None


def test_reasoning_tokens_are_counted(tokenizer: TokenizerWrapper) -> None:
    sent, whole = render_answers(tokenizer, make_events(tokenizer, "Hm.</think>Yes."))
    assert (
        whole["usage"]["completion_tokens_details"]
        == {"reasoning_tokens": 4}
        == aggregate(sent)["usage"]["completion_tokens_details"]
    )
    assert whole["usage"]["completion_tokens"] == 8


def join_logprobs(choice: dict[str, Any], name: str = "content") -> str:
    """Text of a choice's log-probabilities, or of those in one of its chunks."""
    return b"".join(bytes(entry["bytes"]) for entry in (choice["logprobs"] or {}).get(name) or ()).decode()


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        (f"Hm.\n</think>\n\nI look é😀.\n{CALL}\n", ()),
        (f"</think>One.\n{CALL}\n Two. {CALL}Three.\n", ()),
        ("Hm. </think>I look and END here", ("END",)),
        ("Hm.</think>I look and EN", ("END",)),
        (f"</think>a{CALL[:30]}", ()),
        ("Hm. I never answer", ()),
        (f"Hm.</think>{CALL}", ()),
        ("</think>", ()),
    ],
)
def test_logprobs_cover_exactly_the_content(tokenizer: TokenizerWrapper, text: str, stop: tuple[str, ...]) -> None:
    sent, whole = render_answers(tokenizer, make_events(tokenizer, text, stop=stop))
    (choice,) = whole["choices"]
    assert join_logprobs(choice) == (choice["message"]["content"] or "")
    assert join_logprobs(choice, "reasoning_content") == choice["message"].get("reasoning_content", "")
    assert choice["logprobs"] is None or choice["logprobs"]["refusal"] is None
    for chunk in parse_chunks(sent):
        for delta in chunk["choices"]:
            assert join_logprobs(delta) == (delta["delta"].get("content") or "")
            assert join_logprobs(delta, "reasoning_content") == delta["delta"].get("reasoning_content", "")


def test_long_call_emits_progress(tokenizer: TokenizerWrapper) -> None:
    sent, _ = render_answers(tokenizer, make_events(tokenizer, f"</think>{CALL}"))
    signs = [event for event in sent if event.comment == b"held"]
    assert len(signs) == len(tokenizer.encode(CALL, add_special_tokens=False)) // SILENT_TOKENS_PER_COMMENT


def test_stop_words_apply_to_content_only(tokenizer: TokenizerWrapper) -> None:
    stop = ("São", "look", "Hm")
    _, whole = render_answers(tokenizer, make_events(tokenizer, f"Hm.</think>{CALL}I look.", stop=stop))
    message = whole["choices"][0]["message"]
    assert (message["reasoning"], message["content"], len(message["tool_calls"])) == ("Hm.", "I ", 1)
    assert whole["choices"][0]["stop_reason"] == "look"
