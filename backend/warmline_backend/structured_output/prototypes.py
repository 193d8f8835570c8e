"""Compiled grammars that wait for an answer.  Any thread.

Copies of one of llguidance's matchers share its lexer, and with it the lexer's states, their limit and its errors: one
that has met a limit errs in all copies, for good.  So each answer has a compiled grammar to itself, and hands it back
unless it has met an error: a lexer that is used again knows many states already, which makes masks several times
faster for long strings.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from llguidance import LLMatcher

IDLE_COUNT_MAX = 64
# A lexer's states are limited; each answer adds those of its text.  So few tokens leave later ones most of the limit.
TOKENS_MAX = 4096


@dataclass(eq=False)
class Prototype:
    """A compiled grammar at its start: to be copied, never advanced.  Used by one answer at a time."""

    grammar: str
    ll_matcher: LLMatcher
    epoch: int  # of the pool, when it was compiled
    token_count: int = 0  # tokens that its copies have taken
    has_failed: bool = False  # a copy has met an error, which may be the lexer's

    def copy_matcher(self) -> LLMatcher:
        """Copy the matcher, for this prototype's answer alone."""
        return self.ll_matcher.deep_copy()


class PrototypePool:
    """Prototypes that no answer uses at present, the most recent IDLE_COUNT_MAX of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: OrderedDict[Prototype, None] = OrderedDict()  # oldest first
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """Number of `clear` calls."""
        return self._epoch

    def take(self, grammar: str) -> Prototype | None:
        """Take the latest prototype of a grammar; None where there is none."""
        with self._lock:
            found = next((each for each in reversed(self._idle) if each.grammar == grammar), None)
            if found is not None:
                del self._idle[found]
            return found

    def put(self, prototype: Prototype) -> None:
        """Put a prototype in, unless it has failed, is older than the last `clear`, or has many tokens behind it."""
        with self._lock:
            is_usable = not (prototype.has_failed or prototype.ll_matcher.is_error())
            if is_usable and prototype.epoch == self._epoch and prototype.token_count <= TOKENS_MAX:
                self._idle[prototype] = None
                if len(self._idle) > IDLE_COUNT_MAX:
                    self._idle.popitem(last=False)

    def clear(self) -> None:
        """Drop all prototypes, also those that answers still use, once they are handed back."""
        with self._lock:
            self._idle.clear()
            self._epoch += 1
