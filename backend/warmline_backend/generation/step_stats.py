"""What the engine's steps came to since the start, counted without a lock on its own thread; others get copies."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

# A decode step of a small model takes a millisecond, a chunk of a large one minutes.
STEP_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
BATCH_SEQUENCES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
FINISHES = ("stop", "length", "cancelled", "error", "discarded", "leaderless")


class StepHistogram:
    """How often a value was at most each of the ascending `bounds`, or beyond all; and the sum of all values."""

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

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound, "+Inf" the last, with how many values were at most that."""
        names = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))


def _make_seconds_histogram() -> StepHistogram:
    return StepHistogram(STEP_SECONDS)


def _make_batch_histogram() -> StepHistogram:
    return StepHistogram(BATCH_SEQUENCES)


def _make_finish_counter() -> Counter[str]:
    return Counter(dict.fromkeys(FINISHES, 0))


@dataclass
class StepStats:
    """The engine's own; `copy` is for everybody."""

    chunk_seconds: StepHistogram = field(default_factory=_make_seconds_histogram)
    decode_seconds: StepHistogram = field(default_factory=_make_seconds_histogram)  # steps of one batch each
    command_seconds: StepHistogram = field(
        default_factory=_make_seconds_histogram
    )  # what others have asked for, and tokens for nobody
    batch_sizes: StepHistogram = field(default_factory=_make_batch_histogram)  # sequences in a decode step
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    finish_counts: Counter[str] = field(default_factory=_make_finish_counter)  # generations by `Settled.finish`
    failed_steps: int = 0

    def record_chunk(self, tokens: int, seconds: float) -> None:
        self.prefilled_tokens += tokens
        self.chunk_seconds.add(seconds)

    def record_decode(self, sequences: int, seconds: float) -> None:
        self.batch_sizes.add(sequences)
        self.decode_seconds.add(seconds)

    def copy(self) -> "StepStats":
        return replace(
            self,
            chunk_seconds=self.chunk_seconds.copy(),
            decode_seconds=self.decode_seconds.copy(),
            command_seconds=self.command_seconds.copy(),
            batch_sizes=self.batch_sizes.copy(),
            finish_counts=self.finish_counts.copy(),
        )
