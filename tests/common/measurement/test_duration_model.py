"""Usual durations, and models fitted to them: close to the truth, and indifferent to outliers."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmline_common.measurement.duration_model import DurationModel, fit_durations
from warmline_common.measurement.recent_durations import CLASSES_MAX, RECENT_MAX, RecentDurations, WorkDuration

ASSUMED = DurationModel(0.005, 0.002, 1e-7)
SIZES = ((64, 32), (2_048, 1_024), (2_048, 30_000))


def fit(recent: RecentDurations) -> DurationModel:
    return fit_durations(recent.list_usual(), ASSUMED, SIZES)


def test_usual_duration_is_median_of_its_class() -> None:
    recent = RecentDurations()
    for seconds in (1.0, 9.0, 1.2, 1.1):
        recent.add(WorkDuration(amount=1_000, context=5_000, seconds=seconds))
    recent.add(WorkDuration(amount=10, seconds=0.1))
    long, short = recent.list_usual()
    assert (long.amount, long.context, long.seconds, long.count) == (1_000, 5_000, 1.1, 4)
    assert (short.amount, short.seconds, short.count) == (10, 0.1, 1)


def test_usual_duration_follows_slower_machine() -> None:
    recent = RecentDurations()
    for seconds in [1.0] * 20 + [3.0] * (RECENT_MAX // 2 + 1):
        recent.add(WorkDuration(amount=1_000, seconds=seconds))
    assert recent.list_usual()[0].seconds == 3.0


def test_classes_are_bounded() -> None:
    recent = RecentDurations()
    for power in range(12):
        for other in range(12):
            recent.add(WorkDuration(amount=1 << power, context=1 << other, seconds=1.0))
    assert len(recent.list_usual()) == CLASSES_MAX
    assert max(each.amount for each in recent.list_usual()) == 1 << 11, "the newest stay"


@pytest.mark.parametrize(
    "truth",
    [
        DurationModel(0.004, 0.0005, 3e-8),
        DurationModel(0.3, 0.002, 0.0),  # a large model on a device that is fast for long chunks
        DurationModel(0.0, 0.0001, 5e-8),
    ],
)
def test_fit_is_close_despite_noise_and_outliers(truth: DurationModel) -> None:
    noise, recent = random.Random(7), RecentDurations()
    for number in range(400):
        tokens, context = noise.choice((16, 100, 300, 700, 2_048)), noise.randrange(30_000)
        outlier = 10 if number % 10 == 0 else 1
        seconds = truth.estimate_s(tokens, context) * noise.uniform(0.85, 1.15) * outlier
        recent.add(WorkDuration(amount=tokens, context=context, seconds=seconds))
    model = fit(recent)
    for tokens, context in ((50, 25), (500, 250), (2_048, 1_024), (2_048, 20_000)):
        assert model.estimate_s(tokens, context) == pytest.approx(truth.estimate_s(tokens, context), rel=0.2)


def test_fit_of_one_duration_keeps_assumed_shape() -> None:
    recent = RecentDurations()
    recent.add(WorkDuration(amount=512, context=256, seconds=10 * ASSUMED.estimate_s(512, 256)))
    for tokens, context in ((16, 8), (512, 256), (2_048, 10_000)):
        assert fit(recent).estimate_s(tokens, context) == pytest.approx(10 * ASSUMED.estimate_s(tokens, context))


def test_fit_of_nothing_is_assumed_model() -> None:
    assert fit(RecentDurations()) == ASSUMED


usual_durations = st.builds(
    WorkDuration,
    amount=st.integers(0, 1 << 34),
    context=st.integers(0, 1 << 20),
    seconds=st.floats(0.0, 1e5),
    count=st.integers(1, RECENT_MAX),
)


@settings(max_examples=100)
@given(st.lists(usual_durations, max_size=12))
def test_estimates_are_never_negative_and_grow_with_size(usual: list[WorkDuration]) -> None:
    model = fit_durations(usual, ASSUMED, SIZES)
    seconds = [model.estimate_s(amount, context) for amount, context in ((0, 0), (100, 0), (100, 50), (9_000, 50))]
    assert seconds == sorted(seconds) and seconds[0] >= 0.0
