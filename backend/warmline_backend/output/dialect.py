"""Dialect of a model's answers: markers of reasoning and calls, detected once a tokenizer."""

from dataclasses import dataclass, replace
from functools import lru_cache

from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.output.headers import HARMONY, MUSE, HeaderFormat
from warmline_backend.output.markers import MarkerScanner
from warmline_backend.tool_parsers.registry import CallMarkers, ToolFormat, detect_tool_format, is_harmony

# Markers of reasoning that mlx-lm does not know.
_THINK = (
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)


@dataclass(frozen=True)
class Dialect:
    think_start: str  # "" where the model has no reasoning, or none between markers
    think_end: str
    tool_format: ToolFormat | None
    ignored_markers: tuple[str, ...]  # markers without meaning here
    header_format: HeaderFormat | None  # for answers that are messages with headers
    hidden_tokens: frozenset[int] = frozenset()  # special tokens that mark nothing here: no text of an answer

    @property
    def has_markers(self) -> bool:
        """True where answers have more than content."""
        return bool(self.think_start or self.tool_format or self.ignored_markers or self.header_format)

    @property
    def call_markers(self) -> tuple[CallMarkers, ...]:
        """All ways to begin a call."""
        return (self.tool_format, *self.tool_format.alternatives) if self.tool_format else ()

    def is_reasoning_open(self, prompt_tail: str) -> bool:
        """True for a prompt's end that has opened the reasoning and not closed it."""
        return bool(self.think_start) and prompt_tail.rfind(self.think_start) > prompt_tail.rfind(self.think_end)


class DialectScanners:
    """Scanners for the markers in content, in reasoning, in trial calls within it, and in each kind of call."""

    def __init__(self, dialect: Dialect, with_calls: bool) -> None:
        call_markers = dialect.call_markers if with_calls else ()
        self.openings = {opening.start: opening for opening in call_markers if opening.start}
        think = (dialect.think_start, dialect.think_end)
        self.content = MarkerScanner([*think, *dialect.ignored_markers, *self.openings, *(o.end for o in call_markers)])
        self.trial = MarkerScanner(think)
        self.reasoning = MarkerScanner([*think, *self.openings])
        self.calls = {o.start: MarkerScanner([o.end] if o.end else [*self.openings]) for o in call_markers}


get_scanners = lru_cache(maxsize=16)(DialectScanners)


@lru_cache(maxsize=8)
def detect_dialect(tokenizer: TokenizerWrapper) -> Dialect:
    calls, vocabulary = detect_tool_format(tokenizer), tokenizer.get_vocab()
    headers = HARMONY if is_harmony(vocabulary) else MUSE if tokenizer.response_initial_state == "header" else None
    start, end = ("", "") if headers else _detect_think_markers(tokenizer, vocabulary)
    dialect = Dialect(start, end, calls, tuple(tokenizer.structural_markers), headers)
    markers = {start, end, *dialect.ignored_markers, *(headers.markers if headers else ())}
    markers.update((calls and calls.special_tokens) or (), *((o.start, o.end) for o in dialect.call_markers))
    special = {token: text.content for token, text in tokenizer.added_tokens_decoder.items() if text.special}
    hidden = (token for token, text in special.items() if not any(text in marker for marker in markers))
    return replace(dialect, hidden_tokens=frozenset(hidden))


def _detect_think_markers(tokenizer: TokenizerWrapper, vocabulary: dict[str, int]) -> tuple[str, str]:
    if tokenizer.has_thinking:
        return str(tokenizer.think_start), str(tokenizer.think_end)
    return next(((start, end) for start, end in _THINK if start in vocabulary and end in vocabulary), ("", ""))
