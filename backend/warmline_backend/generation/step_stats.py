"""Counters of the engine's steps since the start: written on the engine thread without a lock, copied for others."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from warmline_backend.speculation.draft import SOURCES
from warmline_common.protocol.messages import DraftCount

# A decode step of a small model takes a millisecond, a chunk of a large one minutes.
STEP_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
BATCH_SEQUENCES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
FINISHES = ("stop", "length", "cancelled", "error", "discarded", "leaderless")


class StepHistogram:
    """Histogram over the ascending `bounds`, with a last bucket for larger values, and the sum of all values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.sum = bounds, 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> "StepHistogram":
        copied = StepHistogram(self.bounds)
        copied.sum, copied._counts = self.sum, self._counts.copy()
        return copied

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound, "+Inf" the last, with the number of values up to it."""
        names = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))


def _seconds_histogram() -> StepHistogram:
    return StepHistogram(STEP_SECONDS)


@dataclass
class StepStats:
    """Step durations, batch sizes, tokens, ends and failures.  Engine thread; other threads read a `copy`."""

    chunk_seconds: StepHistogram = field(default_factory=_seconds_histogram)
    decode_seconds: StepHistogram = field(default_factory=_seconds_histogram)  # each of one batch
    command_seconds: StepHistogram = field(default_factory=_seconds_histogram)  # commands and keepalive tokens
    batch_sizes: StepHistogram = field(default_factory=lambda: StepHistogram(BATCH_SEQUENCES))  # of decode steps
    finish_counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(FINISHES, 0)))
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    drafted_tokens: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(SOURCES, 0)))  # by source
    accepted_tokens: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(SOURCES, 0)))
    redraws: int = 0
    failed_steps: int = 0

    def record_chunk(self, tokens: int, seconds: float) -> None:
        self.prefilled_tokens += tokens
        self.chunk_seconds.add(seconds)

    def record_decode(self, sequences: int, seconds: float) -> None:
        self.batch_sizes.add(sequences)
        self.decode_seconds.add(seconds)

    def record_drafts(self, drafts: Mapping[str, DraftCount]) -> None:
        """Count the drafts of one answer, at its end."""
        for source, count in drafts.items():
            self.drafted_tokens[source] += count.drafted
            self.accepted_tokens[source] += count.accepted

    def copy(self) -> "StepStats":
        return StepStats(
            self.chunk_seconds.copy(),
            self.decode_seconds.copy(),
            self.command_seconds.copy(),
            self.batch_sizes.copy(),
            self.finish_counts.copy(),
            self.prefilled_tokens,
            self.decoded_tokens,
            self.drafted_tokens.copy(),
            self.accepted_tokens.copy(),
            self.redraws,
            self.failed_steps,
        )
