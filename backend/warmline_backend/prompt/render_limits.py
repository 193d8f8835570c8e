"""Limits of one rendering: the longest prompt, and a client that may leave.  Any thread.

A tokenizer takes hundreds of bytes of memory a token, and a call to it can't be interrupted.  So a text that may be far
too long is first counted piece by piece: that takes the memory of one piece, stops at twice the limit, and can be
cancelled in between.  A cut changes the tokens beside it, so a count is no exact length; it only refuses.

The text's bytes divided by those of the longest token would be a bound too, but a weak one (vocabularies have tokens of
128 spaces), and a wrong one where a tokenizer drops or shortens text.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

PIECE_CHARS = 65_536
CUT_TOKENS = 32  # of a piece that are not counted: a cut, as in the middle of a special token, adds fewer
EXCESS_FACTOR = 2  # counted tokens beyond so many times the limit are refused; any other text gets its exact length
BYTES_PER_TOKEN = 4  # about as in prose: a text of so many bytes for each token of the limit is tokenized at once


class PromptTooLongError(Exception):
    """The prompt is longer than any that can be accepted."""

    def __init__(self, tokens: int, is_exact: bool) -> None:
        super().__init__(tokens, is_exact)
        self.tokens, self.is_exact = tokens, is_exact  # the length, or a number that it exceeds


class RenderCancelledError(Exception):
    """Nobody waits for the prompt any more."""


@dataclass(frozen=True)
class RenderLimits:
    """Limits of one rendering; by default there are none."""

    tokens_max: int = 0  # longest prompt that can be accepted; 0: unlimited
    cancel_event: threading.Event = field(default_factory=threading.Event)

    def check_cancelled(self) -> None:
        """Raises RenderCancelledError."""
        if self.cancel_event.is_set():
            raise RenderCancelledError

    def check_ids(self, count: int) -> None:
        """Raises PromptTooLongError."""
        if self.tokens_max and count > self.tokens_max:
            raise PromptTooLongError(count, is_exact=True)

    def check_text(self, text: str, encode: Callable[[str], list[int]]) -> None:
        """Raise PromptTooLongError for a text of many more tokens than the limit, and RenderCancelledError."""
        if len(text) <= PIECE_CHARS or not self.tokens_max or self._is_short(text):
            return
        counted = 0
        for start in range(0, len(text), PIECE_CHARS):
            self.check_cancelled()
            counted += max(0, len(encode(text[start : start + PIECE_CHARS])) - CUT_TOKENS)
            if counted > EXCESS_FACTOR * self.tokens_max:
                raise PromptTooLongError(counted, is_exact=False)

    def _is_short(self, text: str) -> bool:
        """True for a text that can't have many times more tokens than the limit."""
        return len(text.encode(errors="replace")) <= BYTES_PER_TOKEN * self.tokens_max
