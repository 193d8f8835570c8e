"""Check of answers made of words: a word that may not follow those before it is a violation."""

from collections.abc import Callable
from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.structured_output.redraw import TokenCheck


@dataclass(frozen=True)
class WordViolation:
    start: int
    reason: str
    is_incomplete: bool
    is_final: bool = False


class WordCheck:
    """Words end with a space, tokens are characters; `is_refused` gets the words before, and the new one."""

    def __init__(
        self, tokenizer: TokenizerWrapper, is_refused: Callable[[list[str], str], bool], count_min: int = 0
    ) -> None:
        self._tokenizer, self._is_refused, self._count_min = tokenizer, is_refused, count_min
        self._tokens: list[int] = []
        self.violations: list[WordViolation] = []

    @property
    def _text(self) -> str:
        return self._tokenizer.decode(self._tokens) if self._tokens else ""

    @property
    def sound_count(self) -> int:
        return self._text.rfind(" ") + 1

    def add(self, token: int, ends: bool) -> WordViolation | None:
        start = self.sound_count
        if ends:
            is_short = len(self._text.split()) < self._count_min
            return self._record(WordViolation(start, "/: has too few words", True)) if is_short else None
        self._tokens.append(token)
        *before, word = self._text.split() or [""]
        if self._text.endswith(" ") and self._is_refused(before, word):
            self._tokens.pop()  # as if the word was still open
            found = self._record(WordViolation(start, f"/{len(before)}: '{word}' is refused", False))
            self._tokens.append(token)
            return found
        return None

    def _record(self, violation: WordViolation) -> WordViolation:
        self.violations.append(violation)
        return violation

    def rewind(self, count: int) -> None:
        del self._tokens[count:]


@dataclass(frozen=True)
class FixedCheck:
    """Checks of a constraint that are this one."""

    check: TokenCheck

    def create(self, make_parser: object) -> TokenCheck:
        return self.check


def repeats_word(before: list[str], word: str) -> bool:
    return word in before
