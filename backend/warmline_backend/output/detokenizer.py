"""Token ids to text, token by token: nothing is emitted that the next token could change."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mlx_lm.generate import TextStateMachine
from mlx_lm.tokenizer_utils import TokenizerWrapper

_PENDING_TOKENS_MAX = 16  # no character needs as many; more is noise that never becomes valid UTF-8
_TEXT = "text"


def decode_tokens(tokenizer: TokenizerWrapper, tokens: Sequence[int]) -> str:
    """Text of all tokens, special ones included.  Any thread."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def render_echo(body: Mapping[str, Any], tokens: Sequence[int], tokenizer: TokenizerWrapper) -> str:
    """Prompt of a completion with `echo`: as it was sent, or the text of the token ids that were sent.

    `body` was rendered to `tokens`, so its prompt is a text, a list of ids, or a list of one of these.
    """
    prompt = body["prompt"]
    if isinstance(prompt, list) and isinstance(prompt[0], str):
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else decode_tokens(tokenizer, tokens)


class StopWordFilter:
    """Content up to the first complete stop word.  Not thread-safe; one a request."""

    def __init__(self, words: Sequence[str]) -> None:
        self._state = TextStateMachine({_TEXT: [(word, None) for word in words]}).make_state(_TEXT)
        self.is_stopped = False  # a stop word is complete; neither that nor later text is emitted
        self.stop_word = ""  # the complete stop word

    def add(self, text: str) -> str:
        """Add text; returns what can't begin a stop word."""
        if self.is_stopped:
            return ""
        pending = self._state[3] + text  # held text comes first
        self._state, segments = TextStateMachine.split(self._state, text)
        self.is_stopped = self._state[0] is None
        emitted = "".join(part for state, part in segments if state == _TEXT)
        if self.is_stopped:
            self.stop_word = pending[len(emitted) : len(pending) - len(self._state[3])]
        return emitted

    def flush(self) -> str:
        """Return held text, once it can't become a stop word any more."""
        if self.is_stopped:
            return ""
        self._state, held, _ = TextStateMachine.flush(self._state)
        return str(held)


class Detokenizer:
    """Decoding with a window over the last tokens, so that each step costs the same.

    mlx-lm's streaming detokenizers drop the leading space of an answer.  A client sends the answer back with its next
    turn, and only the exact text becomes the same tokens again.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._decode = partial(decode_tokens, tokenizer)
        self._context: list[int] = []  # tokens already emitted, kept because they decide how the next ones join
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode_pending()
        if not text or (text.endswith("\ufffd") and len(self._pending) < _PENDING_TOKENS_MAX):
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        text, self._pending = self._decode_pending(), []
        return text

    def _decode_pending(self) -> str:
        emitted = self._decode(self._context) if self._context else ""
        return self._decode(self._context + self._pending)[len(emitted) :]
