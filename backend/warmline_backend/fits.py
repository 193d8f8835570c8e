"""Whether a request can ever fit the memory budget.  Pure arithmetic, on any thread."""

from warmline_backend.lineup import ANSWER_TOKENS_RESERVED, room
from warmline_backend.model import ServedModel


class TooLarge(Exception):
    """The KV can't fit the memory budget, whatever is dropped."""


def check_fits(served: ServedModel, prompt_tokens: int, answer_tokens_max: int, budget_bytes: int) -> None:
    """Raises TooLarge for a prompt that would not fit even if it was alone, so that nobody waits for it in vain."""
    needed = served.bytes_of(room(prompt_tokens + min(answer_tokens_max, ANSWER_TOKENS_RESERVED)))
    if needed > budget_bytes:
        raise TooLarge(
            f"the KV of {prompt_tokens} prompt tokens and their answer takes {needed / 1e6:.1f} MB, the memory budget "
            f"is {budget_bytes / 1e6:.1f} MB; shorten the prompt or raise --memory-budget-gb"
        )
