"""Tokens of texts that begin as earlier ones did: those of the whole text, and little work."""

from collections import Counter
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, PreTokenizedString, Tokenizer, pre_tokenizers, processors

from support.backend.small_tokenizers import KINDS, NORMALIZED, PLAIN, make_gpt_2, make_llama_3, wrap_tokenizer
from warmline_backend.prompt.render_limits import PromptTooLongError, RenderCancelledError, RenderLimits
from warmline_backend.prompt.tokenization import text_cache, text_tokenizer
from warmline_backend.prompt.tokenization.added_tokens import NO_SEPARATORS, find_separators
from warmline_backend.prompt.tokenization.text_tokenizer import TextTokenizer
from warmline_backend.request.params import BadRequestError

LIMITS = RenderLimits()
MARKERS = [*PLAIN, *(token.content for token in NORMALIZED), "<|end|>"]
PIECES = [
    *MARKERS,
    *(marker[:cut] for marker in MARKERS for cut in range(1, len(marker))),
    *(marker[cut:] for marker in MARKERS for cut in range(1, len(marker))),
    *(" ", "  ", "\n", "\n\n", "\t", "\u00a0", "▁", "Ġ", "\u200b", "\u200d", "\ufe0f", "\u0301", "é", "e", "ﬁ", "İ"),
    *(
        "👩",
        "👩\u200d👩\u200d👧",
        "🏽",
        "漢字",
        "가",
        "\u1100",
        "\u1161",
        "1",
        "1234",
        "'s",
        "'",
        "the",
        " the",
        "word",
        "?",
    ),
]
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> TextTokenizer:
    return TextTokenizer(wrap_tokenizer(KINDS[request.param]()))


def with_short_texts() -> Any:
    """Patch the cache to find short texts too."""
    return patch.multiple(text_cache, TEXT_CHARS_MIN=1, BLOCK_CHARS=3)


def check_tokens(tokenizer: TextTokenizer, text: str) -> None:
    whole = tokenizer._tokenizer._tokenizer.encode(text, add_special_tokens=False)
    ids, token_at = tokenizer.tokenize(text, LIMITS)
    assert ids == whole.ids
    ends = Counter(accumulate((end for _, end in whole.offsets), max))
    counts = list(accumulate(ends[offset] for offset in range(len(text) + 1)))
    assert [token_at(offset) for offset in range(len(text) + 1)] == [0, *counts[1:]]


@given(texts, st.lists(texts, min_size=1, max_size=4), st.integers(0, 8))
@example("a<|im_start|>", ["user<|im_end|>", "us", "|><|im_start|>"], 0)
@example("<|im_end|>", ["<|im_start|>", "\u0301", " ", "\u200d"], 0)
@example("<|im_end|>a<|im_", ["start|>user", "end|>", "start|>  user"], 0)
@example("x <think><|im_end|>  </think>", ["  <|im_end|>", "word<|im_end|>word", "<|im_end|>  </think> "], 2)
@example("a <unk>", ["漢<unk>", "漢漢<unk>漢"], 0)
def test_tokens_are_those_of_the_whole_text(tokenizer: TextTokenizer, shared: str, tails: list[str], cut: int) -> None:
    """Each text goes on from the ones before it, which end anywhere."""
    tokenizer.clear_cache()
    with with_short_texts():
        check_tokens(tokenizer, shared)
        for tail in tails:
            check_tokens(tokenizer, shared + tail)
            shared = (shared + tail)[: max(0, len(shared + tail) - cut)]
            check_tokens(tokenizer, shared)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "without_separators"])
@pytest.mark.parametrize("marker", PLAIN[:3])
def test_text_that_ends_in_a_separator_goes_on(kind: str, marker: str) -> None:
    tokenizer = TextTokenizer(wrap_tokenizer(KINDS[kind]()))
    with with_short_texts():
        head = "the fox <|im_end|> dog"
        for cut in range(len(marker) + 1):
            for tail in (marker[cut:], marker[cut:] + "er", "x", marker, "\u0301", "  "):
                tokenizer.clear_cache()
                check_tokens(tokenizer, head + marker[:cut])
                check_tokens(tokenizer, head + marker[:cut] + tail)


# ---- work


