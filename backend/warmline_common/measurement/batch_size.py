"""Size of a batch of prompts, chosen by the durations of batches.  Pure; engine and estimates agree on it."""

from collections.abc import Sequence

SLOWNESS_MAX = 1.1  # seconds a prompt of a batch / those of the batch that takes the fewest


def choose_batch_size(batch_s: Sequence[float]) -> int:
    """Return how many of the first prompts to compute together, where `batch_s[i]` are the seconds for `i + 1`.

    Of the sizes that compute nearly as many prompts a second as the best one, it is that with the soonest first tokens
    in the mean, if the others follow in batches of its size; the largest of equals.
    """
    sizes = range(len(batch_s), 0, -1)
    prompt_s = {size: batch_s[size - 1] / size for size in sizes}
    slowest_s = min(prompt_s.values()) * SLOWNESS_MAX
    efficient = [size for size in sizes if prompt_s[size] <= slowest_s]
    return min(efficient, key=lambda size: prompt_s[size] * (len(batch_s) + size))
