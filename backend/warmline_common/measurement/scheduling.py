"""Rules by which the engine schedules and the proxy estimates what it will do.  Pure."""

from collections.abc import Sequence

DECODE_SHARE = 0.25  # of the time while prompts prefill: a chunk may take as long as a thousand decode steps
PADDING_MAX = 1.25  # of a batch: rows computed / rows needed
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


def is_padding_small(lengths: Sequence[int]) -> bool:
    """True where sequences of these lengths may share a batch, which computes rows for the longest of them in each."""
    return len(lengths) * max(lengths) <= PADDING_MAX * sum(lengths)
