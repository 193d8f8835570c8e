"""Notices an answer that collapses: what a broken cache makes of a model, though a model can do it by itself too.

Pure.  A piece is what one chunk of the backend's stream says, which is a token, or a token and what was held back
before it.  Feeding one takes the same few comparisons however long the answer is.  That an answer trips the guard
accuses nobody: it is a reason to compute the first token again, cold, and compare (`audit`).
"""

from collections import deque

import msgspec

from warmline_common.protocol.messages import decode

# Where the guard trips.  Sixty-four tokens are a ruler, or a matrix of zeros, wider than people write them, and a
# sixtieth of what a collapsed answer runs on for.  docs/correctness.md says how often ordinary text gets there.
REPEATED_TOKENS_MAX = 64
CYCLE_TOKENS_MAX = 8
DIGITS_MAX = 256


class RepetitionDetector:
    """One answer's.  `reason` is "" until it trips, and says what was seen from then on."""

    def __init__(self) -> None:
        self.reason = ""
        self._recent_pieces: deque[str] = deque(maxlen=CYCLE_TOKENS_MAX)
        self._repeats = [0] * (CYCLE_TOKENS_MAX + 1)  # by period: how many pieces in a row were that long before, too
        self._digits = 0

    def feed(self, piece: str) -> None:
        """The next piece of the answer; empty ones are no pieces."""
        if self.reason or not piece:
            return
        self._count_digits(piece)
        self._count_repeats(piece)

    def _count_repeats(self, piece: str) -> None:
        repeats = self._repeats
        for period, earlier in enumerate(reversed(self._recent_pieces), start=1):
            repeats[period] = repeats[period] + 1 if piece == earlier else 0
            if repeats[period] >= REPEATED_TOKENS_MAX and not self.reason:
                what = "one token" if period == 1 else f"a cycle of {period} tokens"
                self.reason = f"{what} repeated over {repeats[period] + period} tokens"
        self._recent_pieces.append(piece)

    def _count_digits(self, piece: str) -> None:
        if piece.isdecimal():
            self._digits += len(piece)
        else:
            self._digits = len(piece) - len(piece.rstrip("0123456789"))
        if self._digits >= DIGITS_MAX:
            self.reason = f"a run of {self._digits} digits"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


def chunk_text(chunk: bytes) -> str:
    """What one chunk of an OpenAI stream says; "" where it says nothing, or can't be read."""
    try:
        choices = decode(chunk, _Chunk).choices
    except msgspec.DecodeError:
        return ""
    if not choices:
        return ""
    delta = choices[0].delta
    return (delta.content or delta.reasoning_content if delta else choices[0].text) or ""
