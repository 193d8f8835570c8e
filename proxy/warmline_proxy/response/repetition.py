"""Detector of answers that collapse into repetition, as after a broken cache, though a model can do so by itself.

Pure.  A piece is the text of one chunk, about a token.  Feeding one costs a constant number of comparisons.  A
detection is no proof: it triggers an audit, which computes the first token again, cold, and compares.
"""

from collections import deque
from string import digits

import msgspec

from warmline_common.protocol.messages import decode
from warmline_proxy.api.chunks import ChatChunk

# 64 tokens are a longer ruler or row of zeros than people write, and a sixtieth of a collapsed answer's length.
# docs/correctness.md has the rate of detections in ordinary text.
REPEATED_TOKENS_MAX = 64
CYCLE_TOKENS_MAX = 8
DIGITS_MAX = 256


class RepetitionDetector:
    """Detector for one answer.  `reason` is "" until a detection, and describes that from then on."""

    def __init__(self) -> None:
        self.reason = ""
        self._recent_pieces: deque[str] = deque(maxlen=CYCLE_TOKENS_MAX)
        self._repeats = [0] * (CYCLE_TOKENS_MAX + 1)  # by period: pieces in a row that equal the one a period before
        self._digits = 0

    def feed(self, piece: str) -> None:
        """Add the answer's next piece; empty ones are ignored."""
        if self.reason or not piece:
            return
        self._digits = self._digits + len(piece) if piece.isdecimal() else len(piece) - len(piece.rstrip(digits))
        if self._digits >= DIGITS_MAX:
            self.reason = f"a run of {self._digits} digits"
        repeats = self._repeats
        for period, earlier in enumerate(reversed(self._recent_pieces), start=1):
            repeats[period] = repeats[period] + 1 if piece == earlier else 0
            if repeats[period] >= REPEATED_TOKENS_MAX and not self.reason:
                what = "one token" if period == 1 else f"a cycle of {period} tokens"
                self.reason = f"{what} repeated over {repeats[period] + period} tokens"
        self._recent_pieces.append(piece)


def chunk_text(chunk: bytes) -> str:
    """Text of one chunk of an OpenAI stream; "" without text, or where the chunk can't be decoded."""
    try:
        choices = decode(chunk, ChatChunk).choices
    except msgspec.DecodeError:
        return ""
    return (choices[0].delta.content or choices[0].delta.reasoning_text or choices[0].text or "") if choices else ""
