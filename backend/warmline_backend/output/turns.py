"""A turn's sampled tokens, read again: what a client was told of them."""

from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.output.events import Called, Said, Thought
from warmline_backend.output.expected import Expected
from warmline_backend.output.parser import OutputStream


def read_turn(
    tokens: Sequence[int], tokenizer: TokenizerWrapper, tools: list[dict[str, Any]] | None
) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls, as names and arguments in JSON, of what was sampled after the reasoning.

    `tokens` as in `SampledTurn`; `tools` are those of the request.  Raises ValueError where there is reasoning in them.
    Any thread.
    """
    stream = OutputStream(tokenizer, expected=Expected(marked=True, tools=tools))
    parts = [part for token in tokens for part in stream.add(token)]
    parts += stream.finish()
    if any(isinstance(part, Thought) for part in parts):
        raise ValueError("there is reasoning among the calls")
    content = "".join(part.text for part in parts if isinstance(part, Said))
    return content, [(part.name, part.arguments) for part in parts if isinstance(part, Called)]


def reader_of(
    tokenizer: TokenizerWrapper,
) -> Callable[[Sequence[int], list[dict[str, Any]] | None], tuple[str, list[tuple[str, str]]]]:
    """`read_turn` for one tokenizer."""
    return lambda tokens, tools: read_turn(tokens, tokenizer, tools)
