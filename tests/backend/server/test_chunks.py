"""Chunks as the OpenAI SDK reads them, one by one and folded."""

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from support.backend.small_tokenizers import make_byte_level_tokenizer, make_sentence_piece_tokenizer
from warmline_backend.server.chunk_encoder import ChunkEncoder, TokenDecoder
from warmline_common.protocol.sse import ChunkAggregator, SseParser


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> TokenizerWrapper:
    return make_byte_level_tokenizer(tmp_path_factory.mktemp("bpe"))


def make_payloads(*events: bytes) -> list[dict[str, Any]]:
    parser = SseParser()
    return [json.loads(event.data) for event in parser.feed(b"".join(events))]


def aggregate(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    fold = ChunkAggregator()
    for chunk in chunks:
        fold.add(chunk)
    return fold.result()


def get_first_id(tokenizer: TokenizerWrapper, text: str) -> int:
    return int(tokenizer.encode(text, add_special_tokens=False)[0])


def test_chat_stream_parses_with_openai_sdk() -> None:
    writer = ChunkEncoder("chat", "r1", "smol", 1234)
    stream = [
        writer.encode_role(),
        writer.encode_text("Par"),
        writer.encode_text("is"),
        writer.encode_finish("stop"),
        writer.encode_usage(10, 2, 8, {"reasoning_tokens": 0}),
    ]
    chunks = make_payloads(*stream)
    parsed = [ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in chunks]
    assert {(chunk.id, chunk.model, chunk.created) for chunk in parsed} == {("chatcmpl-r1", "smol", 1234)}
    assert [chunk.choices[0].delta.content for chunk in parsed[:4]] == [None, "Par", "is", None]
    assert [chunk.choices[0].delta.role for chunk in parsed[:4]] == ["assistant", None, None, None]
    assert [chunk.choices[0].finish_reason for chunk in parsed[:4]] == [None, None, None, "stop"]
    assert parsed[4].choices == [] and parsed[4].usage is not None
    answer = ChatCompletion.model_validate(aggregate(chunks), strict=True)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Paris", "stop")
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 2, 12)
    assert usage.prompt_tokens_details.cached_tokens == 8


def test_completion_stream_parses_with_openai_sdk() -> None:
    writer = ChunkEncoder("completion", "r1", "smol", 1234)
    assert writer.encode_role() == b""
    chunks = make_payloads(
        writer.encode_text(" Par"),
        writer.encode_text("is"),
        writer.encode_finish("stop", "END"),
        writer.encode_usage(3, 2, 0, {"reasoning_tokens": 0}),
    )
    Completion.model_validate(chunks[2], strict=True)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:3]] == [None, None, "stop"]
    assert [chunk["object"] for chunk in chunks] == ["text_completion"] * 4
    answer = Completion.model_validate(aggregate(chunks), strict=True)
    assert (answer.id, answer.choices[0].text, answer.choices[0].finish_reason) == ("cmpl-r1", " Paris", "stop")
    assert answer.choices[0].to_dict()["stop_reason"] == "END"


def test_chat_logprobs_have_openai_shape(bpe: TokenizerWrapper) -> None:
    names, writer = TokenDecoder(bpe), ChunkEncoder("chat", "r", "m", 1)
    a, b = get_first_id(bpe, "a"), get_first_id(bpe, "b")
    entry = names.decode_logprob(a, -0.25, [(a, -0.25), (b, -float("inf"))])
    chunks = make_payloads(
        writer.encode_text("a", [entry]), writer.encode_text("a", [entry]), writer.encode_finish("stop")
    )
    ChatCompletionChunk.model_validate(chunks[0], strict=True)
    answer = ChatCompletion.model_validate(aggregate(chunks), strict=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 2
    first = logprobs.content[0]
    assert (first.token, first.bytes, first.logprob) == ("a", [97], -0.25)
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("a", -0.25), ("b", -9999.0)]


def test_completion_logprobs_carry_text_offsets(bpe: TokenizerWrapper) -> None:
    names, writer = TokenDecoder(bpe), ChunkEncoder("completion", "r", "m", 1)
    entries = [
        names.decode_logprob(get_first_id(bpe, text), -1.0, [(get_first_id(bpe, "x"), -2.0)])
        for text in ("a", "b", "c")
    ]
    chunks = make_payloads(
        writer.encode_text("ab", entries[:2]), writer.encode_text("c", entries[2:]), writer.encode_finish("stop")
    )
    answer = Completion.model_validate(aggregate(chunks), strict=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.text_offset) == (["a", "b", "c"], [0, 1, 2])
    assert logprobs.token_logprobs == [-1.0] * 3 and logprobs.top_logprobs == [{"x": -2.0}] * 3


def test_half_character_token_has_exact_bytes(bpe: TokenizerWrapper) -> None:
    ids = bpe.encode("é😀 \n", add_special_tokens=False)
    entries = [TokenDecoder(bpe).decode_logprob(token, -1.0) for token in ids]
    assert b"".join(entry.raw for entry in entries) == "é😀 \n".encode()
    assert entries[0].token == "\ufffd"


def test_byte_fallback_tokens_have_exact_bytes(tmp_path: Path) -> None:
    tokenizer = make_sentence_piece_tokenizer(tmp_path)
    ids = tokenizer.encode("é", add_special_tokens=False)[-2:]
    assert b"".join(TokenDecoder(tokenizer).decode_logprob(token, -1.0).raw for token in ids) == "é".encode()


def test_tokens_of_sentence_pieces_keep_their_spaces(tmp_path: Path) -> None:
    """Their decoder drops a space at the beginning of whatever it decodes."""
    tokenizer = make_sentence_piece_tokenizer(tmp_path)
    ids = tokenizer.encode("the lazy é fox", add_special_tokens=False)
    names = TokenDecoder(tokenizer)
    entries = [names.decode_logprob(token, -1.0, begins_text=not index) for index, token in enumerate(ids)]
    assert b"".join(entry.raw for entry in entries).decode() == tokenizer.decode(ids)


def test_text_offsets_count_characters_of_several_tokens_once(bpe: TokenizerWrapper) -> None:
    names, writer = TokenDecoder(bpe), ChunkEncoder("completion", "r", "m", 1)
    text = "aé😀b"
    entries = [names.decode_logprob(token, -1.0) for token in bpe.encode(text, add_special_tokens=False)]
    answer = aggregate(make_payloads(writer.encode_text(text, entries), writer.encode_finish("stop")))
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, *[1] * 2, *[2] * 4, 3]


def test_error_event_has_openai_error_object() -> None:
    (error,) = make_payloads(ChunkEncoder("chat", "r", "m", 1).encode_error("it broke", code="x"))
    assert error == {"error": {"message": "it broke", "type": "server_error", "param": None, "code": "x"}}
