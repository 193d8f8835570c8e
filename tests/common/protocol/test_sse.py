"""SSE framing under any split of the bytes, and folded answers that OpenAI's own models accept."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion

from warmline_common.protocol.sse import (
    DONE,
    ChunkAggregator,
    SseEvent,
    SseParser,
    encode_comment,
    encode_event,
    parse_event,
)

PAYLOADS = st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3)
COMMENTS = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1, max_size=20)


@st.composite
def make_streams(draw: st.DrawFn) -> list[tuple[bytes, SseEvent]]:
    """Draw framed events, and the expected result of parsing each."""
    framed = []
    for _ in range(draw(st.integers(0, 5))):
        if draw(st.booleans()):
            payload, name = (
                json.dumps(draw(PAYLOADS), ensure_ascii=False).encode(errors="replace"),
                draw(st.sampled_from(["", "warmline"])),
            )
            raw = encode_event(payload, name)
            framed.append((raw, SseEvent(data=payload, name=name.encode(), raw=raw)))
        else:
            text = draw(COMMENTS)
            raw = encode_comment(text)
            framed.append((raw, SseEvent(comment=text.encode(), raw=raw)))
    return framed


def split_data(data: bytes, cuts: list[int]) -> list[bytes]:
    return [data[a:b] for a, b in pairwise([0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)])]


@given(make_streams(), st.lists(st.integers(0), max_size=12), st.booleans())
def test_events_are_whole_for_any_split(stream: list[tuple[bytes, SseEvent]], cuts: list[int], crlf: bool) -> None:
    data = b"".join(raw for raw, _ in stream)
    data = data.replace(b"\n", b"\r\n") if crlf else data
    parser = SseParser()
    got = [event for piece in split_data(data, cuts) for event in parser.feed(piece)]
    assert got == [event for _, event in stream]


def test_event_is_emitted_at_blank_line() -> None:
    parser = SseParser()
    assert list(parser.feed(b"data: 1\n")) == []
    assert [event.data for event in parser.feed(b"\ndata: 2")] == [b"1"]
    assert [event.data for event in parser.feed(b"\n\n")] == [b"2"]


def test_lines_end_at_newlines_only() -> None:
    text = "a\u2028b\u0085c"
    (event,) = SseParser().feed(encode_event(json.dumps(text, ensure_ascii=False).encode()))
    assert json.loads(event.data) == text


def test_several_data_lines_form_one_payload() -> None:
    assert parse_event(b"data: one\ndata:two\nid: 7\n\n").data == b"one\ntwo"


def test_done_is_an_event() -> None:
    assert parse_event(DONE).data == b"[DONE]"


def chat_chunk(delta: dict[str, Any], **choice: Any) -> dict[str, Any]:
    head = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 5,
        "model": "m",
        "system_fingerprint": "f",
    }
    return {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **choice}]}


def aggregate(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    fold = ChunkAggregator()
    for chunk in chunks:
        fold.add(chunk)
    return fold.result()


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}


def test_chat_chunks_aggregate_to_chat_completion() -> None:
    def logprob(token: str) -> dict[str, Any]:
        entry = {"token": token, "logprob": -0.5, "bytes": list(token.encode()), "top_logprobs": []}
        return {"content": [entry]}

    answer = aggregate(
        [
            chat_chunk({"role": "assistant", "content": ""}),
            chat_chunk({"content": "Par"}, logprobs=logprob("Par")),
            chat_chunk({"content": "is"}, logprobs=logprob("is")),
            chat_chunk({}, finish_reason="stop"),
            {**chat_chunk({}), "choices": [], "usage": USAGE},
        ]
    )
    completion = ChatCompletion.model_validate(answer, strict=True)
    assert completion.object == "chat.completion" and completion.system_fingerprint == "f"
    (choice,) = completion.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Paris", "stop")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [entry.token for entry in choice.logprobs.content] == ["Par", "is"]
    assert completion.usage is not None and completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 1


def test_other_delta_text_fields_are_aggregated() -> None:
    answer = aggregate(
        [chat_chunk({"reasoning_content": "hm"}), chat_chunk({"reasoning_content": "m"}), chat_chunk({"content": "x"})]
    )
    message = {"role": "assistant", "content": "x", "refusal": None, "reasoning_content": "hmm"}
    assert answer["choices"][0]["message"] == message


def test_tool_calls_aggregate_by_index() -> None:
    def call(index: int, name: str | None, arguments: str, **fields: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
        return {"tool_calls": [{"index": index, "function": function, **fields}]}

    answer = aggregate(
        [
            chat_chunk({"role": "assistant", "content": ""}),
            chat_chunk(call(0, "f", '{"a": ', id="call_0", type="function")),
            chat_chunk(call(1, "g", "{}", id="call_1", type="function")),
            chat_chunk(call(0, None, "1}")),
            chat_chunk({}, finish_reason="tool_calls"),
        ]
    )
    (choice,) = ChatCompletion.model_validate(answer, strict=True).choices
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert [call.model_dump() for call in choice.message.tool_calls or ()] == [
        {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "call_1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]


def test_choices_aggregate_separately_in_any_order() -> None:
    chunks = [
        chat_chunk({"role": "assistant", "content": "B"}, index=1),
        chat_chunk({"reasoning": "hm", "reasoning_content": "hm"}, index=0),
        chat_chunk({"content": "b"}, index=1, finish_reason="length"),
        chat_chunk({"content": "a"}, index=0, finish_reason="stop"),
    ]
    answer = aggregate(chunks)
    ChatCompletion.model_validate(answer, strict=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["a", "Bb"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]
    assert [choice["message"].get("reasoning") for choice in answer["choices"]] == ["hm", None]


def test_completion_chunks_aggregate_to_completion() -> None:
    head = {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m"}

    def chunk(text: str, finish: str | None = None, offset: int | None = None) -> dict[str, Any]:
        logprobs = (
            None
            if offset is None
            else {"tokens": [text], "token_logprobs": [-1.0], "top_logprobs": [{}], "text_offset": [offset]}
        )
        return {**head, "choices": [{"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}]}

    answer = aggregate(
        [chunk("a", offset=0), chunk("b", offset=1), chunk("", "length"), {**head, "choices": [], "usage": USAGE}]
    )
    completion = Completion.model_validate(answer, strict=True)
    (choice,) = completion.choices
    assert (choice.text, choice.finish_reason) == ("ab", "length")
    assert choice.logprobs is not None and choice.logprobs.tokens == ["a", "b"]
    assert choice.logprobs.text_offset == [0, 1] and choice.logprobs.top_logprobs == [{}, {}]


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_empty_answer_aggregates(finish: str) -> None:
    answer = aggregate([chat_chunk({"role": "assistant", "content": ""}), chat_chunk({}, finish_reason=finish)])
    completion = ChatCompletion.model_validate(answer, strict=True)
    assert completion.choices[0].message.content == "" and completion.usage is None
