"""Answers of one constraint without a model: sampled at random, or given and fed token by token."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from compilers import load_tokenizer

Tokens = np.ndarray[tuple[int], np.dtype[np.int64]]
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]
Kinds = np.ndarray[tuple[int], np.dtype[np.int8]]
TOKENS_MAX = 400
CLOSING_MIN, CLOSING_GROWTH = (
    0.1,
    1 / 250,
)  # the share of tokens that are drawn to come to an end, and its growth a token
CLOSES_TEXT, CLOSES_VALUE, GOES_ON = 1, 2, 3  # kinds of tokens; other tokens are 0


@dataclass(frozen=True)
class TokenTable:
    """Texts of a tokenizer's tokens, and which of them end something."""

    texts: tuple[bytes, ...]
    kinds: Kinds
    eos: frozenset[int]


@lru_cache
def load_token_table(name: str, cache: Path) -> TokenTable:
    tokenizer, size = load_tokenizer(name, cache)
    code_points = _make_byte_code_points()
    special = set(tokenizer._tokenizer.all_special_ids)
    words = tokenizer._tokenizer.convert_ids_to_tokens(list(range(len(tokenizer._tokenizer))))
    texts = [
        b"" if i in special else bytes(code_points.get(char, 0x3F) for char in word) for i, word in enumerate(words)
    ]
    texts += [b""] * (size - len(texts))
    return TokenTable(
        tuple(texts), np.array([_find_kind(text) for text in texts], np.int8), frozenset(tokenizer.eos_token_ids)
    )


def _make_byte_code_points() -> dict[str, int]:
    """Byte of each character that byte-level tokenizers write bytes with."""
    graphic = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [code for code in range(256) if code not in graphic]
    return {chr(code): code for code in graphic} | {chr(256 + i): code for i, code in enumerate(others)}


def _find_kind(text: bytes) -> int:
    if text and not set(text) - set(b'"}]'):
        return CLOSES_TEXT if text.startswith(b'"') else CLOSES_VALUE
    return GOES_ON if text.startswith(b",") else 0


class GivenUpError(Exception):
    """An answer that ended because a check failed too often."""


class Walk:
    """A random walk through one answer, a token a step, with its checks and redraws as the engine has them.

    With a share that grows, a token is drawn among those that come to an end, so that most walks do.
    """

    def __init__(self, matcher: Any, table: TokenTable, seed: int) -> None:
        self._matcher, self._table = matcher, table
        self._random, self._np_random = random.Random(seed), np.random.default_rng(seed)
        self._states = [(False, False)]  # after each token: within a string, and after a backslash
        self._logits = mx.zeros(len(table.texts))
        self._sent_count = self.redraw_count = 0
        self.step_max_s = 0.0  # CPU time of this thread
        self.tokens, self.is_ended = list[int](), False
        self._allowed = compute_mask(self._matcher, self._logits)

    @property
    def text(self) -> str:
        return b"".join(self._table.texts[token] for token in self.tokens).decode(errors="replace")

    def close(self) -> None:
        """Give the matcher back; also in the middle of an answer."""
        if hasattr(self._matcher, "release"):
            self._matcher.release()

    def step(self) -> None:
        """Sample a token.  Raises GrammarDeadEndError, GivenUpError."""
        began_s = time.thread_time()
        try:
            self._step()
        finally:
            self.step_max_s = max(self.step_max_s, time.thread_time() - began_s)

    def _step(self) -> None:
        token = self._draw(np.flatnonzero(self._allowed))
        ends = token in self._table.eos
        self.tokens.append(token)
        self._states.append(self._follow(self._table.texts[token]))
        self._matcher.set_sampled(mx.array([token]), 0)
        self._allowed = compute_mask(self._matcher, self._logits)
        if (position := self._find_rejected(token, ends=ends)) is not None:
            self.redraw_count += 1
            self._matcher.rewind(position)
            del self.tokens[position:], self._states[position + 1 :]
            self._allowed = compute_mask(self._matcher, self._logits)
        elif ends:
            self.tokens.pop()
            self.is_ended = True

    def _find_rejected(self, token: int, *, ends: bool) -> int | None:
        """Find the position to go back to; None where the answer may stay as it is."""
        if not hasattr(self._matcher, "reject_token"):
            return None
        is_last = ends or len(self.tokens) >= TOKENS_MAX
        rejection = self._matcher.reject_token(token, self._sent_count, ends=ends, is_last=is_last)
        if rejection is not None and rejection.position is None:
            raise GivenUpError(rejection.reason)
        sound = self._matcher.count_sound(len(self.tokens))
        assert rejection is None or rejection.position >= self._sent_count, "a token that was sent is drawn again"
        self._sent_count = max(self._sent_count, sound if rejection is None else min(sound, rejection.position))
        return None if rejection is None else int(rejection.position)

    def _draw(self, allowed: Tokens) -> int:
        is_in_text, _ = self._states[-1]
        closing = min(1.0, CLOSING_MIN + len(self.tokens) * CLOSING_GROWTH)
        if self._random.random() < closing:
            if not is_in_text and (ends := [token for token in self._table.eos if token in allowed]):
                return ends[0]
            kinds = self._table.kinds[allowed]
            for kind in (CLOSES_TEXT,) if is_in_text else (CLOSES_VALUE, CLOSES_TEXT, GOES_ON):
                if len(found := allowed[kinds == kind]):
                    return int(self._np_random.choice(found))
        return int(self._np_random.choice(allowed))

    def _follow(self, text: bytes) -> tuple[bool, bool]:
        is_in_text, is_escaped = self._states[-1]
        for byte in text:
            if is_escaped:
                is_escaped = False
            elif byte == 0x5C:
                is_escaped = is_in_text
            elif byte == 0x22:
                is_in_text = not is_in_text
        return is_in_text, is_escaped


def is_accepted(matcher: Any, tokens: Sequence[int], table: TokenTable) -> bool:
    """True if an answer may be these tokens, and end there.  Raises GrammarDeadEndError."""
    answer, logits = [*tokens, min(table.eos)], mx.zeros(len(table.texts))
    allowed = compute_mask(matcher, logits)
    for count, token in enumerate(answer, 1):
        if not allowed[token]:
            return False
        matcher.set_sampled(mx.array([token]), 0)
        allowed, ends = compute_mask(matcher, logits), count == len(answer)
        if hasattr(matcher, "reject_token") and matcher.reject_token(token, 0, ends=ends, is_last=ends) is not None:
            return False
    return True


def compute_mask(matcher: Any, logits: mx.array) -> Mask:
    """Compute the mask of the next token, as a step of the engine does, which first takes the last one."""
    return np.array(matcher(mx.array([], mx.int32), logits)) == 0
