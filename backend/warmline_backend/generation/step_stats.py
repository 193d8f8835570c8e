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


class Spread:
    """How often a value was at most each of the ascending `bounds`, or beyond all; and the sum of all values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.sum = bounds, 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> "Spread":
        copied = Spread(self.bounds)
        copied.sum, copied._counts = self.sum, self._counts.copy()
        return copied

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound, "+Inf" the last, with how many values were at most that."""
        names = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))


def _seconds() -> Spread:
    return Spread(STEP_SECONDS)


def _batches() -> Spread:
    return Spread(BATCH_SEQUENCES)


def _none() -> Counter[str]:
    return Counter(dict.fromkeys(FINISHES, 0))


@dataclass
class Tally:
    """The engine's own; `copy` is for everybody."""

    chunks: Spread = field(default_factory=_seconds)
    decodes: Spread = field(default_factory=_seconds)  # steps of one batch each
    commands: Spread = field(default_factory=_seconds)  # what others have asked for, and tokens for nobody
    batches: Spread = field(default_factory=_batches)  # sequences in a decode step
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    ended: Counter[str] = field(default_factory=_none)  # generations by `Settled.finish`
    failed_steps: int = 0

    def chunk(self, tokens: int, seconds: float) -> None:
        self.prefilled_tokens += tokens
        self.chunks.add(seconds)

    def decode(self, sequences: int, seconds: float) -> None:
        self.batches.add(sequences)
        self.decodes.add(seconds)

    def copy(self) -> "Tally":
        return replace(
            self,
            chunks=self.chunks.copy(),
            decodes=self.decodes.copy(),
            commands=self.commands.copy(),
            batches=self.batches.copy(),
            ended=self.ended.copy(),
        )
