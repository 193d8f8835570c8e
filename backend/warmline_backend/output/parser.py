"""Parser of one answer's tokens to parts, as they come."""

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.output.detokenizer import Detokenizer, StopWordFilter
from warmline_backend.output.dialect import Dialect, detect_dialect
from warmline_backend.output.emitter import T, join_texts
from warmline_backend.output.events import Part, Reasoning, Text, ToolCall
from warmline_backend.output.expected import ExpectedOutput
from warmline_backend.output.header_splitter import HeaderSplitter
from warmline_backend.output.splitter import MarkerSplitter, Splitter
from warmline_backend.prompt.replay import ParsedTurn, TurnParser
from warmline_backend.request.params import Tools


class OutputParser:
    """Parser of one answer.  Not thread-safe; one a request.

    End-of-sequence tokens have no text: a caller that ends on one does not `add` it.  Stop words count from the token
    on with which the answer has `min_tokens`.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        stop_words: Sequence[str] = (),
        expected: ExpectedOutput | None = None,
        min_tokens: int = 0,
    ) -> None:
        expected = expected or ExpectedOutput()
        self._detokenizer = Detokenizer(tokenizer)
        self._stop_filter = StopWordFilter(stop_words) if stop_words else None
        self._tokens_before_stop = min_tokens  # how many tokens are still to come before a stop word counts
        self._splitter: Splitter | None = None
        self._stop_spans: deque[Text] = deque()  # what the stop filter was given and has not emitted
        self._hidden_tokens: frozenset[int] = frozenset()
        self._hidden_indices: set[int] = set()  # of sampled tokens without text
        self._shows_call_tokens = False
        self.is_reasoning = False  # the last token belongs to the reasoning
        self._char_ends = array("Q", [0])  # how many characters the first n tokens have
        if expected.has_parts:
            dialect = detect_dialect(tokenizer)
            self._hidden_tokens = dialect.hidden_tokens
            self._shows_call_tokens = dialect.tool_format is not None and dialect.tool_format.special_tokens is None
            if dialect.has_markers:
                self._splitter = make_splitter(dialect, expected)

    @property
    def is_stopped(self) -> bool:
        """True after a stop word, or a call where only one may be made: nothing more is emitted."""
        return bool((self._stop_filter and self._stop_filter.is_stopped) or (self._splitter and self._splitter.is_done))

    @property
    def stop_word(self) -> str:
        """The complete stop word, or ""."""
        return self._stop_filter.stop_word if self._stop_filter else ""

    def add(self, token: int) -> Sequence[Part]:
        """Add a token; returns parts that no later token can change."""
        if self.is_stopped:
            return ()
        self._tokens_before_stop -= 1
        start = self._char_ends[-1]
        if token in self._hidden_tokens and self._hides_special_tokens():
            text = ""
            self._hidden_indices.add(len(self._char_ends) - 1)
        else:
            text = self._detokenizer.add(token)
        self._char_ends.append(start + len(text))
        if self._splitter is None:
            return self._filter_content([Text(text, start)])
        self.is_reasoning = self._splitter.is_reasoning
        if not text:
            return ()
        parts = self._filter_parts(self._splitter.feed(text))
        self.is_reasoning = self.is_reasoning or self._splitter.is_reasoning
        return parts

    def find_token(self, offset: int) -> int:
        """Find the sampled token that has this character of all text, the first of those that make it together.

        For the next character to come, which may have begun: the first token behind all text.
        """
        ends = self._char_ends
        token = bisect_right(ends, offset) - 1
        if ends[token] == offset:
            token = bisect_left(ends, offset)
        while token in self._hidden_indices:
            token += 1
        return token

    def copy(self) -> "OutputParser":
        """Copy the parser, to go on from this token in more than one way."""
        made = copy(self)
        made._detokenizer, made._stop_filter = self._detokenizer.copy(), copy(self._stop_filter)
        made._splitter = self._splitter.copy() if self._splitter else None
        made._stop_spans, made._hidden_indices = self._stop_spans.copy(), self._hidden_indices.copy()
        made._char_ends = self._char_ends[:]
        return made

    def _hides_special_tokens(self) -> bool:
        """True where special tokens are no text: everywhere but within a call of an unknown family."""
        return not (self._shows_call_tokens and self._splitter and self._splitter.is_calling)

    def finish(self, natural: bool = True) -> Sequence[Part]:
        """Return the rest, once no more tokens come; `is_stopped` may become true here too.

        `natural`: the model has ended by itself, rather than been cut off.
        """
        if self.is_stopped:
            return ()
        rest, start = self._detokenizer.finish(), self._char_ends[-1]
        self._char_ends[-1] += len(rest)
        if self._splitter is None:
            return [*self._filter_content([Text(rest, start)]), *self._flush_content()]
        parts = self._filter_parts([*self._splitter.feed(rest), *self._splitter.finish(natural)])
        return parts if self._stop_filter and self._stop_filter.is_stopped else [*parts, *self._flush_content()]

    def _filter_content(self, texts: Sequence[Text]) -> list[Text]:
        """Content that can't begin a stop word."""
        if self._stop_filter is not None and self._tokens_before_stop <= 0:
            self._stop_spans.extend(text for text in texts if text.text)
            texts = self._take_spans("".join([self._stop_filter.add(text.text) for text in texts]))
        return [self._convert_span(text) for text in texts if text.text]

    def _flush_content(self) -> list[Text]:
        """Text that could have begun a stop word, and did not."""
        text = self._stop_filter.flush() if self._stop_filter is not None else ""
        return [self._convert_span(span) for span in self._take_spans(text)]

    def _take_spans(self, text: str) -> list[Text]:
        """Take the spans of a text from the stop filter, which emits in order."""
        taken, left = list[Text](), len(text)
        while left:
            span = self._stop_spans.popleft()
            if rest := span.text[left:]:
                self._stop_spans.appendleft(Text(rest, span.start + left if span.start >= 0 else -1))
            taken.append(replace(span, text=span.text[:left]))
            left -= len(taken[-1].text)
        return join_texts(taken)

    def _convert_span(self, text: T) -> T:
        """Convert a text's offset to tokens: all those of a character that several make, but none without text."""
        if (offset := text.start) < 0:
            return text
        end = bisect_left(self._char_ends, offset + len(text.text))
        return replace(text, start=self.find_token(offset), end=end, offset=offset)

    def _filter_parts(self, parts: list[Part]) -> Sequence[Part]:
        """Apply stop words, which count in content alone, and convert offsets of characters to tokens."""
        filtered: list[Part] = []
        for part in parts:
            if isinstance(part, Text):
                filtered += self._filter_content([part])
                if self._stop_filter and self._stop_filter.is_stopped:
                    break
            else:
                filtered += self._flush_content()
                filtered.append(self._convert_offsets(part) if isinstance(part, ToolCall) else self._convert_span(part))
        return filtered

    def _convert_offsets(self, call: ToolCall) -> ToolCall:
        start = bisect_left(self._char_ends, call.start) if call.start >= 0 else -1
        if start >= 0 and self._char_ends[start] != call.start:  # reasoning ended within a token
            start = -1
        return replace(call, start=start, end=bisect_left(self._char_ends, call.end))


def make_splitter(dialect: Dialect, expected: ExpectedOutput) -> Splitter:
    return HeaderSplitter(dialect, expected) if dialect.header_format else MarkerSplitter(dialect, expected)


def parse_turn(tokens: Sequence[int], tokenizer: TokenizerWrapper, tools: Tools) -> ParsedTurn:
    """Content and calls (names, arguments in JSON) of a turn's sampled tokens, without its reasoning.

    `tokens` as in `SampledTurn`; `tools` are those of the request.  Raises ValueError where there is reasoning in them.
    Any thread.
    """
    parser = OutputParser(tokenizer, expected=ExpectedOutput(has_parts=True, tools=tools))
    parts = [part for token in tokens for part in parser.add(token)]
    parts += parser.finish()
    if any(isinstance(part, Reasoning) for part in parts):
        raise ValueError("there is reasoning among the calls")
    content = "".join(part.text for part in parts if isinstance(part, Text))
    return content, [(part.name, part.arguments) for part in parts if isinstance(part, ToolCall)]


def make_turn_parser(tokenizer: TokenizerWrapper) -> TurnParser:
    """`parse_turn` for one tokenizer."""
    return lambda tokens, tools: parse_turn(tokens, tokenizer, tools)
