"""Dialect of a model's answers: markers of reasoning and calls, detected once a tokenizer."""

from dataclasses import dataclass
from functools import lru_cache

from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.output.headers import HARMONY, MUSE, HeaderFormat
from warmline_backend.output.markers import MarkerScanner
from warmline_backend.tool_parsers.registry import ToolFormat, detect_tool_format, is_harmony

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
    hidden_tokens: frozenset[int]  # special tokens that mark nothing here: no text of an answer

    @property
    def has_markers(self) -> bool:
        """True where answers have more than content."""
        return bool(self.think_start or self.tool_format or self.ignored_markers or self.header_format)


class DialectScanners:
    """Scanners for the markers in content, in reasoning, in trial calls within it, and in each kind of call."""

    def __init__(self, dialect: Dialect, with_calls: bool) -> None:
        calls = dialect.tool_format if with_calls else None
        call_markers = [calls, *calls.alternatives] if calls else []
        self.openings = {opening.start: opening for opening in call_markers if opening.start}
        think = (dialect.think_start, dialect.think_end)
        self.content = MarkerScanner([*think, *dialect.ignored_markers, *self.openings, *(o.end for o in call_markers)])
        self.trial = MarkerScanner(think)
        self.reasoning = MarkerScanner([*think, *self.openings])
        self.calls = {o.start: MarkerScanner([o.end] if o.end else [*self.openings]) for o in call_markers}


@lru_cache(maxsize=8)
def detect_dialect(tokenizer: TokenizerWrapper) -> Dialect:
    calls, vocabulary = detect_tool_format(tokenizer), tokenizer.get_vocab()
    headers = _detect_header_format(tokenizer, vocabulary)
    start, end = ("", "") if headers else _detect_think_markers(tokenizer, vocabulary)
    noise = tuple(tokenizer.structural_markers)
    markers = [start, end, *noise, *(headers.markers if headers else ())]
    for opening in (calls, *calls.alternatives) if calls else ():
        markers += [opening.start, opening.end]
    markers += (calls and calls.special_tokens) or ()
    return Dialect(start, end, calls, noise, headers, _find_hidden_tokens(tokenizer, markers))


@lru_cache(maxsize=16)
def get_scanners(dialect: Dialect, with_calls: bool) -> DialectScanners:
    return DialectScanners(dialect, with_calls)


def is_reasoning_open(dialect: Dialect, prompt_tail: str) -> bool:
    """True for a prompt's end that has opened the reasoning and not closed it."""
    start, end = dialect.think_start, dialect.think_end
    return bool(start) and prompt_tail.rfind(start) > prompt_tail.rfind(end)


def _detect_header_format(tokenizer: TokenizerWrapper, vocabulary: dict[str, int]) -> HeaderFormat | None:
    if is_harmony(vocabulary):
        return HARMONY
    return MUSE if tokenizer.response_initial_state == "header" else None


def _detect_think_markers(tokenizer: TokenizerWrapper, vocabulary: dict[str, int]) -> tuple[str, str]:
    if tokenizer.has_thinking:
        return str(tokenizer.think_start), str(tokenizer.think_end)
    return next(((start, end) for start, end in _THINK if start in vocabulary and end in vocabulary), ("", ""))


def _find_hidden_tokens(tokenizer: TokenizerWrapper, markers: list[str]) -> frozenset[int]:
    """Special tokens that are no part of a marker."""
    added = tokenizer.added_tokens_decoder
    return frozenset(
        token for token, text in added.items() if text.special and not any(text.content in marker for marker in markers)
    )
