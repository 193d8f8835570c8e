"""Limits of one rendering: the longest prompt, and a client that may leave.  Any thread.

A tokenizer takes hundreds of bytes of memory a token, and a call to it can't be interrupted.  So a text that may be far
too long is first counted piece by piece: that takes the memory of one piece, stops at twice the limit, and can be
cancelled in between.  A cut changes the tokens beside it, so a count is no exact length; it only refuses.  What passes
and is large is tokenized in a process of its own, which can be killed.

The text's bytes divided by those of the longest token would be a bound too, but a weak one (vocabularies have tokens of
128 spaces), and a wrong one where a tokenizer drops or shortens text.
"""

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PIECE_CHARS = 65_536
CUT_TOKENS = 32  # of a piece that are not counted: a cut, as in the middle of a special token, adds fewer
EXCESS_FACTOR = 2  # counted tokens beyond so many times the limit are refused; any other text gets its exact length
BYTES_PER_TOKEN = 4  # about as in prose: a text of so many bytes for each token of the limit is tokenized at once
DENSE_BYTES_PER_TOKEN = 16  # more is found in long runs of spaces: too much work for an exact length alone


class PromptTooLongError(Exception):
    """The prompt is longer than any that can be accepted."""

    def __init__(self, tokens: int, is_exact: bool) -> None:
        super().__init__(tokens, is_exact)
        self.tokens, self.is_exact = tokens, is_exact  # the length, or a number that it exceeds


class RenderCancelledError(Exception):
    """Nobody waits for the prompt any more."""


class RenderCancellation:
    """Cancellation of one rendering."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._process: subprocess.Popen[bytes] | None = None

    def cancel(self) -> None:
        """Have the next check raise, and kill the process that works for the rendering."""
        with self._lock:
            self._is_cancelled = True
            if self._process is not None:
                self._process.kill()

    def check(self) -> None:
        """Raises RenderCancelledError."""
        if self._is_cancelled:
            raise RenderCancelledError

    @contextmanager
    def kill_on_cancel(self, process: "subprocess.Popen[bytes]") -> Iterator[None]:
        """Kill the process when the rendering is cancelled within.  Raises RenderCancelledError."""
        with self._lock:
            self._process = process
            if self._is_cancelled:
                process.kill()
        try:
            yield
        finally:
            with self._lock:
                self._process = None
        self.check()


@dataclass(frozen=True)
class RenderLimits:
    """Limits of one rendering; by default there are none."""

    tokens_max: int = 0  # longest prompt that can be accepted; 0: unlimited
    cancellation: RenderCancellation = field(default_factory=RenderCancellation)

    def check_ids(self, count: int) -> None:
        """Raises PromptTooLongError."""
        if self.tokens_max and count > self.tokens_max:
            raise PromptTooLongError(count, is_exact=True)

    def check_text(self, text: str, encode: Callable[[str], list[int]], tokens_before: int = 0) -> None:
        """Raise PromptTooLongError for a text of many more tokens than the limit, and RenderCancelledError.

        `tokens_before`: tokens of the same prompt that are known.
        """
        self.cancellation.check()
        if not self.tokens_max:
            return
        if tokens_before > EXCESS_FACTOR * self.tokens_max:
            raise PromptTooLongError(tokens_before, is_exact=False)
        if len(text) <= PIECE_CHARS:
            return
        size, room = len(text.encode(errors="replace")), max(0, self.tokens_max - tokens_before)
        if size <= BYTES_PER_TOKEN * room:
            return
        factor = EXCESS_FACTOR if size <= DENSE_BYTES_PER_TOKEN * room else 1
        counted = tokens_before
        for start in range(0, len(text), PIECE_CHARS):
            self.cancellation.check()
            counted += max(0, len(encode(text[start : start + PIECE_CHARS])) - CUT_TOKENS)
            if counted > factor * self.tokens_max:
                raise PromptTooLongError(counted, is_exact=False)
