"""How a model family writes tool calls, by what its tokenizer and template say."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.output.lenient import Unreadable
from warmline_backend.output.reading import Items, Written, plain_name, read_json_calls


@dataclass(frozen=True)
class ToolFormat:
    """Where a call begins and ends in the text, and how it is read."""

    name: str  # as mlx-lm names its parser, or one of ours
    start: str
    end: str  # "" where the end of the answer is the call's, or the next one's start
    # Text between the markers, whether the end marker was there, and the tools.  Raises ValueError.
    read: Callable[[str, bool, list[dict[str, Any]] | None], Items]


def tool_format(tokenizer: TokenizerWrapper) -> ToolFormat | None:
    """None where the model has no way to call tools that we know."""
    if not tokenizer.has_tool_calling:
        return None
    name = str(tokenizer.init_kwargs["tool_parser_type"])
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    if name == "json_tools":
        return ToolFormat(name, start, end, lambda text, whole, tools: read_json_calls(text, whole))
    return ToolFormat(name, start, end, _read_as_mlx_lm(tokenizer.tool_parser))


def _read_as_mlx_lm(parse: Callable[[str, list[dict[str, Any]] | None], Any]) -> Callable[..., Items]:
    def read(text: str, whole: bool, tools: list[dict[str, Any]] | None) -> Items:
        try:
            parsed = parse(text, tools)
            calls = parsed if isinstance(parsed, list) else [parsed]
            written: Items = [Written(plain_name(call["name"]), call["arguments"]) for call in calls]
        except Exception as error:
            raise Unreadable(str(error)) from error
        if not all(isinstance(item.arguments, dict) for item in written if isinstance(item, Written)):
            raise Unreadable("arguments must be an object")
        return written

    return read
