"""Streamed text: nothing is emitted that must be taken back, and all of it is the text of the tokens."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from support.backend.small_tokenizers import make_byte_level_tokenizer, make_sentence_piece_tokenizer
from warmline_backend.output.events import Part, Text
from warmline_backend.output.parser import OutputParser


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> TokenizerWrapper:
    return make_byte_level_tokenizer(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> TokenizerWrapper:
    return make_sentence_piece_tokenizer(tmp_path_factory.mktemp("spm"))


def encode_text(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def join_text(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


def emit_tokens(stream: OutputParser, tokens: list[int]) -> list[str]:
    """Text emitted for each token, and at the end, up to a stop word."""
    out = []
    for token in tokens:
        out.append(join_text(stream.add(token)))
        if stream.is_stopped:
            return out
    return [*out, join_text(stream.finish())]


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_streamed_text_equals_text(bpe: TokenizerWrapper, text: str) -> None:
    assert "".join(emit_tokens(OutputParser(bpe), encode_text(bpe, text))) == text


@given(text=st.text("the lazy<x>é😀 ", max_size=30))
def test_streamed_text_equals_decoded_text_with_byte_fallback(spm: TokenizerWrapper, text: str) -> None:
    tokens = encode_text(spm, text)
    assert "".join(emit_tokens(OutputParser(spm), tokens)) == spm.decode(tokens)


@given(tokens=st.lists(st.integers(0, 255), max_size=60))
def test_invalid_utf8_is_held_for_few_tokens(bpe: TokenizerWrapper, tokens: list[int]) -> None:
    stream, silent = OutputParser(bpe), 0
    for token in tokens:
        silent = 0 if stream.add(token) else silent + 1
        assert silent < 20
    stream.finish()


def test_leading_space_is_kept(bpe: TokenizerWrapper) -> None:
    """The client sends it back next turn; without it the text would become other tokens."""
    assert "".join(emit_tokens(OutputParser(bpe), encode_text(bpe, " Paris"))) == " Paris"


def test_multibyte_character_is_emitted_whole(bpe: TokenizerWrapper) -> None:
    stream = OutputParser(bpe)
    assert [join_text(stream.add(token)) for token in encode_text(bpe, "😀")] == ["", "", "", "😀"]


@pytest.mark.parametrize("kind", ["bpe", "spm"])
def test_incomplete_character_at_end_has_no_text(kind: str, bpe: TokenizerWrapper, spm: TokenizerWrapper) -> None:
    tokenizer, text = {"bpe": bpe, "spm": spm}[kind], "the é日本😀\ufffdé\ufffd"
    tokens = encode_text(tokenizer, text)
    for count in range(len(tokens) + 1):
        emitted = "".join(emit_tokens(OutputParser(tokenizer), tokens[:count]))
        assert text.startswith(emitted), count
        following = "".join(emit_tokens(OutputParser(tokenizer), tokens[: count + 4]))
        assert len(following) > len(emitted) or count == len(tokens), "no more than one character is left out"
    assert emitted == text, "a replacement character that the model generates is one"


def test_noise_at_end_is_replaced(bpe: TokenizerWrapper) -> None:
    """Bytes that no further one completes."""
    continuation = encode_text(bpe, "😀")[-1]
    assert "".join(emit_tokens(OutputParser(bpe), [*encode_text(bpe, "a"), continuation])) == "a\ufffd"


@given(
    text=st.text("thé😀\ufffd E", max_size=20), stop=st.sampled_from([(), ("E",), ("hé", "t")]), cut=st.integers(0, 40)
)
def test_texts_name_their_tokens(bpe: TokenizerWrapper, text: str, stop: tuple[str, ...], cut: int) -> None:
    stream, tokens = OutputParser(bpe, stop), encode_text(bpe, text)[:cut]
    parts = [part for token in tokens for part in stream.add(token)]
    parts = parts if stream.is_stopped else [*parts, *stream.finish()]
    end = 0
    for part in parts:
        assert isinstance(part, Text) and end - 1 <= part.start < part.end <= len(tokens)
        own, end = bpe.decode(tokens[part.start : part.end]), part.end
        assert part.text in own
        ends = len(bpe.decode(tokens[part.start : part.start + 1])) + len(bpe.decode(tokens[part.end - 1 : part.end]))
        assert len(own) - len(part.text) < max(ends, 1), "no token without a part in it"


def test_added_special_tokens_are_text(bpe: TokenizerWrapper) -> None:
    tokens = encode_text(bpe, "<think>a</think>b<|im_start|>")
    assert "".join(emit_tokens(OutputParser(bpe), tokens)) == "<think>a</think>b<|im_start|>"


def test_possible_stop_word_is_held(bpe: TokenizerWrapper) -> None:
    letters = [encode_text(bpe, letter)[0] for letter in "xENxEND!"]
    stream = OutputParser(bpe, ["END"])
    assert [join_text(stream.add(token)) for token in letters] == ["x", "", "", "ENx", "", "", "", ""]
    assert stream.is_stopped and join_text(stream.finish()) == ""


def test_held_text_is_emitted_at_finish(bpe: TokenizerWrapper) -> None:
    stream = OutputParser(bpe, ["END"])
    assert [join_text(stream.add(encode_text(bpe, letter)[0])) for letter in "aEN"] == ["a", "", ""]
    assert join_text(stream.finish()) == "EN" and not stream.is_stopped


@given(
    text=st.text("ab", max_size=20),
    words=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_first_complete_stop_word(bpe: TokenizerWrapper, text: str, words: list[str]) -> None:
    stream = OutputParser(bpe, words)
    emitted = "".join(emit_tokens(stream, [encode_text(bpe, letter)[0] for letter in text]))
    hits = [(at + len(word), at) for word in words if (at := text.find(word)) >= 0]
    assert stream.is_stopped == bool(hits)
    assert emitted == (text[: min(hits)[1]] if hits else text)
    assert stream.stop_word == (text[min(hits)[1] : min(hits)[0]] if hits else "")


def test_stop_words_apply_after_min_tokens(bpe: TokenizerWrapper) -> None:
    letters = [encode_text(bpe, letter)[0] for letter in "abcabcab"]
    for least, text in ((2, "a"), (3, "abca"), (5, "abca"), (6, "abcabca"), (8, "abcabca"), (9, "abcabcab")):
        stream = OutputParser(bpe, ["b"], min_tokens=least)
        assert "".join(emit_tokens(stream, letters)) == text and stream.is_stopped == (least < 9), least


def test_stop_word_may_span_tokens(bpe: TokenizerWrapper) -> None:
    tokens = encode_text(bpe, "the quick brown fox")
    assert len(tokens) < len("the quick brown fox")
    stream = OutputParser(bpe, ["ck bro"])
    assert "".join(emit_tokens(stream, tokens)) == "the qui" and stream.is_stopped and stream.stop_word == "ck bro"


def test_stop_word_may_be_completed_at_finish(bpe: TokenizerWrapper) -> None:
    stream = OutputParser(bpe, ["a\ufffd"])
    assert emit_tokens(stream, encode_text(bpe, "xa\ufffd"))[-1] == "" and stream.is_stopped
