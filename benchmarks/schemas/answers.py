"""Answers of one constraint without a model: sampled at random, or given and fed token by token."""

import random
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from compilers import load_tokenizer

from warmline_backend.structured_output.compiler import GrammarCompiler
from warmline_backend.structured_output.constraint import Constraint

Tokens = np.ndarray[tuple[int], np.dtype[np.int64]]
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


@dataclass
class Walk:
    """A random walk through one answer, a token a step.

    With a share that grows, a token is drawn among those that come to an end, so that most walks do.
    """

    compiler: GrammarCompiler
    constraint: Constraint
    table: TokenTable
    seed: int
    tokens: list[int] = field(default_factory=list)
    redraw_count: int = 0
    is_ended: bool = False

    def __post_init__(self) -> None:
        self._matcher = self.compiler.create_matcher(self.constraint)
        self._random, self._np_random = random.Random(self.seed), np.random.default_rng(self.seed)
        self._is_in_text = self._is_escaped = False

    @property
    def text(self) -> str:
        return b"".join(self.table.texts[token] for token in self.tokens).decode(errors="replace")

    def step(self) -> None:
        """Sample a token.  Raises GrammarDeadEndError."""
        token = self._draw(np.flatnonzero(self._matcher.compute_allowed()))
        self._matcher.advance(token)
        self.is_ended = self._matcher.is_complete
        if not self.is_ended:
            self.tokens.append(token)
            self._follow(self.table.texts[token])

    def _draw(self, allowed: Tokens) -> int:
        closing = min(1.0, CLOSING_MIN + len(self.tokens) * CLOSING_GROWTH)
        if self._random.random() < closing:
            if not self._is_in_text and (ends := [token for token in self.table.eos if token in allowed]):
                return ends[0]
            kinds = self.table.kinds[allowed]
            for kind in (CLOSES_TEXT,) if self._is_in_text else (CLOSES_VALUE, CLOSES_TEXT, GOES_ON):
                if len(found := allowed[kinds == kind]):
                    return int(self._np_random.choice(found))
        return int(self._np_random.choice(allowed))

    def _follow(self, text: bytes) -> None:
        for byte in text:
            if self._is_escaped:
                self._is_escaped = False
            elif byte == 0x5C:
                self._is_escaped = self._is_in_text
            elif byte == 0x22:
                self._is_in_text = not self._is_in_text


def is_accepted(compiler: GrammarCompiler, constraint: Constraint, tokens: list[int], eos: frozenset[int]) -> bool:
    """True if an answer may be these tokens, and end there.  Raises GrammarDeadEndError."""
    matcher = compiler.create_matcher(constraint)
    for token in tokens:
        if not matcher.compute_allowed()[token]:
            return False
        matcher.advance(token)
    allowed = matcher.compute_allowed()
    return any(allowed[token] for token in eos)
