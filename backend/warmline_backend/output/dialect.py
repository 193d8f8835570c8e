"""How a model's answers are marked, by what its tokenizer says: found once a tokenizer."""

from dataclasses import dataclass
from functools import cache, lru_cache

from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.output.formats import ToolFormat, tool_format
from warmline_backend.output.scanner import Scanner


@dataclass(frozen=True)
class Dialect:
    think_start: str  # "" where the model has no reasoning
    think_end: str
    calls: ToolFormat | None
    hidden: frozenset[int]  # special tokens that mark nothing here: no text of an answer

    def scanners(self, with_calls: bool) -> tuple[Scanner, Scanner, Scanner]:
        """Of what may follow in content, in reasoning and in a call."""
        return _scanners(self, with_calls)


@lru_cache(maxsize=8)
def dialect_of(tokenizer: TokenizerWrapper) -> Dialect:
    calls = tool_format(tokenizer)
    start, end = (tokenizer.think_start, tokenizer.think_end) if tokenizer.has_thinking else ("", "")
    markers = [start, end, *((calls.start, calls.end) if calls else ())]
    return Dialect(start, end, calls, _hidden(tokenizer, markers))


def _hidden(tokenizer: TokenizerWrapper, markers: list[str]) -> frozenset[int]:
    """Special tokens but those that markers are made of."""
    added = tokenizer.added_tokens_decoder
    special = {token for token, text in added.items() if text.special}
    return frozenset(token for token in special if not any(added[token].content in marker for marker in markers))


@cache
def _scanners(dialect: Dialect, with_calls: bool) -> tuple[Scanner, Scanner, Scanner]:
    calls = dialect.calls if with_calls else None
    around = (calls.start, calls.end) if calls else ()
    return (
        Scanner([dialect.think_start, dialect.think_end, *around]),
        Scanner([dialect.think_start, dialect.think_end]),
        Scanner([(calls.end or calls.start) if calls else ""]),
    )


def opens_reasoning(dialect: Dialect, tail: str) -> bool:
    """Whether a prompt that ends so has opened the reasoning, and not closed it."""
    start, end = dialect.think_start, dialect.think_end
    return bool(start) and tail.rfind(start) > tail.rfind(end)
