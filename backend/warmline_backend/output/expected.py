"""Parts that an answer may have, by the body and the prompt's end."""

from dataclasses import dataclass
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.prompt.renderer import RenderedPrompt
from warmline_backend.request.params import Fields, Tools, parse_parallel_tool_calls
from warmline_backend.request.response_format import parse_text_format

_TAIL_TOKENS = 8  # of a prompt with an unknown tail: as many as the longest marker and its line breaks have


@dataclass(frozen=True)
class ExpectedOutput:
    """Expected parts.  `tools` may be called; None: nothing is parsed as a call."""

    has_parts: bool = False  # reasoning and calls are parsed; else everything is content, as for completions
    tail: str = ""  # the prompt's end, which may have opened the reasoning
    tools: Tools = None
    parallel: bool = True  # several calls may be emitted
    is_constrained: bool = False  # content has a required format, in which markers are plain text


def make_expected_output(
    endpoint: str, body: dict[str, Any], rendered: RenderedPrompt, tokenizer: TokenizerWrapper
) -> ExpectedOutput:
    """Make the expectation of a body."""
    if endpoint != "chat":
        return ExpectedOutput()
    return ExpectedOutput(
        has_parts=True,
        # Unknown where the template opens the reasoning in the user's message.
        tail=rendered.tail or str(tokenizer.decode(list(rendered.tokens[-_TAIL_TOKENS:]))),
        tools=None if body.get("tool_choice") == "none" else rendered.tools,
        parallel=parse_parallel_tool_calls(Fields(body)),
        is_constrained=parse_text_format(body) is not None,
    )
