"""A turn's sampled tokens, read again: what a client was told of them."""

from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.output.events import Reasoning, Text, ToolCall
from warmline_backend.output.expected import ExpectedOutput
from warmline_backend.output.parser import OutputParser


def parse_turn(
    tokens: Sequence[int], tokenizer: TokenizerWrapper, tools: list[dict[str, Any]] | None
) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls, as names and arguments in JSON, of what was sampled after the reasoning.

    `tokens` as in `SampledTurn`; `tools` are those of the request.  Raises ValueError where there is reasoning in them.
    Any thread.
    """
    stream = OutputParser(tokenizer, expected=ExpectedOutput(has_parts=True, tools=tools))
    parts = [part for token in tokens for part in stream.add(token)]
    parts += stream.finish()
    if any(isinstance(part, Reasoning) for part in parts):
        raise ValueError("there is reasoning among the calls")
    content = "".join(part.text for part in parts if isinstance(part, Text))
    return content, [(part.name, part.arguments) for part in parts if isinstance(part, ToolCall)]


def make_turn_parser(
    tokenizer: TokenizerWrapper,
) -> Callable[[Sequence[int], list[dict[str, Any]] | None], tuple[str, list[tuple[str, str]]]]:
    """`read_turn` for one tokenizer."""
    return lambda tokens, tools: parse_turn(tokens, tokenizer, tools)
