"""KV bytes of a request, and whether they can fit the memory budget.  Pure arithmetic, any thread."""

from warmline_backend.kv_cache.batch_caches import BUFFER_STEP_TOKENS, round_up_to_buffer
from warmline_backend.model.model import ServedModel

ANSWER_TOKENS_RESERVED = 256  # answer tokens that admission counts, at most


class KvTooLargeError(Exception):
    """The KV exceeds the memory budget even with everything else evicted."""


def sequence_bytes(served: ServedModel, tokens: int) -> int:
    """Bytes of one sequence of `tokens` tokens alone in its buffers, without checkpoint states."""
    return served.kv_bytes(round_up_to_buffer(tokens))


def sequence_tokens_max(served: ServedModel, budget_bytes: int) -> int:
    """Longest sequence, in tokens, that fits the budget alone in its buffers."""
    rows = max(0, budget_bytes - served.state_bytes) // max(1, served.row_bytes)
    return rows // BUFFER_STEP_TOKENS * BUFFER_STEP_TOKENS


def request_bytes(served: ServedModel, prompt_tokens: int, answer_tokens_max: int) -> int:
    """Bytes of a request with the part of its answer that admission counts."""
    return sequence_bytes(served, prompt_tokens + min(answer_tokens_max, ANSWER_TOKENS_RESERVED))


def restore_tokens(served: ServedModel, position: int, prompt_tokens: int, budget_bytes: int) -> int:
    """Tokens that the buffers of a restore get room for: those of the request that it is for, where known.

    Without room its first chunk would copy all that was restored.  Where the budget has none, only what is restored.
    """
    wanted = max(position, prompt_tokens + ANSWER_TOKENS_RESERVED if prompt_tokens else 0)
    return wanted if sequence_bytes(served, wanted) <= budget_bytes else position


def check_capacity(
    served: ServedModel, prompt_tokens: int, answer_tokens_max: int, budget_bytes: int, *, is_exact: bool = True
) -> None:
    """Raise KvTooLargeError for a prompt that would not fit even alone.

    A length that is not exact is one that the prompt exceeds.
    """
    needed = request_bytes(served, prompt_tokens, answer_tokens_max)
    if needed > budget_bytes:
        more = "" if is_exact else "more than "
        raise KvTooLargeError(
            f"the KV of {more}{prompt_tokens} prompt tokens and their answer takes {more}{needed / 1e6:.1f} MB, the "
            f"memory budget is {budget_bytes / 1e6:.1f} MB; shorten the prompt or raise --memory-budget-gb"
        )
