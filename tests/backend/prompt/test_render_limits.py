"""Limits of a rendering: what is refused before it is tokenized whole, and what ends it."""

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.backend.small_tokenizers import make_byte_level_tokenizer, make_sentence_piece_tokenizer
from warmline_backend.prompt import render_limits
from warmline_backend.prompt.render_limits import (
    BYTES_PER_TOKEN,
    CUT_TOKENS,
    DENSE_BYTES_PER_TOKEN,
    EXCESS_FACTOR,
    PIECE_CHARS,
    PromptTooLongError,
    RenderCancellation,
    RenderCancelledError,
    RenderLimits,
)
from warmline_backend.prompt.renderer import TemplateRenderer
from warmline_backend.prompt.tokenization import text_tokenizer
from warmline_backend.prompt.tokenization.tokenizer_process import TokenizerProcessError, tokenize_in_process
from warmline_backend.request.params import BadRequestError

TOKENS_MAX = 100_000


class Encoder:
    """Encoder of texts whose tokens have `chars` characters each; counts its calls."""

    def __init__(self, chars: int, act: Callable[[], None] = lambda: None) -> None:
        self._chars, self._act, self.lengths = chars, act, list[int]()

    def __call__(self, text: str) -> list[int]:
        self.lengths.append(len(text))
        self._act()
        return [0] * -(-len(text) // self._chars)


@pytest.fixture(scope="module", params=[make_byte_level_tokenizer, make_sentence_piece_tokenizer])
def renderer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return TemplateRenderer(request.param(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize(("chars", "pieces"), [(1_000_000, 4), (8_000_000, 2), (50_000_000, 2)])
def test_long_text_is_refused_after_few_pieces(chars: int, pieces: int) -> None:
    encode = Encoder(1)
    with pytest.raises(PromptTooLongError) as refused:
        RenderLimits(TOKENS_MAX).check_text("x" * chars, encode)
    assert encode.lengths == [PIECE_CHARS] * pieces, "the time does not grow with the text"
    assert refused.value.tokens == pieces * (PIECE_CHARS - CUT_TOKENS) > TOKENS_MAX
    assert not refused.value.is_exact


@pytest.mark.parametrize("chars", [10, PIECE_CHARS, PIECE_CHARS + 1, BYTES_PER_TOKEN * TOKENS_MAX])
def test_usual_text_is_not_encoded_twice(chars: int) -> None:
    encode = Encoder(1)
    RenderLimits(TOKENS_MAX).check_text("x" * chars, encode)
    RenderLimits(0).check_text("x" * 10 * chars, encode)
    RenderLimits(1).check_text("x" * min(chars, PIECE_CHARS), encode)
    assert encode.lengths == []


@pytest.mark.parametrize("chars_per_token", [5, 16, 128])
def test_text_that_fits_is_never_refused(chars_per_token: int) -> None:
    """Tokens of 128 spaces, as large vocabularies have, and a text of just so many."""
    encode = Encoder(chars_per_token)
    RenderLimits(TOKENS_MAX).check_text(" " * TOKENS_MAX * chars_per_token, encode)
    assert sum(encode.lengths) == TOKENS_MAX * chars_per_token


def test_size_is_that_of_bytes() -> None:
    encode, text = Encoder(1), "漢" * (BYTES_PER_TOKEN * TOKENS_MAX // 3 + 1)
    RenderLimits(TOKENS_MAX).check_text(text[:-1], encode)
    assert not encode.lengths
    RenderLimits(TOKENS_MAX).check_text(text, encode)
    assert sum(encode.lengths) == len(text) < EXCESS_FACTOR * TOKENS_MAX, "not refused: its length is told"


def test_dense_text_gets_no_exact_length() -> None:
    """A run of spaces takes seconds a megabyte to be tokenized whole."""
    limits = RenderLimits(TOKENS_MAX)
    limits.check_text(" " * TOKENS_MAX * DENSE_BYTES_PER_TOKEN, Encoder(DENSE_BYTES_PER_TOKEN // 2))
    with pytest.raises(PromptTooLongError):
        limits.check_text(" " * (TOKENS_MAX + 30_000) * 128, Encoder(128))


@given(st.text("ab é漢😀\n\t", max_size=400))
@example("the quick brown fox " * 10)
@example("<|im_start|><|im_end|>" * 10)
@example(" " * 400)
def test_prompt_at_limit_is_rendered(renderer: TemplateRenderer, text: str) -> None:
    body = {"prompt": "x" + text}
    tokens = renderer.render("completion", body).tokens
    with patch.object(render_limits, "PIECE_CHARS", 64), patch.object(render_limits, "BYTES_PER_TOKEN", 0):
        assert renderer.render("completion", body, (), RenderLimits(len(tokens))).tokens == tokens


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_renderer_refuses_long_text(renderer: TemplateRenderer, endpoint: str) -> None:
    text = "漢字" * PIECE_CHARS
    body = {"messages": [{"role": "user", "content": text}]} if endpoint == "chat" else {"prompt": text}
    with pytest.raises(PromptTooLongError):
        renderer.render(endpoint, body, (), RenderLimits(1000))


def test_length_of_token_ids_is_exact(renderer: TemplateRenderer) -> None:
    assert len(renderer.render("completion", {"prompt": [5] * 10}, (), RenderLimits(10)).tokens) == 10
    with pytest.raises(PromptTooLongError) as refused:
        renderer.render("completion", {"prompt": [5] * 11}, (), RenderLimits(10))
    assert (refused.value.tokens, refused.value.is_exact) == (11, True)


def test_count_is_cancelled_between_two_pieces() -> None:
    cancellation = RenderCancellation()
    encode = Encoder(128, cancellation.cancel)
    with pytest.raises(RenderCancelledError):
        RenderLimits(TOKENS_MAX, cancellation).check_text(" " * 5_000_000, encode)
    assert len(encode.lengths) == 1


def test_search_for_message_ends_is_cancelled(tmp_path: Path) -> None:
    renderer, cancellation = TemplateRenderer(make_byte_level_tokenizer(tmp_path)), RenderCancellation()
    texts: list[str] = []

    def apply_template(*arguments: object, **options: object) -> str:
        cancellation.cancel()
        texts.append("")
        return apply(*arguments, **options)

    apply = renderer._wrapper._tokenizer.apply_chat_template
    body, limits = {"messages": [{"role": "user", "content": "a"}] * 12}, RenderLimits(1000, cancellation)
    replaced = patch.object(renderer._wrapper._tokenizer, "apply_chat_template", apply_template)
    with replaced, pytest.raises(RenderCancelledError):
        renderer.render("chat", body, (), limits)
    assert len(texts) == 1, "the whole conversation is rendered once, and no beginning of it"


# ---- the process of a large text


def test_process_makes_same_prompt(renderer: TemplateRenderer) -> None:
    messages = [
        {"role": "system", "content": "be  brief\t😀"},
        {"role": "user", "content": "漢字 e\u0301 <|im_end|> the"},
    ]
    for endpoint, body in (("chat", {"messages": messages}), ("completion", {"prompt": "the quick 😀</s> fox"})):
        expected = renderer.render(endpoint, body)
        with patch.object(text_tokenizer, "THREAD_CHARS_MAX", 5):
            assert renderer.render(endpoint, body) == expected


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_cancelled_process_is_killed(renderer: TemplateRenderer, moment: str) -> None:
    cancellation, processes = RenderCancellation(), list["subprocess.Popen[bytes]"]()

    @contextmanager
    def kill_on_cancel(process: "subprocess.Popen[bytes]") -> Iterator[None]:
        processes.append(process)
        if moment == "before":
            cancellation.cancel()
        with cancellation.kill_on_cancel(process):
            if moment == "meanwhile":
                threading.Thread(target=cancellation.cancel).start()
            yield

    with pytest.raises(RenderCancelledError):
        tokenize_in_process(renderer._tokenizer._tokenizer, "the fox " * 1_000_000, False, kill_on_cancel)
    assert [process.returncode for process in processes] == [-signal.SIGKILL]


def test_killed_process_refuses_prompt(renderer: TemplateRenderer) -> None:
    @contextmanager
    def kill(process: "subprocess.Popen[bytes]") -> Iterator[None]:
        process.kill()
        yield

    with pytest.raises(TokenizerProcessError, match="exit code -9"):
        tokenize_in_process(renderer._tokenizer._tokenizer, "the fox", False, kill)
    with (
        patch.object(text_tokenizer, "THREAD_CHARS_MAX", 5),
        patch.object(RenderCancellation, "kill_on_cancel", lambda _, process: kill(process)),
        pytest.raises(
            BadRequestError, match="the process that tokenizes 7 characters has failed: exit code -9; shorten"
        ),
    ):
        renderer.render("completion", {"prompt": "the fox"})