class RecordingTokenizer:
    """Tokenizer that records the texts of its calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.texts = tokenizer, list[str]()

    def encode(self, text: str, **options: Any) -> Any:
        self.texts.append(text)
        return self._tokenizer.encode(text, **options)


def record_texts(tokenizer: TextTokenizer) -> list[str]:
    recording: Any = RecordingTokenizer(tokenizer._tokenizer._tokenizer)
    tokenizer._library_tokenizer = recording
    return recording.texts


def make_conversation(messages: int) -> str:
    return "".join(f"<|im_start|>user\n{number} the quick brown fox<|im_end|>\n" for number in range(messages))


ANSWERS = "<|im_start|>assistant\n"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "without_separators"])
def test_next_turn_tokenizes_new_text_alone(kind: str) -> None:
    tokenizer = TextTokenizer(wrap_tokenizer(KINDS[kind]()))
    before, after = make_conversation(300) + ANSWERS, make_conversation(301) + ANSWERS
    check_tokens(tokenizer, before)
    texts = record_texts(tokenizer)
    check_tokens(tokenizer, after)
    (new,) = texts
    assert after.endswith(new) and len(new) < 200
    check_tokens(tokenizer, after)
    assert len(texts) == 1, "the same text again needs no work"
    assert len(tokenizer._cache) == 1, "a turn takes the last one's place"


def test_short_and_foreign_texts_are_tokenized_whole() -> None:
    tokenizer = TextTokenizer(wrap_tokenizer(make_gpt_2()))
    text = make_conversation(10)
    tokenizer.tokenize(text, LIMITS, b"one")
    texts = record_texts(tokenizer)
    tokenizer.tokenize(text + "x", LIMITS, b"another")
    tokenizer.tokenize("<|im_end|>", LIMITS, b"one")
    tokenizer.tokenize("<|im_end|>", LIMITS, b"one")
    assert texts == [text + "x", "<|im_end|>", "<|im_end|>"]
    tokenizer.clear_cache()
    tokenizer.tokenize(text, LIMITS, b"one")
    assert texts[3:] == [text]


def test_added_beginning_is_not_taken_for_another_text() -> None:
    """Texts to which the tokenizer itself adds tokens are tokenized whole."""
    tokenizer = TextTokenizer(wrap_tokenizer(make_llama_3()))
    text = make_conversation(10)
    tokenizer.tokenize(text, LIMITS)
    ids, token_at = tokenizer.tokenize(text, LIMITS, add_special_tokens=True)
    assert ids == tokenizer._tokenizer._tokenizer.encode(text).ids != tokenizer.tokenize(text, LIMITS)[0]
    assert token_at(len(text)) == len(ids)


def test_large_text_needs_no_process_for_a_small_new_part() -> None:
    tokenizer = TextTokenizer(wrap_tokenizer(make_gpt_2()))
    text = make_conversation(200)
    refusal = text_tokenizer.TokenizerProcessError("none is started")
    with (
        patch.object(text_tokenizer, "THREAD_CHARS_MAX", 6000),
        patch.object(text_tokenizer, "tokenize_in_process", side_effect=refusal) as process,
    ):
        with pytest.raises(BadRequestError, match="none is started"):
            tokenizer.tokenize(text, LIMITS)
        for messages in range(100, 200, 20):
            check_tokens(tokenizer, make_conversation(messages))
        check_tokens(tokenizer, text)
        assert process.call_count == 1


def test_limit_counts_known_tokens_and_new_text_alone() -> None:
    tokenizer = TextTokenizer(wrap_tokenizer(make_gpt_2()))
    text = make_conversation(4000)
    ids, _ = tokenizer.tokenize(text, LIMITS)
    texts = record_texts(tokenizer)
    tokenizer.tokenize(text + "dog", RenderLimits(len(ids) // 2 + 1))
    assert len(texts) == 1 and len(texts[0]) < 200
    with pytest.raises(PromptTooLongError) as refused:
        tokenizer.tokenize(text + "cat", RenderLimits(len(ids) // 3))
    assert not refused.value.is_exact and refused.value.tokens <= len(ids)
    with pytest.raises(PromptTooLongError):
        tokenizer.tokenize("cat", RenderLimits(10), tokens_before=21)
    assert len(texts) == 1


def test_cancelled_rendering_tokenizes_nothing() -> None:
    tokenizer, limits = TextTokenizer(wrap_tokenizer(make_gpt_2())), RenderLimits()
    texts = record_texts(tokenizer)
    limits.cancellation.cancel()
    with pytest.raises(RenderCancelledError):
        tokenizer.tokenize("the fox", limits)
    assert texts == []


# ---- separators


def test_separators_are_the_plain_added_tokens() -> None:
    for kind, make in KINDS.items():
        separators = find_separators(make())
        expected = {"<|im_start|>", "<|im_end|>", "<|im_start|>user", "|><|", "im_", "<unk>", "</s>"}
        assert set(separators.texts.values()) == (expected if kind != "without_separators" else set()), kind
        assert separators.chars_max == (16 if separators else 0)


class Words:
    """Pre-tokenizer written in Python."""

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        text.split(lambda _, piece: piece.split(" ", "isolated"))


@pytest.mark.parametrize("option", ["lstrip", "rstrip", "single_word"])
def test_tokens_that_depend_on_the_text_beside_them_separate_nothing(option: str) -> None:
    tokenizer = make_gpt_2()
    tokenizer.add_tokens([AddedToken("<x>", normalized=False, **{option: True})])
    assert find_separators(tokenizer) is NO_SEPARATORS


def test_unknown_parts_and_settings_separate_nothing() -> None:
    python_words: Any = pre_tokenizers.PreTokenizer.custom(Words())
    double = processors.TemplateProcessing(single="$A $A", pair="$A $B", special_tokens=[])
    for name, value in (
        ("pre_tokenizer", python_words),
        ("pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Digits(), python_words])),
        ("post_processor", double),
        ("encode_special_tokens", True),
    ):
        tokenizer = make_gpt_2()
        setattr(tokenizer, name, value)
        assert find_separators(tokenizer) is NO_SEPARATORS, name
    tokenizer = make_gpt_2()
    tokenizer.enable_truncation(10)
    assert find_separators(tokenizer) is NO_SEPARATORS
    tokenizer = make_gpt_2()
    model: Any = tokenizer.model
    model.dropout = 0.1
    assert find_separators(tokenizer) is NO_SEPARATORS
