"""Redraws: the place to which an answer goes back where a check fails, or where no token may follow.  Pure.

    decision: a position at which more than one token was allowed
    |
    v
    {"a": 1, "a": 2} <- violation of the value that began at `start`
      ^ the token that was drawn here is banned here, and the answer goes on from this position

The first violation of a value goes back to its last decision, the second to the last but one, the third to the fourth
last, and so on: a small change is tried first, and at last the whole value is drawn again.  That leaves values untried,
so once no decision is left, the value is drawn once more, and its decisions are tried one by one from the last on.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

REDRAW_COUNT_MAX = 64  # while no further token can be sent
TOKENS_PER_REDRAW_MIN = 8  # and at most one for so many tokens that are not sent yet, where that is more
# Tokens that are given up, for each token of the answer: an answer takes at most five times its own length.
REDRAWN_TOKENS_RATIO_MAX = 4
ANSWER_TOKENS_COUNTED_MIN = 64


class TokenViolation(Protocol):
    """Violation of a schema, found with the last token of an answer."""

    @property
    def start(self) -> int:
        """Answer tokens before the first token of the invalid value."""

    @property
    def reason(self) -> str:
        """Place and problem, in a line for people."""

    @property
    def is_incomplete(self) -> bool:
        """True where going on may mend the value: only the last token has to be drawn again."""

    @property
    def is_final(self) -> bool:
        """True where no other value would do."""


class TokenCheck(Protocol):
    """Check of one run of one answer, token by token.  Engine thread."""

    @property
    def sound_count(self) -> int:
        """Answer tokens that may be sent: no violation can lie before them any more."""

    def add(self, token: int, ends: bool) -> TokenViolation | None:
        """Add a token; `ends`: it ends the answer, and has no text."""

    def rewind(self, count: int) -> None:
        """Forget all but the first `count` tokens."""


class RedrawPolicy:
    """Redraws of one run of one answer: places to go back to, the tokens banned there, and bounds."""

    def __init__(self) -> None:
        self.redraw_count = 0  # since a token was sent
        self.redrawn_tokens = 0  # tokens given up
        self._sent_count = 0
        self._bans: dict[int, set[int]] = {}  # by position
        self._violation_counts: dict[int, int] = {}  # by the start of the value
        self._enumerated_starts: set[int] = set()  # of values whose decisions are tried one by one

    def get_bans(self, position: int) -> Collection[int]:
        """Tokens that are banned at a position."""
        return self._bans.get(position, ())

    def choose_position(
        self, tokens: Sequence[int], allowed_counts: Sequence[int], sent_count: int, violation: TokenViolation | None
    ) -> int | None:
        """Choose the position to draw again, and ban the token there; None where there is none, or at a bound.

        `tokens` is the answer so far, `allowed_counts` has the number of tokens that were allowed at each position.
        The first `sent_count` tokens stay.  Without a violation, no token may follow.
        """
        if violation is not None and violation.is_final:
            return None
        if sent_count > self._sent_count:
            self._sent_count, self.redraw_count = sent_count, 0
        if self.redraw_count >= max(REDRAW_COUNT_MAX, (len(tokens) - sent_count) // TOKENS_PER_REDRAW_MIN):
            return None
        start = sent_count if violation is None else max(violation.start, sent_count)
        banned = [position for position in self._bans if position >= start]
        is_enumeration = False
        if decisions := _list_decisions(allowed_counts, start, len(tokens)):
            is_local = violation is None or violation.is_incomplete or start in self._enumerated_starts
            position = decisions[-min(1 if is_local else self._count_violation(start), len(decisions))]
        elif violation is not None and banned and start not in self._enumerated_starts:
            is_enumeration, position = True, min(banned)
        elif decisions := _list_decisions(allowed_counts, sent_count, start):
            position = decisions[-1]  # the value can't be another: something before it has to be
        else:
            return None
        redrawn_tokens = self.redrawn_tokens + len(tokens) - position
        if redrawn_tokens > REDRAWN_TOKENS_RATIO_MAX * max(ANSWER_TOKENS_COUNTED_MIN, len(tokens)):
            return None
        self.redraw_count, self.redrawn_tokens = self.redraw_count + 1, redrawn_tokens
        self._forget_after(position)
        if is_enumeration:
            self._enumerated_starts.add(start)
            del self._bans[position]
        else:
            self._bans.setdefault(position, set()).add(tokens[position])
        return position

    def _count_violation(self, start: int) -> int:
        """Count a violation of the value at `start`; returns how many decisions to go back."""
        count = self._violation_counts[start] = self._violation_counts.get(start, 0) + 1
        return 1 << (count - 1)

    def _forget_after(self, position: int) -> None:
        """Drop what is known of values behind the new end, where other tokens will stand."""
        self._bans = {at: bans for at, bans in self._bans.items() if at <= position}
        counts = self._violation_counts
        self._violation_counts = {start: count for start, count in counts.items() if start <= position}
        self._enumerated_starts = {start for start in self._enumerated_starts if start <= position}


def _list_decisions(allowed_counts: Sequence[int], start: int, end: int) -> list[int]:
    return [position for position in range(start, end) if allowed_counts[position] > 1]
