"""Batch sizes: throughput first, then the mean of the first tokens."""

import pytest

from warmline_common.measurement.scheduling import choose_batch_size


@pytest.mark.parametrize(
    ("fixed_ms", "prompt_ms", "count", "size"),
    [
        (8, 20, 8, 3),  # larger batches compute hardly more prompts a second, and all of their first tokens come late
        (18, 20, 8, 5),
        (8, 20, 2, 2),
        (0, 20, 8, 1),  # nothing is gained by a batch
        (20, 1, 8, 8),  # alone, most of the time would be lost
        (20, 10, 8, 6),
        (0, 0, 8, 8),  # nothing is known
    ],
)
def test_batch_size_follows_measured_durations(fixed_ms: float, prompt_ms: float, count: int, size: int) -> None:
    assert choose_batch_size([fixed_ms + prompt_ms * n for n in range(1, count + 1)]) == size
