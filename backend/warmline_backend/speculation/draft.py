"""Drafts, the tokens before them, and the interface of their sources.  Engine thread."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

DraftClass = tuple[str, int]  # a source, and the class of a match's length
TokenIds = np.ndarray[tuple[int], np.dtype[np.uint32]]

SOURCES = GRAMMAR, PREDICTION, PROMPT_LOOKUP, DRAFT_MODEL = "grammar", "prediction", "prompt_lookup", "draft_model"
LENGTH_CLASSES = 5  # of matches, by powers of two
HISTORY_ROOM = 1024  # tokens that a history has room for beyond those that it was made with


@dataclass(frozen=True)
class Draft:
    """Tokens that may follow.  `match_length`: tokens before them that agree with the place they were found at."""

    tokens: list[int]
    source: str
    match_length: int

    @property
    def draft_class(self) -> DraftClass:
        """Its source, and the power of two above the length of its match, of LENGTH_CLASSES."""
        return self.source, min(LENGTH_CLASSES - 1, max(0, (self.match_length - 1).bit_length() - 1))


class DraftSource(Protocol):
    """A source of drafts for one answer."""

    def propose(self, history: "TokenHistory", most: int) -> Draft | None:
        """Propose at most `most` tokens after those of `history`; None where there are none."""

    def rewind(self, history: "TokenHistory") -> None:
        """Forget the tokens that were taken from the end of `history`."""


class TokenHistory:
    """Token ids of a prompt and its answer so far, in one array that grows."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt_length, self.length = len(prompt), 0
        self._buffer: TokenIds = np.empty(len(prompt) + HISTORY_ROOM, np.uint32)
        self._append(prompt)

    @property
    def ids(self) -> TokenIds:
        """All tokens; a view, until the next call that changes them."""
        return self._buffer[: self.length]

    @property
    def answer_ids(self) -> TokenIds:
        """Tokens of the answer; a view likewise."""
        return self._buffer[self.prompt_length : self.length]

    def update(self, tokens: Sequence[int], following: Sequence[int]) -> None:
        """Add those of `tokens`, and then of `following`, that it does not have yet; its own are a prefix of both."""
        if self.length < len(tokens):
            self._append(tokens[self.length :])
        self._append(following[self.length - len(tokens) :])

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self.length = min(self.length, length)

    def _append(self, tokens: Any) -> None:
        end = self.length + len(tokens)
        if end > len(self._buffer):
            grown = np.empty(end * 5 // 4 + HISTORY_ROOM, np.uint32)
            grown[: self.length] = self.ids
            self._buffer = grown
        if len(tokens):
            self._buffer[self.length : end] = getattr(tokens, "ids", tokens)  # an array's buffer is copied at once
        self.length = end
