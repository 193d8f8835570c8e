"""How a model's answers are marked, by what its tokenizer says: found once a tokenizer."""

from dataclasses import dataclass
from functools import lru_cache

from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.output.headers import HARMONY, MUSE, Headers
from warmline_backend.output.markers import Scanner
from warmline_backend.tool_parsers.registry import ToolFormat, is_harmony, tool_format

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
    calls: ToolFormat | None
    noise: tuple[str, ...]  # markers that say nothing
    headers: Headers | None  # where an answer is messages, each with a header that says what it is
    hidden: frozenset[int]  # special tokens that mark nothing here: no text of an answer

    @property
    def marked(self) -> bool:
        """There is more to its answers than content."""
        return bool(self.think_start or self.calls or self.noise or self.headers)


class Scanners:
    """Of what may follow in content, in reasoning, in calls that may belong to it, and in each kind of call."""

    def __init__(self, dialect: Dialect, with_calls: bool) -> None:
        calls = dialect.calls if with_calls else None
        openings = [calls, *calls.others] if calls else []
        self.openings = {opening.start: opening for opening in openings if opening.start}
        think = (dialect.think_start, dialect.think_end)
        self.content = Scanner([*think, *dialect.noise, *self.openings, *(o.end for o in openings)])
        self.reasoned = Scanner(think)
        self.thought = Scanner([*think, *self.openings])
        self.calls = {o.start: Scanner([o.end] if o.end else [*self.openings]) for o in openings}


@lru_cache(maxsize=8)
def dialect_of(tokenizer: TokenizerWrapper) -> Dialect:
    calls, vocabulary = tool_format(tokenizer), tokenizer.get_vocab()
    headers = _headers(tokenizer, vocabulary)
    start, end = ("", "") if headers else _think_markers(tokenizer, vocabulary)
    noise = tuple(tokenizer.structural_markers)
    markers = [start, end, *noise, *(headers.words if headers else ())]
    for opening in (calls, *calls.others) if calls else ():
        markers += [opening.start, opening.end]
    markers += (calls and calls.words) or ()
    return Dialect(start, end, calls, noise, headers, _hidden(tokenizer, markers))


@lru_cache(maxsize=16)
def scanners_of(dialect: Dialect, with_calls: bool) -> Scanners:
    return Scanners(dialect, with_calls)


def opens_reasoning(dialect: Dialect, tail: str) -> bool:
    """Whether a prompt that ends so has opened the reasoning, and not closed it."""
    start, end = dialect.think_start, dialect.think_end
    return bool(start) and tail.rfind(start) > tail.rfind(end)


def _headers(tokenizer: TokenizerWrapper, vocabulary: dict[str, int]) -> Headers | None:
    if is_harmony(vocabulary):
        return HARMONY
    return MUSE if tokenizer.response_initial_state == "header" else None


def _think_markers(tokenizer: TokenizerWrapper, vocabulary: dict[str, int]) -> tuple[str, str]:
    if tokenizer.has_thinking:
        return str(tokenizer.think_start), str(tokenizer.think_end)
    return next(((start, end) for start, end in _THINK if start in vocabulary and end in vocabulary), ("", ""))


def _hidden(tokenizer: TokenizerWrapper, markers: list[str]) -> frozenset[int]:
    """Special tokens but those that markers are made of."""
    added = tokenizer.added_tokens_decoder
    return frozenset(
        token for token, text in added.items() if text.special and not any(text.content in marker for marker in markers)
    )
