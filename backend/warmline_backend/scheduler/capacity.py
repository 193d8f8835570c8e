"""What a request takes, and whether it can ever fit the memory budget.  Pure arithmetic, on any thread."""

from warmline_backend.kv_cache.codecs import BUFFER_STEP_TOKENS, round_up_to_buffer
from warmline_backend.model.model import ServedModel

ANSWER_TOKENS_RESERVED = 256  # admission counts this much of an answer that may be longer


class KvTooLargeError(Exception):
    """The KV can't fit the memory budget, whatever is dropped."""


def sequence_bytes(served: ServedModel, tokens: int) -> int:
    """A sequence of `tokens` alone in its buffers, states that are kept on the way left out."""
    return served.kv_bytes(round_up_to_buffer(tokens))


def sequence_tokens_max(served: ServedModel, budget_bytes: int) -> int:
    """How long a sequence alone in its buffers may become."""
    rows = max(0, budget_bytes - served.state_bytes) // max(1, served.row_bytes)
    return rows // BUFFER_STEP_TOKENS * BUFFER_STEP_TOKENS


def request_bytes(served: ServedModel, prompt_tokens: int, answer_tokens_max: int) -> int:
    """The same of a request by the time that a part of its answer is there."""
    return sequence_bytes(served, prompt_tokens + min(answer_tokens_max, ANSWER_TOKENS_RESERVED))


def check_capacity(served: ServedModel, prompt_tokens: int, answer_tokens_max: int, budget_bytes: int) -> None:
    """Raises TooLarge for a prompt that would not fit even if it was alone, so that nobody waits for it in vain."""
    needed = request_bytes(served, prompt_tokens, answer_tokens_max)
    if needed > budget_bytes:
        raise KvTooLargeError(
            f"the KV of {prompt_tokens} prompt tokens and their answer takes {needed / 1e6:.1f} MB, the memory budget "
            f"is {budget_bytes / 1e6:.1f} MB; shorten the prompt or raise --memory-budget-gb"
        )
