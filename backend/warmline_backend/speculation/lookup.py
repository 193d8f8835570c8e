"""Drafts from texts that repeat: the prompt, the answer so far, or a text that the client expects.  Engine thread.

The last tokens are looked for in one pass over the text, which takes 60 us for a hundred thousand tokens: no index is
kept for those that never repeat.  While the answer goes on as the text does, nothing is looked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from warmline_backend.speculation.draft import PREDICTION, PROMPT_LOOKUP, Draft, TokenHistory, TokenIds

MATCH_TOKENS_MIN = 2
MATCH_TOKENS_MAX = 32


@dataclass(frozen=True)
class Match:
    """A place in a text: `end` tokens of it lie before, the last `length` of which agree."""

    end: int
    length: int


def find_match(text: TokenIds, recent: TokenIds, near: int) -> Match | None:
    """The place before the last token of `text` that the longest end of `recent` precedes; None where none is.

    Of equals the first from `near` on, else the last one.
    """
    if len(recent) < MATCH_TOKENS_MIN or len(text) <= MATCH_TOKENS_MIN:
        return None
    ends = np.flatnonzero(text[:-1] == recent[-1]) + 1
    length = 1
    for back in range(2, min(MATCH_TOKENS_MAX, len(recent)) + 1):
        longer = ends[ends >= back]
        longer = longer[text[longer - back] == recent[-back]]
        if not len(longer):
            break
        ends, length = longer, back
    if length < MATCH_TOKENS_MIN:
        return None
    following = int(np.searchsorted(ends, near))
    return Match(int(ends[min(following, len(ends) - 1)]), length)


class TextCursor:
    """Place in a text that an answer agrees with, as far as it does."""

    def __init__(self, match: Match | None = None) -> None:
        self.match = match  # None once the answer goes on in another way
        self.agreed_count = 0  # tokens of the answer that were those of the text
        self._last_end: int | None = None  # place of the last match: a text that is written again keeps its order

    def follow(self, text: TokenIds, added: TokenIds) -> None:
        """Move past the tokens that were `added` to the answer, as far as they are those of the text."""
        if self.match is None or not len(added):
            return
        expected = text[self.match.end : self.match.end + len(added)]
        differs = np.flatnonzero(expected != added[: len(expected)])
        agreed = int(differs[0]) if len(differs) else len(expected)
        self.agreed_count += agreed
        self._last_end = self.match.end + agreed
        is_parted = agreed < len(added)
        self.match = None if is_parted else Match(self._last_end, min(MATCH_TOKENS_MAX, self.match.length + agreed))

    def find(self, text: TokenIds, recent: TokenIds) -> Match | None:
        """The place that is followed; where none is, the one that the `recent` tokens are found at."""
        if self.match is None:
            self.match = find_match(text, recent, len(text) if self._last_end is None else self._last_end)
        return self.match


class PromptLookup:
    """Source of what followed the last tokens when they occurred before, in the prompt or in the answer."""

    def __init__(self) -> None:
        self._cursor, self._seen = TextCursor(), 0

    def propose(self, history: TokenHistory, most: int) -> Draft | None:
        text = history.ids
        self._cursor.follow(text, text[self._seen :])
        self._seen = len(text)
        match = self._cursor.find(text, text)
        if match is None:
            return None
        # A text that repeats itself up to its very end is expected to go on so.
        following = np.resize(text[match.end : match.end + most], most)
        return Draft(following.tolist(), PROMPT_LOOKUP, match.length)

    def rewind(self, history: TokenHistory) -> None:
        self._seen, self._cursor.match = min(self._seen, history.length), None


class PredictionLookup:
    """Source of the text that the client expects: from its start on, then from where the answer agrees with it."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self._text: TokenIds = np.array(prediction, np.uint32)
        self._cursor, self._seen = TextCursor(Match(0, MATCH_TOKENS_MAX)), 0

    def count_agreed(self, history: TokenHistory) -> int:
        """Count the tokens of the answer that were found in the prediction, where they were expected."""
        answer = history.answer_ids
        self._cursor.follow(self._text, answer[self._seen :])
        self._seen = len(answer)
        return self._cursor.agreed_count

    def propose(self, history: TokenHistory, most: int) -> Draft | None:
        self.count_agreed(history)
        match = self._cursor.find(self._text, history.answer_ids)
        following = self._text[match.end : match.end + most].tolist() if match is not None else []
        return Draft(following, PREDICTION, match.length) if match is not None and following else None

    def rewind(self, history: TokenHistory) -> None:
        self._seen, self._cursor.match = min(self._seen, len(history.answer_ids)), None
