"""How a model family writes tool calls, by what its tokenizer and template say."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper


@dataclass(frozen=True)
class ToolFormat:
    """Where a call begins and ends in the text, and how it is read."""

    name: str  # as mlx-lm names its parser, or one of ours
    start: str
    end: str  # "" where the end of the answer is the call's
    parse: Callable[[str, list[dict[str, Any]] | None], Any]  # raises whatever it likes


def tool_format(tokenizer: TokenizerWrapper) -> ToolFormat | None:
    """None where the model has no way to call tools that we know."""
    if not tokenizer.has_tool_calling:
        return None
    name = str(tokenizer.init_kwargs["tool_parser_type"])
    return ToolFormat(name, tokenizer.tool_call_start, tokenizer.tool_call_end, tokenizer.tool_parser)
