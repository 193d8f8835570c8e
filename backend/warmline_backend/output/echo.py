"""What a completion with `echo` says before its answer.  Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper


def render_echo(body: Mapping[str, Any], tokens: Sequence[int], tokenizer: TokenizerWrapper) -> str:
    """The prompt as it was sent, or, where it was sent as token ids, what these read as.

    `body` was rendered to `tokens`, so its prompt is a text, a list of ids, or a list of one of these.
    """
    prompt = body["prompt"]
    if isinstance(prompt, list) and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
