"""What an answer may be made of, by what was asked and how the prompt ends."""

from dataclasses import dataclass
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from warmline_backend.prompt.renderer import Rendered
from warmline_backend.request.response_format import form_of

_TAIL_TOKENS = 8  # of a prompt whose tail is not known: as many as the longest marker and what follows it have


@dataclass(frozen=True)
class Expected:
    """`tools` may be called; None: nothing is read as a call."""

    marked: bool = False  # reasoning and calls are told apart; else all of it is content, as for completions
    tail: str = ""  # the prompt's end, which may have opened the reasoning
    tools: list[dict[str, Any]] | None = None
    parallel: bool = True  # more than one call may be told
    formed: bool = False  # its content is held to a form, in which markers are text like any other


def expected_of(endpoint: str, body: dict[str, Any], rendered: Rendered, tokenizer: TokenizerWrapper) -> Expected:
    """Some templates open the reasoning in the user's message, so that a prompt has no tail which says so."""
    if endpoint != "chat":
        return Expected()
    return Expected(
        marked=True,
        tail=rendered.tail or str(tokenizer.decode(rendered.tokens[-_TAIL_TOKENS:])),
        tools=None if body.get("tool_choice") == "none" else rendered.tools,
        parallel=body.get("parallel_tool_calls") is not False,
        formed=form_of(body) is not None,
    )
