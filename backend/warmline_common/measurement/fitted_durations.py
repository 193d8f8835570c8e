"""Recent durations of one kind of work, with the model that fits them.  One thread."""

from collections.abc import Sequence

from warmline_common.measurement.duration_model import DurationModel, fit_durations
from warmline_common.measurement.recent_durations import RecentDurations, WorkDuration

# A fit takes a fraction of a millisecond.
DURATIONS_PER_FIT = 4
DURATIONS_FITTED_AT_ONCE = 16
# Assumed of prefill chunks until some are measured, by their tokens and the tokens before them.
CHUNK_ASSUMED = DurationModel(0.005, 0.002, 1e-7)
CHUNK_SIZES = ((64, 32), (2_048, 1_024), (2_048, 30_000))


class FittedDurations:
    """Recent durations with a model, which is fitted when it is asked for and enough has been added.

    `assumed` is the model until then, and its shape stands at the `sizes` (amount and context) where nothing is
    measured.
    """

    def __init__(self, assumed: DurationModel, sizes: Sequence[tuple[int, int]]) -> None:
        self.assumed, self._sizes = assumed, sizes
        self._recent = RecentDurations()
        self._model = assumed
        self._count = self._unfitted_count = 0

    def add(self, duration: WorkDuration) -> None:
        self._recent.add(duration)
        self._count += 1
        self._unfitted_count += 1

    def list_usual(self) -> list[WorkDuration]:
        """As of `RecentDurations`."""
        return self._recent.list_usual()

    @property
    def model(self) -> DurationModel:
        if not self._count:
            return self.assumed
        if self._unfitted_count >= (DURATIONS_PER_FIT if self._count > DURATIONS_FITTED_AT_ONCE else 1):
            self._model = fit_durations(self._recent.list_usual(), self.assumed, self._sizes)
            self._unfitted_count = 0
        return self._model


def make_chunk_durations() -> FittedDurations:
    """Durations of prefill chunks; none measured yet."""
    return FittedDurations(CHUNK_ASSUMED, CHUNK_SIZES)
