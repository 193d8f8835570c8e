"""One answer's tokens to its parts, as they come."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.output.detokenizer import Decoder, StopWords
from warmline_backend.output.dialect import Dialect, dialect_of, opens_reasoning
from warmline_backend.output.events import Called, Part, Said
from warmline_backend.output.expected import Expected
from warmline_backend.output.harmony import HeadedSplitter
from warmline_backend.output.splitter import MarkedSplitter, Splitter


class OutputStream:
    """One answer.  Not thread-safe; one a request.

    End-of-sequence tokens have no text: a caller that ends on one does not `add` it.  Stop words count from the token
    on with which the answer has `min_tokens`.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        stop_words: Sequence[str] = (),
        expected: Expected | None = None,
        min_tokens: int = 0,
    ) -> None:
        expected = expected or Expected()
        self._decoder = Decoder(tokenizer)
        self._stops = StopWords(stop_words) if stop_words else None
        self._unstoppable = min_tokens  # how many tokens are still to come before a stop word counts
        self._splitter: Splitter | None = None
        self._hidden: frozenset[int] = frozenset()
        self._shows_words = False
        self.reasons = False  # the last token belongs to the reasoning
        self._ends = array("Q", [0])  # how many characters the first n tokens have
        if expected.marked:
            dialect = dialect_of(tokenizer)
            self._hidden = dialect.hidden
            self._shows_words = dialect.calls is not None and dialect.calls.words is None
            if dialect.marked:
                self._splitter = splitter_of(dialect, expected)

    @property
    def stopped(self) -> bool:
        """A stop word is complete, or the one call that was wanted: nothing more is told."""
        return bool((self._stops and self._stops.stopped) or (self._splitter and self._splitter.done))

    @property
    def stop_word(self) -> str:
        """The one that is complete, or ""."""
        return self._stops.word if self._stops else ""

    def add(self, token: int) -> Sequence[Part]:
        """What may be told now: not half a character, and nothing that what follows could still make another thing."""
        if self.stopped:
            return ()
        self._unstoppable -= 1
        text = "" if token in self._hidden and self._is_hidden() else self._decoder.add(token)
        if self._splitter is None:
            return self._content(text)
        self._ends.append(self._ends[-1] + len(text))
        self.reasons = self._splitter.thinking
        if not text:
            return ()
        parts = self._told(self._splitter.feed(text))
        self.reasons = self.reasons or self._splitter.thinking
        return parts

    def _is_hidden(self) -> bool:
        """Special tokens are no text, but within a call of a family whose words are not known."""
        return not (self._shows_words and self._splitter and self._splitter.calling)

    def finish(self, natural: bool = True) -> Sequence[Part]:
        """The rest, once no more tokens come; `stopped` may become true here too.

        `natural`: the model has ended by itself, rather than been cut off.
        """
        if self.stopped:
            return ()
        rest = self._decoder.finish()
        if self._splitter is None:
            return [*self._content(rest), *self._held()]
        parts = self._told([*self._splitter.feed(rest), *self._splitter.finish(natural)])
        return parts if self._stops and self._stops.stopped else [*parts, *self._held()]

    def _content(self, text: str) -> Sequence[Part]:
        if self._stops is not None and self._unstoppable <= 0:
            text = self._stops.add(text)
        return (Said(text),) if text else ()

    def _held(self) -> Sequence[Part]:
        """What could have begun a stop word, and did not."""
        text = self._stops.release() if self._stops is not None else ""
        return (Said(text),) if text else ()

    def _told(self, parts: list[Part]) -> Sequence[Part]:
        """With stop words heeded, which count in content alone, and places in tokens rather than characters."""
        told: list[Part] = []
        for part in parts:
            if isinstance(part, Said):
                told += self._content(part.text)
                if self._stops and self._stops.stopped:
                    break
            else:
                told += self._held()
                told.append(self._placed(part) if isinstance(part, Called) else part)
        return told

    def _placed(self, call: Called) -> Called:
        start = bisect_left(self._ends, call.start) if call.start >= 0 else -1
        if start >= 0 and self._ends[start] != call.start:  # reasoning ended within a token
            start = -1
        return replace(call, start=start, end=bisect_left(self._ends, call.end))


def splitter_of(dialect: Dialect, expected: Expected) -> Splitter:
    tools, tail, parallel = expected.tools, expected.tail, expected.parallel
    if dialect.headers:
        return HeadedSplitter(dialect, tools, tail=tail, parallel=parallel)
    thinking = opens_reasoning(dialect, tail)
    return MarkedSplitter(dialect, tools, thinking=thinking, parallel=parallel, formed=expected.formed)
